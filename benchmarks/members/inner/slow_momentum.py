"""AdamW with a second, slow first moment, in the manner of MT-DAO (arXiv 2510.05361).

With the fast moment m, the slow one n and the second moment v of the gradients, all
three free of the bias of their zero start, a step is

    -lr ((1 - nu) m + nu n) / (sqrt(v) + eps).

With b1 = 0 the gradient stands in place of m, which is the quasi-hyperbolic momentum of
the paper. Deviation: the paper averages moments over the islands, too, at periods of
their own; here they stay with their island, as all moments do. AdEMAMix (optax) has the
sum m + alpha n, whose n is not freed of its bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Moments(NamedTuple):
    """Steps so far, and the moments after them."""

    steps: jax.Array
    fast: Any
    slow: Any
    second: Any


def slow_momentum(
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.95,
    b3: float = 0.99,
    nu: float = 0.5,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """See `InnerOptimizer`; b3 is of the slow moment, nu its share."""

    def init(params: Any) -> Moments:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(jnp.zeros((), jnp.int32), zeros, zeros, zeros)

    def update(grads: Any, state: Moments, _: Any = None) -> tuple[Any, Moments]:
        fast, slow, second = (
            jax.tree.map(lambda m, g, b=b, n=n: b * m + (1 - b) * g**n, moment, grads)
            for moment, b, n in zip(state[1:], (b1, b3, b2), (1, 1, 2), strict=True)
        )
        steps = state.steps + 1
        of_fast, of_slow, of_second = (1 - b**steps for b in (b1, b3, b2))
        updates = jax.tree.map(
            lambda m, n, v: (
                ((1 - nu) * m / of_fast + nu * n / of_slow)
                / (jnp.sqrt(v / of_second) + eps)
            ),
            *(fast, slow, second),
        )
        return updates, Moments(steps, fast, slow, second)

    return optax.chain(
        optax.GradientTransformation(init, update),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
