"""Step times from a tape, whose lines are late.

They are resampled about the median that the island measured itself; what the lines' own
lateness adds to their spread is taken out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diloco_jax.simulation.calibration.observed import Observed

USUAL = (0.5, 3.0)
"""Times between two boundaries, in medians, that are steps: shorter ones were reported
late, longer ones held up."""


class Gaps(NamedTuple):
    """Of one life, from each boundary that is known to the next one."""

    steps: np.ndarray
    """i64[n]"""
    seconds: np.ndarray
    """f64[n]"""

    @property
    def each(self) -> np.ndarray:
        """Seconds of a step, f64[n]."""
        each: np.ndarray = self.seconds / self.steps
        return each


def gaps_of(life: Observed) -> Gaps:
    """Those of one life."""
    boundaries = sorted(life.boundaries.items())
    steps = np.array([step for step, _ in boundaries], np.int64)
    at = np.array([at for _, at in boundaries], np.float64)
    return Gaps(np.diff(steps), np.diff(at))


def steps_of(lives: Sequence[Gaps], *, median: float, spread: bool) -> np.ndarray:
    """Seconds of every step that was neither reported late nor held up, f64[m], about
    `median`; all alike if their spread is not to be told.

    Several steps of which no report came between are alike.
    """
    each = np.concatenate([np.repeat(gaps.each, gaps.steps) for gaps in lives])
    low, high = (float(np.median(each)) * factor for factor in USUAL)
    kept = each[(low <= each) & (each <= high)]
    off = kept - np.median(kept)
    deviation = float(np.std(kept))
    share = _deviation(lives, low, high) / deviation if spread and deviation else 0.0
    seconds: np.ndarray = np.maximum(median + off * share, median * USUAL[0])
    return seconds


def _deviation(lives: Sequence[Gaps], low: float, high: float) -> float:
    """The standard deviation of a step, in seconds, from gaps whose steps take between
    `low` and `high`.

    A line that is late makes one gap longer and the next one as much shorter: the
    lines' variance is the negative covariance of neighbours, and is twice in every
    gap's own, however many steps that is of.
    """
    usual = [(low <= gaps.each) & (gaps.each <= high) for gaps in lives]
    steps = np.concatenate([g.steps[u] for g, u in zip(lives, usual, strict=True)])
    seconds = np.concatenate([g.seconds[u] for g, u in zip(lives, usual, strict=True)])
    mean = np.sum(seconds) / np.sum(steps)
    neighbours = []
    for gaps, kept in zip(lives, usual, strict=True):
        over = gaps.seconds - gaps.steps * mean
        neighbours.extend((over[1:] * over[:-1])[kept[1:] & kept[:-1]])
    late = max(0.0, -float(np.mean(neighbours))) if neighbours else 0.0
    own = np.sum((seconds - steps * mean) ** 2) - len(seconds) * 2 * late
    return math.sqrt(max(0.0, float(own / np.sum(steps))))
