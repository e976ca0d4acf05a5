"""Make a change or leave it, as a value on the device says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

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
