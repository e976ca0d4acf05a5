"""The outer optimizer "nesterov": SGD with Nesterov momentum, as in DiLoCo (arXiv
2311.08105) and Decoupled DiLoCo (arXiv 2604.21428). With momentum mu and learning rate
lr:

    b' = mu b + d;    Theta' = Theta - lr (d + mu b')
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from diloco_jax.core.kernels.library import StepKind
from diloco_jax.core.outer.rule import Arrays


class Nesterov:
    """See `Invertible`."""

    elementwise = True
    native_step: StepKind = "nesterov"

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """Make the optimizer, whose state is b."""
        trace = optax.trace(momentum, nesterov=True)
        return optax.chain(trace, optax.scale(-1.0))

    def delta_of(self, updates: Arrays, state: Any, momentum: float) -> Arrays:
        """Return d = (-u - mu^2 b) / (1 + mu)."""
        mu, trace = momentum, state[0].trace
        deltas: Arrays = jax.tree.map(
            lambda u, b: (-u - mu**2 * b) / (1 + mu), updates, trace
        )
        return deltas


NESTEROV = Nesterov()
