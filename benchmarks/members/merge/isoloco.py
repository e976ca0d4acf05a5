"""A merge rule that flattens the spectrum of the merged delta (IsoLoCo, arXiv
2607.03011, as others tell of it: the paper was not at hand).

With the weighted mean of the deltas as U diag(s) V^T, the merge makes mean(s) U V^T:
every direction that the islands found goes equally far. What has one axis is the mean;
with three and more, all but the first are one. Singular values that are rounding error
stay zero. Meant for an outer step without momentum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from diloco_jax.core.families import State, Whole

RANK = 1e-6
"""Singular values below this share of the largest are rounding error in f32."""


class Isoloco(Whole):
    """See `Whole`."""

    keeps_equal = False
    extra_copies = 4

    def merge(
        self, deltas: jax.Array, weights: jax.Array, share: jax.Array, state: State
    ) -> tuple[jax.Array, State]:
        """share mean(s) U V^T."""
        mean = jnp.tensordot(weights, deltas, 1)
        if mean.ndim < 2:
            return share * mean, state
        matrix = mean.reshape(mean.shape[0], -1)
        u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
        flat = jnp.where(s > RANK * jnp.max(s), jnp.mean(s), 0.0)
        return share * ((u * flat[None]) @ vt).reshape(mean.shape), state


isoloco = Isoloco()
