"""Losses of a mixture by source: a sum over the rows of each.

`B` rows, `S` sources.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def by_source(
    sources: jax.Array, losses: jax.Array, tokens: jax.Array, count: int
) -> jax.Array:
    """Return the sums of losses and of tokens of each source's rows, f32 [S, 2].

    Args:
      sources: number of each row's source, int32 [B].
      losses: weighted sum of the losses of each row in nats, f32 [B].
      tokens: sum of the weights of each row, f32 [B].
      count: S.
    """
    rows = jnp.stack((losses, tokens), axis=1)
    # A product of matrices would round to bf16 on a TPU.
    own = sources[:, None] == jnp.arange(count)[None]
    return jnp.sum(jnp.where(own[..., None], rows[:, None, :], 0.0), axis=0)
