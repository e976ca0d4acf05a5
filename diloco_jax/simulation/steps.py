"""How long steps take: an island's usual seconds, and how they vary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

DRAWN_AT_ONCE = 1024
LOCKSTEP_STEPS = 20_000


def durations(
    mean_seconds: float, spread: float, rng: np.random.Generator
) -> Iterator[float]:
    """Seconds of one step after the other: log-normal, so never negative. spread:
    standard deviation over mean."""
    sigma = math.sqrt(math.log1p(spread**2))
    while True:
        drawn = rng.lognormal(-(sigma**2) / 2, sigma, DRAWN_AT_ONCE)
        yield from (mean_seconds * drawn).tolist()


def lockstep_share(
    mean_seconds: Sequence[float], spread: float, rng: np.random.Generator
) -> float:
    """Share of their own time that islands compute if every step waits for the
    slowest of them; all islands count alike. mean_seconds: of a step, by island."""
    each = np.array(
        [
            [seconds for seconds, _ in zip(durations(m, spread, rng), range(LOCKSTEP_STEPS))]
            for m in mean_seconds
        ]
    )
    return float(np.mean(each) / np.mean(each.max(axis=0)))
