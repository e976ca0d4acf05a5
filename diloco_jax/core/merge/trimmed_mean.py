"""The merge rule "trimmed_mean": a weighted mean without the outermost deltas.

For each element the largest and smallest quarter of the deltas are left out, with 3 to
7 deltas one at each end (Yin et al., arXiv 1803.01498, here with weights).

It tolerates islands whose deltas are wrong, up to as many as are left out at an end, in
all pieces and to the last merge; a mean and RDA do not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from diloco_jax.core.merge.rule import Elementwise

TRIMMED = 4
"""Number of deltas per delta left out at each end."""
FEWEST = 3


class TrimmedMean(Elementwise):
    """See `Elementwise`."""

    embeddings_by_mean = False
    flush_by_mean = False

    def merge(
        self, deltas: jax.Array, weights: jax.Array, share: jax.Array
    ) -> jax.Array:
        """Return the mean of the elements in the middle."""
        islands = len(weights)
        out = max(1, islands // TRIMMED) if islands >= FEWEST else 0
        order = jnp.argsort(deltas, axis=0)[out : islands - out]
        kept = jnp.take_along_axis(deltas, order, axis=0)
        own = weights[order]
        total = jnp.sum(own, axis=0)
        # Where all remaining elements have weight 0, they count equally.
        own = jnp.where(total > 0, own, 1.0)
        return share * jnp.sum(own * kept, axis=0) / jnp.sum(own, axis=0)


TRIMMED_MEAN = TrimmedMean()
