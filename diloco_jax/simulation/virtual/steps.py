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
    """Seconds of one step after the other, each on its own. spread: standard
    deviation over mean."""
    while True:
        yield from drawn(mean_seconds, spread, DRAWN_AT_ONCE, rng).tolist()


def drawn(
    mean_seconds: float, spread: float, count: int, rng: np.random.Generator
) -> np.ndarray:
    """f64[count] seconds of steps: log-normal, so that none is negative."""
    sigma = math.sqrt(math.log1p(spread**2))
    return mean_seconds * rng.lognormal(-(sigma**2) / 2, sigma, count)


def lockstep_share(
    mean_seconds: Sequence[float], spread: float, rng: np.random.Generator
) -> float:
    """Share of their time that islands compute if each step waits for the slowest of
    them, as one data-parallel program does. mean_seconds: of a step, by island."""
    total, slowest = 0.0, np.zeros(LOCKSTEP_STEPS)
    for mean in mean_seconds:
        seconds = drawn(mean, spread, LOCKSTEP_STEPS, rng)
        total += seconds.sum()
        np.maximum(slowest, seconds, out=slowest)
    return float(total / len(mean_seconds) / slowest.sum())
