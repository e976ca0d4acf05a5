"""The merge rule "trimmed_mean": a weighted mean without the outermost deltas.

For each element the largest and smallest quarter of the deltas are left out, with 3 to
7 deltas one at each end (Yin et al., arXiv 1803.01498, here with weights). Of equal
elements with unlike weights any may be the ones that are left out.

It tolerates islands whose deltas are wrong, up to as many as are left out at an end, in
all pieces and to the last merge; a mean and RDA do not.

Elements are sorted by a network of comparators: the same few operations for all of
them, which XLA makes one loop without branches. With a sort of each column by itself,
merges took twenty times as long (docs/results/merging.md).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

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
        values = list(deltas)
        own = [jnp.broadcast_to(weight, values[0].shape) for weight in weights]
        for low, high in comparators(islands if out else 0):
            swap = values[high] < values[low]
            for rows in (values, own):
                rows[low], rows[high] = (
                    jnp.where(swap, rows[high], rows[low]),
                    jnp.where(swap, rows[low], rows[high]),
                )
        values, own = values[out : islands - out], own[out : islands - out]
        total = _sum(own)
        # Where all remaining elements have weight 0, they count equally.
        own = [jnp.where(total > 0, weight, 1.0) for weight in own]
        return share * _sum(list(map(operator.mul, own, values))) / _sum(own)


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of places to be compared, and put in order, in turn: all `count`
    places are sorted then (Batcher's odd-even merge sort; Knuth, volume 3, 5.2.2)."""
    merged = 1
    while merged < count:
        apart = merged
        while apart:
            for first in range(apart % merged, count - apart, 2 * apart):
                for low in range(first, min(first + apart, count - apart)):
                    if low // (2 * merged) == (low + apart) // (2 * merged):
                        yield low, low + apart
            apart //= 2
        merged *= 2


def _sum(rows: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, rows)


TRIMMED_MEAN = TrimmedMean()
