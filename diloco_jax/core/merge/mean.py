"""The merge rule "mean": the weighted mean of the deltas."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_jax.core.merge.rule import WeightedSum


class Mean(WeightedSum):
    """See `WeightedSum`."""

    by_element = True

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return the weights."""
        return weights


MEAN = Mean()
