"""The trainer's view of a model: two functions, the names of its axes, and its layout
on a mesh.

Any library's model fits: `init` gives a nested dict of f32 arrays, `loss` takes one of
the same structure. Shapes: `B` sequences, `T` tokens predicted of each.

A model names the axes of its arrays, and the island's rules turn names into mesh axes.
Without constraints the partitioner is free to gather activations where gathering the
weights is cheaper, and to leave a weight's gradient whole on every device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from diloco_jax.data.pictures import PictureInput
from diloco_jax.data.source import TOKENS, Field, Fields, fields_of_batch
from diloco_jax.errors import ConfigError

ROWS = ("row_losses", "row_tokens")
"""Metrics that a loss may give, f32 [B]: the weighted sum of a row's losses, and the
sum of its weights. They make a mixture's losses by source."""

Params = dict[str, Any]
Axes = dict[str, Any]
Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


class Use(NamedTuple):
    """How often the rows of a tensor's first axis (after "layers") are used."""

    counted: Callable[[Mapping[str, np.ndarray]], np.ndarray] | str
    """Returns the counts of some rows of a batch, [B, ...] by name, on the host: uint32
    [rows] or [layers, rows]. Text: the name of a metric of `loss` that has them, of the
    whole batch, in such a shape."""
    per_token: float = 1
    """Rows that a token uses at most."""
    as_one: bool = False
    """True: all rows are used together, and of all layers; counts have the shape
    [1]."""


def _nothing() -> Iterator[Any]:
    raise ConfigError(
        "the weights that the model leaves as they are were not given: they are read "
        "where a run starts or goes on"
    )


class Frozen(NamedTuple):
    """Parameters that a run uses and leaves as they are: they make no pieces, gradients
    or moments. Every island has them, of one digest."""

    shapes: Params
    """Nested dict of `jax.ShapeDtypeStruct`, in the dtype in which they rest."""
    axes: Axes
    """As `Model.axes`."""
    leaves: Callable[[], Iterator[Any]] = _nothing
    """Returns the arrays in the order of `jax.tree.leaves(shapes)`, one at a time."""
    digest: Callable[[], str] = str
    """Returns 16 hex digits over all of them."""

    def require(self, digest: str) -> None:
        """Raise ConfigError unless the parameters here are a run's, by its digest; ""
        is not compared."""
        if digest and (here := self.digest()) != digest:
            raise ConfigError(
                f"model.frozen_digest = {digest} in the run's config, but the weights "
                f"here (model.weights) have {here}: they have changed, or are others; "
                f"put the run's there (an island takes --model.weights hf:DIR)"
            )


class Model(NamedTuple):
    """A model as pure functions.

    `init(key) -> params`: nested dict of f32 arrays.
    `loss(params, batch) -> (loss, metrics)`: what is minimised, f32 scalar; metrics has
    "loss", the mean cross entropy of the next token in nats, which is told and
    evaluated and mostly the same, and "tokens", the sum of the weights that the mean
    was taken over. With `ROWS` it tells of each row, too. A batch has the arrays
    of `batch`, each with an axis [B] in front, and in validation always "weights", f32
    [B, T], 0 where a prediction does not count (`split_batch`); in a mixture also
    "source_number", that of each row's source, int32 [B].
    `axes`: the structure of params with a tuple of logical names for each array:
    "layers" (leading, of stacked tensors), "expert" (leading or after it, likewise),
    "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "router".
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[..., tuple[jax.Array, Metrics]] | None
    """None: only a train loop of the user's own knows it (`loop_model`)."""
    axes: Axes
    batch: Fields = MappingProxyType({"tokens": TOKENS})
    """Arrays of a row by name. Data with "segments" is for models that have them here,
    and let nothing cross from one document to another."""
    frozen: Frozen | None = None
    """Parameters that are not trained; `loss` takes them as a third argument."""
    pictures: PictureInput | None = None
    """The pictures that it takes; `batch` then has the arrays of its `fields`."""
    uses: Mapping[str, Use] = MappingProxyType({})
    """Tensors that only some tokens touch, by path, joined with "/". The use of a row
    is its weight in a merge, where `sync.weights_by_use` says so."""
    draw: Callable[[jax.Array], Params] | None = None
    """As `init`, bit for bit, for `core.fragments.get_piece`: of large parameters no
    more than a layer is drawn at a time. None: `init` draws all at once."""

    def fields(self, arrays: Collection[str]) -> dict[str, Field]:
        """Return the arrays of a training batch by name. arrays: names of those that
        the data has (`data.arrays`). Raises ConfigError: see `fields_of_batch`."""
        return fields_of_batch(self.batch, arrays)

    def shapes(self) -> Params:
        """Return `jax.ShapeDtypeStruct` of every parameter; compile nothing."""
        shapes: Params = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return shapes

    def require_loss(
        self,
    ) -> Callable[[Params, Batch, Params], tuple[jax.Array, Metrics]]:
        """Return the loss of parameters, a batch and the frozen parameters, {} if there
        are none; raise ConfigError if only a train loop knows it."""
        if self.loss is None:
            raise ConfigError(
                "the function of model.factory gives no loss, so only train loops that "
                "call diloco_jax.join can train this model; to run islands of the "
                "product's own, to evaluate, emulate, replay or plan, have it return a "
                "Model with a loss (docs/models.md)"
            )
        loss = self.loss
        if self.frozen is not None:
            return loss
        return lambda params, batch, frozen: loss(params, batch)


