"""A merge rule that corrects the direction of each delta by momentum (HeLoCo, arXiv
2606.00271, its correction per tensor, with the constants of its table).

With u = d / |d|, v = m / |m|, c = u v and confidence = |d| / (|d| + 3 |m|):

- c >= 0.2: the delta stays.
- 0 <= c < 0.2: it is turned towards the momentum, and as long as before.
- c < 0: the part that goes against the momentum is shortened.

Then the deltas are averaged by weight. Deviations: the momentum m is the rule's own,
m' = 0.9 m + 0.1 merged, since a merge rule does not see that of the outer optimizer;
there is no look-ahead. After a crash the momentum is that of the last snapshot, in a
new term it is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax.core.families import Shape, Whole

MOMENTUM = 0.9
ALIGNED = 0.2
SHRINK, MOST_SHRINK = 0.5, 0.5
TURN = 1.0
DOUBT = 3.0


class Memory(NamedTuple):
    """The state of one piece."""

    momentum: jax.Array
    """f32[shape]."""


class Heloco(Whole):
    """See `Whole`."""

    extra_copies = 1

    def start(self, shape: Shape) -> Memory:
        """No momentum."""
        return Memory(jnp.zeros(shape, jnp.float32))

    def merge(
        self, deltas: jax.Array, weights: jax.Array, share: jax.Array, state: Memory
    ) -> tuple[jax.Array, Memory]:
        """The mean of the corrected deltas, which the momentum follows."""

        def added(
            total: jax.Array, given: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            delta, weight = given
            return total + weight * corrected(delta, state.momentum), None

        # One by one, so that no second copy of all deltas is needed.
        zeros = jnp.zeros_like(state.momentum)
        total, _ = jax.lax.scan(added, zeros, (deltas, weights))
        merged = total / jnp.sum(weights) * share
        momentum = MOMENTUM * state.momentum + (1 - MOMENTUM) * merged
        return merged, Memory(momentum)


def corrected(delta: jax.Array, momentum: jax.Array) -> jax.Array:
    """The delta with its direction corrected; itself, if either has none."""
    length, known = _norm(delta), _norm(momentum)
    directed = (length > 0) & (known > 0)
    u = delta / jnp.where(directed, length, 1.0)
    v = momentum / jnp.where(directed, known, 1.0)
    cosine = jnp.sum(u * v)
    confidence = length / jnp.where(directed, length + DOUBT * known, 1.0)
    shrink = jnp.minimum(-SHRINK * cosine * confidence, MOST_SHRINK)
    shortened = delta - shrink * cosine * length * v
    turn = jnp.minimum(TURN * (1 - cosine) * confidence, 1.0)
    between = (1 - turn) * u + turn * v
    turned = length * between / jnp.maximum(_norm(between), 1e-30)
    found = jnp.where(cosine < 0, shortened, turned)
    return jnp.where(directed & (cosine < ALIGNED), found, delta)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x)))


heloco = Heloco()
