"""The merge rule "clipped_mean": the weighted mean of deltas, with long ones shortened.

A delta that is longer than the weighted median length is shortened to it, piece by
piece (Karimireddy et al., arXiv 2012.10333, clip around the last momentum instead). So
no island moves the parameters further than its share of the weights, whatever it sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco_jax.core.merge.rule import WeightedSum


class ClippedMean(WeightedSum):
    """See `WeightedSum`."""

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