def loop_model(init: Callable[[jax.Array], Any], axes: Axes | None = None) -> Model:
    """Return a model without a loss, for runs whose islands are all train loops that
    join.

    Args:
      init: returns the first parameters for a key, any pytree of f32 arrays.
      axes: as in `Model`, for the tree that `named` returns; None: every array is one
        piece, and none is an embedding.
    """

    def first(key: jax.Array) -> Params:
        return named(init(key))

    shapes = jax.eval_shape(first, jax.random.key(0))
    return Model(first, None, plain_axes(shapes) if axes is None else axes)


def plain_axes(params: Params) -> Axes:
    """Return axes without names, for arrays or shapes."""
    axes: Axes = jax.tree.map(lambda leaf: (None,) * len(leaf.shape), params)
    return axes


def named(tree: Any) -> Params:
    """Return a pytree as a nested dict of its leaves, keyed by their paths.

    A tree of nested dicts with text as keys is returned with the same keys.

    Raises:
      ValueError: two leaves have one path, or a leaf has none.
    """
    params: Params = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        node = params
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not keys or not isinstance(node, dict) or keys[-1] in node:
            raise ValueError(
                f"the leaf at {'/'.join(keys) or 'the top'} has no name of its own; "
                f"parameters are a tree with a path for each array"
            )
        node[keys[-1]] = leaf
    return params


def abstract_batch(
    fields: Fields, rows: int, sequence_length: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a batch of `rows` rows without values. sequence_length: T."""
    return {
        name: jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            (rows, *field.shape_of(sequence_length)), field.dtype
        )
        for name, field in fields.items()
    }


def split_batch(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return inputs and targets, int32 [B, T], and weights, f32 [B, T].

    Where the batch has "segments", a weight is 0 if its target is of another document
    than its input, or padding.
    """
    tokens = batch["tokens"]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    weights = batch.get("weights", jnp.ones(inputs.shape, jnp.float32))
    if "segments" in batch:
        here, there = batch["segments"][:, :-1], batch["segments"][:, 1:]
        weights = jnp.where((here == there) & (there != 0), weights, 0)
    return inputs, targets, weights


def weighted_loss(losses: jax.Array, weights: jax.Array) -> tuple[jax.Array, Metrics]:
    """Return the weighted mean of losses, f32 [B, T]; 0 if all weights are 0."""
    tokens = jnp.sum(weights)
    loss = jnp.sum(losses * weights) / jnp.maximum(tokens, 1.0)
    rows = jnp.sum(losses * weights, axis=1), jnp.sum(weights, axis=1)
    return loss, {"loss": loss, "tokens": tokens, **dict(zip(ROWS, rows, strict=True))}


Names = tuple[str | None, ...]
"""Logical names of an array's axes."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with Auto axes, and the mesh axes that cut an axis, by logical name."""

    mesh: Mesh
    rules: Mapping[str, tuple[str, ...]]
    """Rules for activations, and for weights in use."""
    at_rest: Callable[[Names, tuple[int, ...]], PartitionSpec]
    """Function of a weight's names and shape that returns its cut between its uses."""

    @classmethod
    def of_one_device(cls) -> Layout:
        """Return the layout on the default device alone."""
        devices = np.array(jax.devices()[:1], dtype=object)
        mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
        return cls(mesh, {}, lambda names, shape: PartitionSpec())  # type: ignore[no-untyped-call]

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices: "cpu", "gpu", "tpu"."""
        platform: str = self.mesh.devices.flat[0].platform
        return platform

    def ways(self, name: str | None) -> int:
        """Return the number of parts into which the rules cut an axis of that name."""
        return math.prod(
            self.mesh.shape[axis] for axis in self.rules.get(name or "", ())
        )

    def spec(self, names: Names, shape: tuple[int, ...]) -> PartitionSpec:
        """Cut each axis by the rules. An axis stays whole if it has no rule, or if the
        mesh axes do not divide it."""
        return PartitionSpec(*map(self._cut, names, shape))  # type: ignore[no-untyped-call]

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """Return x, cut as `spec` says."""
        return x if self.mesh.size == 1 else self._cut_by(x, self.spec(names, x.shape))

    def gather(self, weight: jax.Array, names: Names) -> jax.Array:
        """Gather a weight for its use, cut as `spec` says, from the devices' parts.

        Its gradient is cut like the weight at rest: a device gets the sum of its own
        part. The gradient of `constrain` would be summed whole on every device."""
        if self.mesh.size == 1:
            return weight
        rest = self.at_rest(names, weight.shape)

        @jax.custom_vjp
        def gathered(weight: jax.Array) -> jax.Array:
            return self.constrain(weight, names)

        gathered.defvjp(
            lambda weight: (self.constrain(weight, names), None),
            lambda _, gradient: (self._cut_by(gradient, rest),),
        )
        used: jax.Array = gathered(weight)
        return used

    def _cut_by(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(self.mesh, spec)
        cut: jax.Array = jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]
        return cut

    def _cut(self, name: str | None, extent: int) -> tuple[str, ...] | None:
        ways = self.ways(name)
        return self.rules[name] if name and ways > 1 and extent % ways == 0 else None
