"""The merge rule "rda": radial-directional averaging (Decoupled DiLoCo, arXiv
2604.21428), which averages lengths and directions apart:

    RDA = (sum w |d| / sum w) * unit(sum w unit(d)),    unit(0) = 0

Deltas of different islands are close to orthogonal, so a mean of M of them shrinks
like 1 / sqrt(M); RDA keeps the length.

Deviations from the paper: RDA is per piece (the paper does not say), and where the
directions cancel, the result is the weighted mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco_jax.core.merge.rule import WeightedSum

CANCELLED = 1e-5
"""A sum of unit vectors shorter than this share of its weights is rounding error."""


class Rda(WeightedSum):
    """See `WeightedSum`."""

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
