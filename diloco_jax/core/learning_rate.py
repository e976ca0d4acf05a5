"""The learning rate of inner steps, which follows the progress of the whole run.

Progress (tokens of all islands / tokens of the run) is not a count of local steps, so
a late or returned island is in step with the others.
"""

from __future__ import annotations

import math
from typing import Any


def learning_rate(settings: Any, progress: float, rewarm: float = 1.0) -> float:
    """Return the rate at a point of the run: linear from 0, then by the schedule.

    Args:
      settings: an `InnerConfig`: learning_rate after the warm-up over warmup_fraction
        of the run; schedule "cosine" ends at final_fraction of it, "constant" stays.
      progress: share of the run that is done; clipped to [0, 1].
      rewarm: share in [0, 1] that an island with fresh moments may use.

    Raises:
      ValueError: unknown schedule.
    """
    progress = min(max(progress, 0.0), 1.0)
    warmup, final = settings.warmup_fraction, settings.final_fraction
    peak: float = settings.learning_rate
    share: float
    if progress < warmup:
        share = progress / warmup
    elif settings.schedule == "constant":
        share = 1.0
    elif settings.schedule == "cosine":
        done = (progress - warmup) / max(1 - warmup, 1e-9)
        share = final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
    else:
        raise ValueError(
            f"inner.schedule = {settings.schedule!r}; choose 'cosine' or 'constant'"
        )
    return peak * share * min(max(rewarm, 0.0), 1.0)
