"""An outer optimizer whose momentum begins anew every ten merges of a fragment
(Outer-Momentum Restarting, arXiv 2605.28585; the paper tries several periods). Between
two restarts it is "nesterov"."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diloco_jax.core.families import Arrays

PERIOD = 10


class State(NamedTuple):
    """Merges so far, and the momentum after them."""

    merges: jax.Array
    trace: Arrays


class Restarts:
    """See `OuterOptimizer`."""

    elementwise = True

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """b' = mu b + d, u = -(d + mu b'), with b = 0 at a restart."""

        def init(theta: Arrays) -> State:
            return State(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, theta))

        def update(deltas: Arrays, state: State, _: Any = None) -> tuple[Arrays, State]:
            before = _restarted(state)
            trace = jax.tree.map(lambda b, d: momentum * b + d, before, deltas)
            updates = jax.tree.map(lambda b, d: -(d + momentum * b), trace, deltas)
            return updates, State(state.merges + 1, trace)

        return optax.GradientTransformation(init, update)

    def delta_of(self, updates: Arrays, state: State, momentum: float) -> Arrays:
        """d = (-u - mu^2 b) / (1 + mu)."""
        mu = momentum
        deltas: Arrays = jax.tree.map(
            lambda u, b: (-u - mu**2 * b) / (1 + mu), updates, _restarted(state)
        )
        return deltas


def _restarted(state: State) -> Arrays:
    kept = jnp.where(state.merges % PERIOD == 0, 0.0, 1.0)
    trace: Arrays = jax.tree.map(lambda b: kept * b, state.trace)
    return trace


restarts = Restarts()
