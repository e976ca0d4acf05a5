"""Leaves of the parameters by their path: a nested dict is read, and written anew."""

from __future__ import annotations

from typing import Any

import jax

from diloco_jax.core.fragments import Params

Path = tuple[str, ...]
Leaves = dict[Path, jax.Array]


def leaf_of(params: Params, path: Path) -> Any:
    """Return the leaf at a path."""
    node: Any = params
    for key in path:
        node = node[key]
    return node


def with_leaves(params: Params, leaves: Leaves) -> Params:
    """Return the parameters with these leaves in place of others; each dict on a path
    is copied once, `params` stays."""
    copied: dict[Path, Params] = {(): dict(params)}
    for path, leaf in leaves.items():
        for depth in range(1, len(path)):
            above, here = copied[path[: depth - 1]], path[:depth]
            if here not in copied:
                copied[here] = above[here[-1]] = dict(above[here[-1]])
        copied[path[:-1]][path[-1]] = leaf
    return copied[()]
