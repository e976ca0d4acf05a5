"""Outer optimizers: what a member of the family is."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import optax

Arrays = tuple[jax.Array, ...]
"""One f32 array per piece of a fragment."""


class OuterOptimizer(Protocol):
    """Makes an optax optimizer, to which merged deltas are the gradients.

    A function will do; `delta_of` is for those that want their state to survive a crash
    of the coordinator to the last merge.
    """

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """The optimizer at learning rate 1, whose updates are added to the parameters.
        momentum: `outer.momentum`, which it may ignore."""


class Invertible(OuterOptimizer, Protocol):
    """An optimizer whose step tells the merged delta that it came from."""

    def delta_of(self, updates: Arrays, state: Any, momentum: float) -> Arrays:
        """The delta to which the optimizer, in that state, makes these updates."""
