"""The inner step: one batch, one update of an island's parameters, on its own mesh;
and how often the rows of a tensor were used by the steps of a fragment's delta.

`B` sequences, `T` tokens predicted, `A` rounds of gradient accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.config.config import check_batch
from diloco_jax.core.codecs import encode_uses
from diloco_jax.core.fragments import LAYERS, FragmentPlan
from diloco_jax.core.inner import by_source
from diloco_jax.data.pictures import PICTURES
from diloco_jax.data.reader import Batch, OwnRows
from diloco_jax.data.source import DERIVED, WEIGHTS, Fields
from diloco_jax.island.device.mesh import (
    abstract,
    batch_sharding,
    param_shardings,
    place,
    replicated,
    shardings_like_params,
    zeros,
)
from diloco_jax.island.device.programs import in_turn
from diloco_jax.models.model import (
    ROWS,
    Frozen,
    Metrics,
    Model,
    Params,
    Use,
    abstract_batch,
)

T = TypeVar("T")


def unless(stays: jax.Array, change: Callable[[T], T], tree: T, platform: str) -> T:
    """Return `change(tree)`, or the tree as it is if `stays`, a bool scalar, is true.

    On CPU it is a branch: XLA copies the moments there for a choice between old and new
    ones, which takes a twelfth of a step of 25 M parameters and 512 tokens. Elsewhere
    the choice is fused, and a branch would keep the collectives in it from overlapping.
    """
    if platform == "cpu":
        chosen: T = jax.lax.cond(stays, lambda old: old, change, tree)
        return chosen
    new: T = jax.tree.map(lambda a, b: jnp.where(stays, b, a), change(tree), tree)
    return new


Placed = Mapping[str, jax.Array]
"""Arrays of a batch by name, [B, ...], on the devices."""


class TrainState(NamedTuple):
    """State that a step changes. `step` consumes it: do not keep references to its
    arrays."""

    params: Params
    opt_state: optax.OptState


def abstract_state(
    model: Model, inner: optax.GradientTransformation, mesh: Mesh | AbstractMesh
) -> tuple[TrainState, Params]:
    """Return shapes, dtypes and shardings of the state, and of the frozen parameters
    ({} if there are none). The mesh needs no devices."""
    shapes, frozen = model.shapes(), model.frozen or Frozen({}, {})
    lies = param_shardings(mesh, model.axes, shapes)
    moments = jax.eval_shape(inner.init, shapes)
    state = TrainState(
        _laid(shapes, lies),
        _laid(moments, shardings_like_params(moments, shapes, lies, replicated(mesh))),
    )
    rest = param_shardings(mesh, frozen.axes, frozen.shapes)
    return state, _laid(frozen.shapes, rest)


class Trainer:
    """A model, its inner optimizer and a mesh, as compiled functions."""

    def __init__(
        self,
        model: Model,
        inner: optax.GradientTransformation,
        island: IslandConfig,
        mesh: Mesh,
        arrays: Collection[str] = ("tokens",),
        frozen_digest: str = "",
        sources: int = 0,
    ):
        """inner: its updates at learning rate 1. arrays: names of those that the data
        has (`data.arrays`). frozen_digest: that of the run's frozen parameters; empty:
        they are not compared. sources: number of a mixture's sources, if the step is to
        tell their losses.

        Raises ConfigError if the batch does not divide over the mesh and accumulation
        rounds, if the model has no loss, or if it does not take such data.
        """
        check_batch(island)
        self.fields: Fields = model.fields(arrays)
        """Arrays of a training batch by name."""
        self.mesh = mesh
        self.anchor_memory = island.anchor_memory
        self.batch_size = island.batch_size
        self._loss, self._init = model.require_loss(), model.init
        self._frozen_source = model.frozen or Frozen({}, {}, lambda: iter(()))
        self._frozen_digest = frozen_digest
        self.inner = inner
        self._accumulation = island.accumulation
        self._sources = sources if "source_number" in self.fields else 0
        self._abstract, self._frozen = abstract_state(model, inner, mesh)
        self._lies = jax.tree.map(lambda leaf: leaf.sharding, self._abstract)
        self.shardings = self._lies.params
        shapes = self._abstract.params
        self._use_metrics = {
            name: shape
            for path, shape in use_shapes(model.uses, model.axes, shapes).items()
            if isinstance(name := model.uses[path].counted, str)
        }
        whole = replicated(mesh)
        self._init_inner = jax.jit(inner.init, out_shardings=self._lies.opt_state)
        self._step = jax.jit(
            self.update, donate_argnums=0, out_shardings=(self._lies, whole)
        )
        self._eval = jax.jit(self._evaluate, out_shardings=whole)

    def step(
        self, state: TrainState, batch: Placed, learning_rate: float
    ) -> tuple[TrainState, Metrics]:
        """Make one update; return at once, while the devices go on with it.

        Args:
          state: consumed.
          batch: arrays by name, from `put_batch`.
          learning_rate: scales the updates; any value, without another compilation.

        Returns:
          The new state and metrics, f32 scalars: "loss" (nats per token, mean over
          the batch), "tokens" (the sum of the weights of that mean), "grad_norm",
          "skipped". Where loss or gradient is not finite, skipped is 1 and the state
          is as it was. In a mixture also "by_source", f32 [S, 2], sums of losses and
          of weights; zeros if the model does not tell them by row (`model.ROWS`).
        """
        with jax.set_mesh(self.mesh):
            rate = np.float32(learning_rate)
            new, metrics = self._step(state, batch, rate, self.frozen)
        return new, metrics

    @functools.cached_property
    def frozen(self) -> Params:
        """The model's frozen parameters on the island's devices; {} if it has none.
        They are read at the first use.

        Raises ConfigError if they are not the run's.
        """
        source = self._frozen_source
        source.require(self._frozen_digest)
        like, structure = jax.tree.flatten(self._frozen)
        placed = [
            place(np.asarray(leaf).astype(own.dtype, copy=False), own.sharding)
            for leaf, own in zip(source.leaves(), like, strict=True)
        ]
        made: Params = jax.tree.unflatten(structure, placed)
        return made

    def eval_step(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return the sum of losses (nats) and of weights, f32 scalars, not yet waited
        for.

        batch: of `ValidationBatches`, on the host.
        """
        with jax.set_mesh(self.mesh):
            total, weight = self._eval(params, self.put_batch(batch), self.frozen)
        return total, weight

    def place_params(self, params: Params) -> Params:
        """Return the arrays on the island's devices, f32, copied, cut by
        `shardings`."""
        placed: Params = jax.tree.map(
            lambda x, sharding: place(np.asarray(x, np.float32), sharding),
            params,
            self.shardings,
        )
        return placed

    def zeros(self) -> Params:
        """Return parameters of zeros, cut by `shardings`; no device or host has all of
        them."""
        made: Params = jax.tree.map(
            lambda own: zeros(own.shape, np.float32, own.sharding),
            self._abstract.params,
        )
        return made

    def first(self, seed: int) -> Params:
        """Return the parameters that the model draws, cut by `shardings`."""
        with jax.set_mesh(self.mesh):
            drawn = jax.jit(self._init, out_shardings=self.shardings)
            params: Params = drawn(jax.random.key(seed))
        return params

    def init_inner(self, params: Params) -> optax.OptState:
        """Return the inner optimizer's first state, cut as the parameters are."""
        with jax.set_mesh(self.mesh):
            return self._init_inner(params)

    def put_batch(self, batch: Batch) -> Placed:
        """Cut the leading axis of each array over the mesh."""
        sharding = batch_sharding(self.mesh)

        def put(array: np.ndarray | OwnRows) -> jax.Array:
            if isinstance(array, OwnRows):
                return jax.make_array_from_callback(array.shape, sharding, array.part)
            return place(array, sharding)

        return {name: put(array) for name, array in batch.items()}

    def own_rows(self) -> list[tuple[int, int]]:
        """Return the rows of a batch that this host's devices need, in order; empty,
        which means all, if every device is this host's own."""
        sharding, size = batch_sharding(self.mesh), self.batch_size
        if sharding.is_fully_addressable:
            return []
        held = sharding.addressable_devices_indices_map((size,)).values()
        return sorted({i[0].indices(size)[:2] for i in held if i is not None})

    def abstract_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of the state."""
        return self._abstract

    def lower(self, sequence_length: int, beside_bytes: int = 0) -> jax.stages.Lowered:
        """Lower the step without arrays, to be compiled for devices that this machine
        may lack.

        Args:
          sequence_length: T.
          beside_bytes: of each device's memory, taken by arrays that the step has
            nothing to do with; the compiler refuses what does not fit beside them.
        """
        batch = self._abstract_batch(self.fields, sequence_length)
        state, rate = self.abstract_state(), np.float32(0)
        frozen = self._frozen
        with jax.set_mesh(self.mesh):
            if not beside_bytes:
                return self._step.lower(state, batch, rate, frozen)
            everywhere = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))  # type: ignore[no-untyped-call]
            length = self.mesh.size * -(-beside_bytes // 4)
            beside = abstract((length,), np.float32, everywhere)
            step = jax.jit(
                lambda state, batch, rate, frozen, beside: self.update(
                    state, batch, rate, frozen
                ),
                donate_argnums=0,
                out_shardings=(self._lies, replicated(self.mesh)),
                keep_unused=True,
            )
            return step.lower(state, batch, rate, frozen, beside)

    def lower_all(self, sequence_length: int) -> list[jax.stages.Lowered]:
        """Lower every function, as `lower` does the step."""
        state, step = self.abstract_state(), self.lower(sequence_length)
        evaluate = self.lower_eval(state.params, sequence_length)
        with jax.set_mesh(self.mesh):
            return [self._init_inner.lower(state.params), evaluate, step]

    def lower_eval(self, params: Params, sequence_length: int) -> jax.stages.Lowered:
        """Lower `eval_step` for parameters like these, as `lower` does the step."""
        fields = {**self.fields, "weights": WEIGHTS}
        batch = self._abstract_batch(fields, sequence_length)
        with jax.set_mesh(self.mesh):
            return self._eval.lower(params, batch, self._frozen)

    def _abstract_batch(self, fields: Fields, sequence_length: int) -> Any:
        rows = batch_sharding(self.mesh)
        batch = abstract_batch(fields, self.batch_size, sequence_length)
        return {
            name: abstract(leaf.shape, leaf.dtype, rows) for name, leaf in batch.items()
        }

    def update(
        self,
        state: TrainState,
        batch: Placed,
        learning_rate: jax.Array,
        frozen: Params,
    ) -> tuple[TrainState, Metrics]:
        """Make the update of `step`: a pure function, to be compiled."""
        loss, counted, grads = self._loss_and_grads(state.params, batch, frozen)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        def applied(state: TrainState) -> TrainState:
            params, opt_state = state
            updates, opt_state = self.inner.update(grads, opt_state, params)
            updates = jax.tree.map(lambda u: learning_rate * u, updates)
            return TrainState(optax.apply_updates(params, updates), opt_state)

        new = unless(~finite, applied, state, self.mesh.devices.flat[0].platform)
        skipped = 1.0 - finite.astype(jnp.float32)
        metrics = {"loss": loss, **counted, "grad_norm": grad_norm}
        return new, {**metrics, "skipped": skipped}

    def _loss_and_grads(
        self, params: Params, batch: Placed, frozen: Params
    ) -> tuple[jax.Array, Metrics, Params]:
        """Return the mean over the batch, sums over it, and the gradient of what the
        model makes of the mean, in A rounds."""
        differentiate = jax.value_and_grad(self._loss, has_aux=True)
        rounds = self._accumulation
        if rounds == 1:
            (_, metrics), grads = differentiate(params, batch, frozen)
            return metrics["loss"], self._counted(metrics, batch), grads
        # Rounds of plain rows count alike, and are added as they are. Places of
        # pictures do not count.
        alike = batch.keys().isdisjoint({*DERIVED, PICTURES})

        def of_round(part: Placed) -> Any:
            (_, metrics), grads = differentiate(params, part, frozen)
            tokens = metrics["tokens"]
            parts = (metrics["loss"], grads)
            if not alike:
                # A round of padding only has no mean.
                parts = jax.tree.map(
                    lambda x: jnp.where(tokens > 0, x * tokens, 0.0), parts
                )
            return parts, self._counted(metrics, part)

        zero = jnp.zeros(())
        zeros = ((zero, jax.tree.map(jnp.zeros_like, params)), self._counted({}, {}))
        sums, counted = self._summed(of_round, zeros, batch)
        tokens = counted["tokens"]
        divisor = rounds if alike else jnp.where(tokens > 0, tokens, 1.0)
        loss, grads = jax.tree.map(lambda x: x / divisor, sums)
        return loss, counted, grads

    def _counted(self, metrics: Metrics, batch: Placed) -> Metrics:
        """Return what is summed over the rounds of a step; zeros where the model does
        not tell it."""
        found = {"tokens": metrics.get("tokens", jnp.zeros(()))}
        if self._sources and metrics.keys() >= set(ROWS):
            losses, tokens = (metrics[name] for name in ROWS)
            sources, count = batch["source_number"], self._sources
            found["by_source"] = by_source(sources, losses, tokens, count)
        elif self._sources:
            found["by_source"] = jnp.zeros((self._sources, 2))
        for name, shape in self._use_metrics.items():
            told = metrics.get(name, jnp.zeros(shape, jnp.uint32))
            found[name] = told.astype(jnp.uint32).reshape(shape)
        return found

    def _evaluate(
        self, params: Params, batch: Placed, frozen: Params
    ) -> tuple[jax.Array, jax.Array]:
        """Return the sum in as many rounds as a step has, which bounds the memory."""

        def sums(batch: Placed) -> tuple[jax.Array, jax.Array]:
            _, metrics = self._loss(params, batch, frozen)
            weight = metrics["tokens"]
            # A round of padding only has no mean.
            return jnp.where(weight > 0, metrics["loss"] * weight, 0.0), weight

        if self._accumulation == 1:
            return sums(batch)

        zeros = (jnp.zeros(()), jnp.zeros(()))
        loss, weight = self._summed(sums, zeros, batch)
        return loss, weight

    def _summed(self, of_round: Callable[[Placed], Any], zeros: Any, batch: Any) -> Any:
        """Sum what a function makes of each round of a batch."""

        def add(total: Any, part: Placed) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_round(part)), None

        return jax.lax.scan(add, zeros, self._in_rounds(batch))[0]

    def _in_rounds(self, batch: Placed) -> Placed:
        """Reshape [B, ...] to [A, B / A, ...]: round a has rows a, a + A, ..., so that
        each device keeps its rows."""

        def cut(rows: jax.Array) -> jax.Array:
            return rows.reshape(-1, self._accumulation, *rows.shape[1:]).swapaxes(0, 1)

        return {name: cut(rows) for name, rows in batch.items()}


def use_shapes(
    uses: Mapping[str, Use], axes: Any, shapes: Any
) -> dict[str, tuple[int, ...]]:
    """Return the shape of the counts of each tensor: [rows], [layers, rows], or [1] of
    one that is used as a whole; axes, shapes: as `Model` has them."""
    found = {}
    for path, use in uses.items():
        names, leaf = axes, shapes
        for key in path.split("/"):
            names, leaf = names[key], leaf[key]
        rows = leaf.shape[: 1 + (names[:1] == (LAYERS,))]
        found[path] = (1,) if use.as_one else rows
    return found


class UseCounts:
    """How often rows were used since the steps began that are in a fragment's next
    delta, as books count them (`protocol/island/boundary.py`).

    A host counts the rows of batches that no host before it has; a take sums over
    hosts. Counts rise modulo 2^32, of which a difference shows nothing.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        uses: Mapping[str, Use],
        shapes: Mapping[str, tuple[int, ...]],
        mesh: Mesh,
    ) -> None:
        """shapes: `use_shapes`."""
        self._pieces = [[p for p in of if p.by_use] for of in plan.fragments]
        self._uses = uses
        self._total: dict[Use, Any] = {
            uses[path]: np.zeros(shape, np.uint32) for path, shape in shapes.items()
        }
        self._since = [self._total for _ in plan.fragments]
        self._before = list(self._since)
        self._mesh = mesh
        self._hosts = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # type: ignore[no-untyped-call]
        self._encode = jax.jit(
            lambda counts: encode_uses(jnp.sum(counts, axis=0, dtype=jnp.uint32)),
            out_shardings=replicated(mesh),
        )

    def step(self, batch: Batch, placed: Placed, metrics: Metrics) -> None:
        """Count what a step uses. placed: the batch as it is on the devices."""
        rows = None
        total = dict(self._total)
        for use in total:
            if isinstance(use.counted, str):
                total[use] = total[use] + metrics[use.counted]
                continue
            if rows is None:
                rows = _rows_here(batch, placed)
            for part in rows:
                total[use] = total[use] + _fitting(use.counted(part), total[use])
        self._total = total

    def take(self, fragment: int) -> tuple[jax.Array, ...]:
        """Return the encoded counts of a delta, by piece that has any, and begin those
        of the next."""
        since = self._since[fragment]
        taken, whole = [], dict[Use, jax.Array]()
        for piece in self._pieces[fragment]:
            use = self._uses["/".join(piece.path)]
            if (encoded := whole.get(use)) is None:
                counts = piece.uses_of(self._total[use] - since[use])
                here = isinstance(counts, np.ndarray)
                laid = self._by_device(counts) if here else counts[None]
                encoded = in_turn(self._encode(laid))
            if use.as_one:
                whole[use] = encoded
            taken.append(encoded)
        self._before[fragment] = since
        self.restart(fragment)
        return tuple(taken)

    def restart(self, fragment: int) -> None:
        """Begin the next delta now: the steps before are in none."""
        self._since[fragment] = self._total

    def reopen(self, fragment: int) -> None:
        """Undo the last take: its steps are in the next delta."""
        self._since[fragment] = self._before[fragment]

    def lower_all(self) -> Iterator[jax.stages.Lowered]:
        """Lower what `take` executes, to be compiled."""
        counted = [
            (p.counts, isinstance(self._uses["/".join(p.path)].counted, str))
            for of in self._pieces
            for p in of
        ]
        for rows, summed in sorted(set(counted)):
            lies = replicated(self._mesh) if summed else self._hosts
            shape = (1 if summed else self._mesh.size, rows)
            yield self._encode.lower(abstract(shape, np.uint32, lies))

    def _by_device(self, counts: np.ndarray) -> jax.Array:
        """Put this host's counts on its first device, and zeros on its others."""
        here = jax.process_index()
        devices = self._mesh.devices.flat
        first = [d.process_index for d in devices].index(here)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            mine = index[0].indices(self._mesh.size)[0] == first
            return (counts if mine else np.zeros_like(counts))[None]

        return jax.make_array_from_callback(
            (self._mesh.size, len(counts)),
            self._hosts,
            part,
        )


def _fitting(counts: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return counts of a shape that `Use` allows; numpy would repeat others."""
    if np.shape(counts) not in (total.shape, total.shape[-1:]):
        raise ConfigError(
            f"a function in the model's uses returned counts of shape "
            f"{np.shape(counts)}, and its tensor has {total.shape} of them: give "
            f"one for each row, or one alone of a tensor that is used as one"
        )
    return counts


def _rows_here(batch: Batch, placed: Placed) -> list[dict[str, np.ndarray]]:
    """Return the rows of a batch that are this host's to count: those of which it has
    the first copy."""
    shards = next(iter(placed.values())).addressable_shards

    def part(array: np.ndarray | OwnRows, index: tuple[slice, ...]) -> np.ndarray:
        return array.part(index) if isinstance(array, OwnRows) else array[index[0]]

    return [
        {name: part(array, shard.index) for name, array in batch.items()}
        for shard in shards
        if shard.replica_id == 0
    ]


def _laid(shapes: Any, shardings: Any) -> Any:
    """Return abstract arrays of these shapes, cut so."""
    return jax.tree.map(lambda x, lies: x.update(sharding=lies), shapes, shardings)
