"""Leaves of the parameters by their path: of a nested dict, or of a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from diloco_jax.core.fragments import Params

Path = tuple[str, ...]
Leaves = dict[Path, jax.Array]


class Listed(NamedTuple):
    """Parameters of a loop that joined: the leaves of its own tree, in order. A
    boundary reads and writes few of them, and builds no structure from all."""

    leaves: list[Any]
    places: Mapping[Path, int]
    """Number of the leaf at each path."""


Lent = TypeVar("Lent", Params, Listed)
"""The local parameters as a boundary has them."""


def leaf_of(params: Params | Listed, path: Path) -> Any:
    """Return the leaf at a path."""
    if isinstance(params, Listed):
        return params.leaves[params.places[path]]
    node: Any = params
    for key in path:
        node = node[key]
    return node


def with_leaves(params: Lent, leaves: Leaves) -> Lent:
    """Return the parameters with these leaves in place of others; `params` stays."""
    if isinstance(params, Listed):
        listed = list(params.leaves)
        for path, leaf in leaves.items():
            listed[params.places[path]] = leaf
        return Listed(listed, params.places)
    # Each dict on a path is copied once.
    copied: dict[Path, Params] = {(): dict(params)}
    for path, leaf in leaves.items():
        for depth in range(1, len(path)):
            above, here = copied[path[: depth - 1]], path[:depth]
            if here not in copied:
                copied[here] = above[here[-1]] = dict(above[here[-1]])
        copied[path[:-1]][path[-1]] = leaf
    return copied[()]
