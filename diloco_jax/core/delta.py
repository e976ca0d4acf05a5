"""An island's outer gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.jit
def delta(anchor: jax.Array, local: jax.Array) -> jax.Array:
    """Return anchor - local in f32: a step along *minus* the delta leads to `local`.

    This is Theta - theta[m] of Decoupled DiLoCo (arXiv 2604.21428), with the anchor in
    place of Theta, which the island does not have.
    """
    return anchor.astype(jnp.float32) - local.astype(jnp.float32)
