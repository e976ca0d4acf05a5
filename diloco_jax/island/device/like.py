"""Translate the parameters of a joined train loop between its own tree and names.

The loop's tree is any pytree; a run has a nested dict of names. The name of each leaf
is found once. At a boundary the tree is only flattened and unflattened.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from diloco_jax.config import ConfigError
from diloco_jax.island.device.mesh import place, zeros
from diloco_jax.models.model import Params, named

AXIS = "devices"
"""Mesh axis for arrays that lie on one device, and name no mesh."""
_AVAL, _SHARDING = operator.attrgetter("aval"), operator.attrgetter("sharding")


class LikeLeaves:
    """The leaves of `like` and their names."""

    def __init__(self, like: Any) -> None:
        """like: as for `join`. Raises ConfigError for what cannot be parameters."""
        leaves, structure = jax.tree.flatten(like)
        self._structure: Any = structure
        try:
            numbers = named(jax.tree.unflatten(self._structure, range(len(leaves))))
        except ValueError as error:
            raise ConfigError(f"like: {error}") from error
        self.like: Params = jax.tree.map(lambda n: _abstract(leaves[n]), numbers)
        """Shapes and shardings by name."""
        self._order: list[int] = jax.tree.leaves(numbers)
        """Number of a leaf in the loop's tree, by its place among the names."""
        self._places = sorted(range(len(leaves)), key=self._order.__getitem__)
        """The inverse of it."""
        by_path = jax.tree_util.tree_leaves_with_path(self.like)
        self._names = ["/".join(key.key for key in path) for path, _ in by_path]
        self._abstract = [leaf for _, leaf in by_path]
        sizes = [leaf.size for leaf in self._abstract]
        self._smallest = sizes.index(min(sizes))
        self._seen: tuple[list[Any], list[Any]] | None = None
        """Abstract values and shardings of leaves that were found to be right."""

    def zeros(self) -> Params:
        """Return parameters of zeros by name, laid out as `like` is."""
        made: Params = jax.tree.map(
            lambda x: zeros(x.shape, np.float32, x.sharding), self.like
        )
        return made

    def as_tree(self, params: Any) -> Any:
        """Return parameters, with leaves in the order of the names, in the structure of
        `like`."""
        leaves = jax.tree.leaves(params)
        return jax.tree.unflatten(self._structure, [leaves[n] for n in self._places])

    def as_listed(self, tree: Any) -> list[Any]:
        """Return the leaves of a step's result in the order of the names.

        Raises ValueError if it differs from `like` in structure, shape, dtype or
        sharding.
        """
        seen = None  # Of another structure; or the host's arrays, which have none.
        # One program's results have the very same facts at each call, and lists are
        # compared by identity first.
        with contextlib.suppress(ValueError, AttributeError):
            # It looks at structure and leaves in one pass, and sorts no keys.
            leaves = self._structure.flatten_up_to(tree)
            seen = [*map(_AVAL, leaves)], [*map(_SHARDING, leaves)]
        if seen is None or seen != self._seen:
            leaves = self._flat(tree, "boundary")
            self._check(self._listed(leaves))
            self._seen = seen or self._seen
        return self._listed(leaves)

    def as_beside(self, tree: Any) -> list[Any]:
        """Return the leaves of a tree beside the parameters in the order of the names.

        Raises ValueError if it differs from `like` in structure, shape or sharding, or
        has arrays that are not of a floating dtype.
        """
        leaves = self._listed(self._flat(tree, "alongside"))
        self._check(leaves, beside=True)
        return leaves

    def placed(self, params: Params) -> list[Any]:
        """Return arrays by name, from the host or a device, laid out as `like` is.
        Nothing is donated.

        Raises ValueError if they differ from `like` in names or shapes.
        """
        there: Any = jax.tree.structure(params)
        if there != jax.tree.structure(self.like):
            raise ValueError(
                "state was saved with parameters of other names; join with the tree "
                "that was trained then, or without a state"
            )
        lie = self._lie(jax.tree.leaves(params))
        self._check(lie, "in the state")
        return lie

    def first(self, like: Any) -> list[Any]:
        """Return the values of `like` itself, laid out as it is. Nothing is donated.

        Raises ConfigError if `like` has shapes alone.
        """
        leaves = jax.tree.leaves(like)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise ConfigError(
                "like has shapes alone, and this island is to give the run's first "
                "parameters (--init from-island:NAME); give arrays with values"
            )
        return self._lie(self._listed(leaves))

    def smallest(self, params: Any) -> jax.Array:
        """Return this host's first shard of the smallest parameter."""
        leaf = jax.tree.leaves(params)[self._smallest]
        # A loop may hand over arrays of the host.
        shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
        first: jax.Array = shards[0].data if shards else leaf
        return first

    def _listed(self, leaves: Sequence[Any]) -> list[Any]:
        return [leaves[number] for number in self._order]

    def _lie(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the arrays laid out as `like` is; those that are not are copied."""
        return [
            leaf
            if isinstance(leaf, jax.Array)
            and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
            else place(np.asarray(leaf), like.sharding)
            for leaf, like in zip(leaves, self._abstract, strict=True)
        ]

    def _flat(self, tree: Any, given: str) -> list[Any]:
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure:
            raise ValueError(
                f"{given} was given {structure}, the island joined with "
                f"{self._structure}; give it the parameters alone, in that structure"
            )
        return leaves

    def _check(
        self,
        leaves: Sequence[Any],
        where: str = "at the boundary",
        *,
        beside: bool = False,
    ) -> None:
        for name, leaf, like in zip(self._names, leaves, self._abstract, strict=True):
            dtype = leaf.dtype
            right = (
                jnp.issubdtype(dtype, jnp.floating) if beside else dtype == like.dtype
            )
            if leaf.shape != like.shape or not right:
                raise ValueError(
                    f"{name} is {dtype}{list(leaf.shape)} {where}, the island "
                    f"joined with float32{list(like.shape)}; parameters stay as they "
                    f"were"
                    + (", and what is beside them is of a floating dtype" * beside)
                )
            lies = getattr(leaf, "sharding", like.sharding)
            if not lies.is_equivalent_to(like.sharding, leaf.ndim):
                raise ValueError(
                    f"{name} lies as {lies} {where}, the island joined with "
                    f"{like.sharding}; give the step's result that sharding "
                    f"(out_shardings of jax.jit)"
                )


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape and sharding of a parameter; raise ConfigError if it cannot be
    one."""
    if leaf.dtype != np.float32:
        raise ConfigError(
            f"like has an array of {leaf.dtype}{list(leaf.shape)}; the parameters that "
            f"islands share are float32, and a loop casts them for its step"
        )
    lies = getattr(leaf, "sharding", None)
    if not isinstance(lies, NamedSharding):
        device = next(iter(lies.device_set)) if lies else jax.devices()[0]
        mesh = Mesh(np.array([device]), (AXIS,))
        lies = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    if AxisType.Explicit in lies.mesh.axis_types:
        raise ConfigError(
            f"like lies on a mesh with axis_types = {lies.mesh.axis_types}; takes and "
            f"adoptions are compiled for Auto axes: make the same mesh with "
            f"axis_types=(AxisType.Auto,) * {len(lies.mesh.axis_types)} for the "
            f"parameters that are lent"
        )
    hosts = {device.process_index for device in lies.mesh.devices.flat}
    if len(hosts) != jax.process_count():
        raise ConfigError(
            f"like lies on devices of {len(hosts)} processes, and this world has "
            f"{jax.process_count()}: lay it on a mesh with devices of all, since an "
            f"island is one model copy and one jax.distributed world"
        )
    return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=lies)  # type: ignore[no-untyped-call]
