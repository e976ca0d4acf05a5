"""Outer optimizers: the interface of a member of the family."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import optax

Arrays = tuple[jax.Array, ...]
"""One f32 array per piece of a fragment."""


class OuterOptimizer(Protocol):
    """A function, or a callable object, that makes an optax optimizer of merged deltas.

    With `elementwise = True` it treats each element by itself, and a fragment is
    updated a few tiles at a time. Otherwise it is given the whole fragment, each piece
    in its own shape, which takes more time and memory. An optimizer with `delta_of`
    keeps its state through a crash of the coordinator up to the last merge.
    `native_step` names the step of `core/kernels/` that computes an optimizer of the
    package.
    """

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """Make the optimizer at learning rate 1; its updates are added to the
        parameters. momentum: `outer.momentum`, which it may ignore."""


class Invertible(OuterOptimizer, Protocol):
    """An optimizer whose step determines its merged delta."""

    def delta_of(self, updates: Arrays, state: Any, momentum: float) -> Arrays:
        """Return the delta from which the optimizer, in that state, makes these
        updates."""
