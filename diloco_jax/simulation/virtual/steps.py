"""Durations of steps: an island's usual seconds, and how they vary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

DRAWN_AT_ONCE = 1024
LOCKSTEP_STEPS = 20_000


def durations(
    mean_seconds: float, spread: float, rng: np.random.Generator
) -> Iterator[float]:
    """Yield the seconds of one step after the other, drawn independently.

    spread: standard deviation over mean.
    """
    while True:
        yield from drawn(mean_seconds, spread, DRAWN_AT_ONCE, rng).tolist()


def drawn(
    mean_seconds: float, spread: float, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw f64[count] seconds of steps: log-normal, so that none is negative."""
    sigma = math.sqrt(math.log1p(spread**2))
    return mean_seconds * rng.lognormal(-(sigma**2) / 2, sigma, count)


def lockstep_share(
    mean_seconds: Sequence[float], spread: float, rng: np.random.Generator
) -> float:
    """Return the share of their time that islands compute in lockstep.

    Each step waits for the slowest island, as in one data-parallel program.
    mean_seconds: mean seconds of a step, by island.
    """
    total, slowest = 0.0, np.zeros(LOCKSTEP_STEPS)
    for mean in mean_seconds:
        seconds = drawn(mean, spread, LOCKSTEP_STEPS, rng)
        total += seconds.sum()
        np.maximum(slowest, seconds, out=slowest)
    return float(total / len(mean_seconds) / slowest.sum())
