"""The weight of a delta in a merge, and the package's merge rules.

A weight follows from a delta's tokens and inner steps, with a cap on one island's
share. A rule combines the deltas of several islands into one.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from diloco_jax.core.families import Elementwise, WeightedSum, Weighting


def weight(weighting: Weighting, tokens: int, steps: int) -> float:
    """Return the weight of a delta of that many tokens and inner steps; 0 if empty."""
    return weighting(tokens, steps) if steps > 0 and tokens > 0 else 0.0


def tokens(tokens: int, steps: int) -> float:
    """Return the delta's tokens."""
    return float(tokens)


def tokens_times_rate(tokens: int, steps: int) -> float:
    """Return tokens * (tokens / steps), quantity times quality, as in Decoupled DiLoCo
    (arXiv 2604.21428)."""
    return tokens * (tokens / steps)


def uniform(tokens: int, steps: int) -> float:
    """Return the same weight for every delta."""
    return 1.0


def capped(weights: Sequence[float], most: float) -> list[float]:
    """Return the weights with none above the share `most` of their sum; what is above
    it goes to the others in proportion to theirs. All are the same if there are too
    few.

    weights: finite and at least 0, not all 0. most: above 0 and at most 1.
    """
    total = math.fsum(weights)
    held = [w > most * total for w in weights]
    while any(held) and sum(held) < len(weights):
        rest = math.fsum(w for w, own in zip(weights, held, strict=True) if not own)
        free = 1 - most * sum(held)
        if rest <= 0 or free <= 0:
            break
        limit = most * rest / free
        again = [own or w > limit for w, own in zip(weights, held, strict=True)]
        if again == held:
            return [limit if own else w for w, own in zip(weights, held, strict=True)]
        held = again
    # With too few others nobody can be held to that share.
    return [1.0 if w > 0 else 0.0 for w in weights] if any(held) else list(weights)


class Mean(WeightedSum):
    """The weighted mean of the deltas."""

    by_element = True

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return the weights."""
        return weights


MEAN = Mean()


CANCELLED = 1e-5
"""A sum of unit vectors shorter than this share of its weights is rounding error."""


class Rda(WeightedSum):
    """Radial-directional averaging (Decoupled DiLoCo, arXiv 2604.21428), which averages
    lengths and directions apart:

        RDA = (sum w |d| / sum w) * unit(sum w unit(d)),    unit(0) = 0

    Deltas of different islands are close to orthogonal, so a mean of M of them shrinks
    like 1 / sqrt(M); RDA keeps the length.

    Deviations from the paper: RDA is per piece (the paper does not say), and where the
    directions cancel, the result is the weighted mean.
    """

    keeps_length = True

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return w / |d|; 0 for a delta without a direction."""
        return [
            w / math.sqrt(square) if square > 0 else 0.0
            for w, square in zip(weights, squares, strict=True)
        ]

    def scale(
        self, weights: Sequence[float], squares: Sequence[float], square: float
    ) -> float | None:
        """Return the mean length of the deltas over the length of the sum.

        None if all deltas are zero, or if their directions cancel.
        """
        pairs = list(zip(weights, squares, strict=True))
        directed = math.fsum(w for w, own in pairs if own > 0)
        if math.sqrt(square) <= CANCELLED * directed:
            return None
        return math.fsum(w * math.sqrt(own) for w, own in pairs) / math.sqrt(square)

    def direction_square(self, square: float) -> float:
        """Return `square`: the factors w / |d| make the sum one of unit deltas."""
        return square


RDA = Rda()


class ClippedMean(WeightedSum):
    """The weighted mean of deltas, with long ones shortened.

    A delta that is longer than the weighted median length is shortened to it, piece by
    piece (Karimireddy et al., arXiv 2012.10333, clip around the last momentum instead).
    So no island moves the parameters further than its share of the weights, whatever it
    sends.
    """

    embeddings_by_mean = False
    flush_by_mean = False

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return the weights, less where a delta is long."""
        lengths = [math.sqrt(square) for square in squares]
        most = _median(weights, lengths)
        return [
            w * min(1.0, most / length) if length > 0 else w
            for w, length in zip(weights, lengths, strict=True)
        ]


def _median(weights: Sequence[float], lengths: Sequence[float]) -> float:
    """Return the shortest length up to which lie half of the weights."""
    half, below = sum(weights) / 2, 0.0
    for length, weight in sorted(zip(lengths, weights, strict=True)):
        below += weight
        if below >= half:
            return length
    return max(lengths)


CLIPPED_MEAN = ClippedMean()


TRIMMED = 4
"""Number of deltas per delta left out at each end."""
FEWEST = 3


class TrimmedMean(Elementwise):
    """A weighted mean without the outermost deltas.

    For each element the largest and smallest quarter of the deltas are left out, with 3
    to 7 deltas one at each end (Yin et al., arXiv 1803.01498, here with weights). Of
    equal elements with unlike weights any may be the ones that are left out.

    It tolerates islands whose deltas are wrong, up to as many as are left out at an
    end, in all pieces and to the last merge; a mean and RDA do not.

    Elements are sorted by a network of comparators: the same few operations for all of
    them, which XLA makes one loop without branches. With a sort of each column by
    itself, merges took twenty times as long (docs/results/raw/merging.md).
    """

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
