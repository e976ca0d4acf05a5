"""The weighted mean, and a pause for each piece: a merge that lasts long enough to be
struck. A file tells that a merge is under way, if the environment names one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.core.families import WeightedSum

FILE = "SLOW_MEAN_FILE"
"""Variable of the environment: the path of that file."""
PAUSE_S = 0.02
"""Seconds for each piece."""


class SlowMean(WeightedSum):
    """See `WeightedSum`."""

    by_element = True
    embeddings_by_mean = False

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return the weights, after the pause."""
        if path := os.environ.get(FILE):
            Path(path).touch()
            time.sleep(PAUSE_S)
            Path(path).unlink(missing_ok=True)
        return weights


slow_mean = SlowMean()
