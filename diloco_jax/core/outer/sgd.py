"""The outer optimizer "sgd": a step along the merged delta. Theta' = Theta - lr d."""

from __future__ import annotations

from typing import Any

import jax
import optax

from diloco_jax.core.kernels.library import StepKind
from diloco_jax.core.outer.rule import Arrays


class Sgd:
    """See `Invertible`."""

    elementwise = True
    native_step: StepKind = "sgd"

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """Make the optimizer; the momentum is ignored."""
        return optax.scale(-1.0)

    def delta_of(self, updates: Arrays, state: Any, momentum: float) -> Arrays:
        """Return d = -u."""
        deltas: Arrays = jax.tree.map(lambda u: -u, updates)
        return deltas


SGD = Sgd()
