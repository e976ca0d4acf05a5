"""Outer optimizers: the interface of a member of the family."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import optax

Arrays = tuple[jax.Array, ...]
"""One f32 array per piece of a fragment."""


class OuterOptimizer(Protocol):
    """A maker of an optax optimizer that takes merged deltas as gradients.

    A function will do. Where it has `elementwise = True`, it treats each element by
    itself and a fragment is updated a few tiles at a time; otherwise it is given the
    whole fragment, each piece in its own shape, which takes more time and memory. An
    optimizer with `delta_of` keeps its state up to the last merge through a crash of
    the coordinator. Optimizers of the package may name in `native_step` the step of
    `core/kernels/` that is theirs.
    """

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """Make the optimizer at learning rate 1; its updates are added to the
        parameters. momentum: `outer.momentum`, which it may ignore."""


class Invertible(OuterOptimizer, Protocol):
    """An optimizer whose step determines its merged delta."""

    def delta_of(self, updates: Arrays, state: Any, momentum: float) -> Arrays:
        """Return the delta from which the optimizer, in that state, makes these
        updates."""
