"""The measures of a run: one formula each, for the runtime and the simulator.

Provisioned time runs from an island's first hello to its goodbye or the end of the
run, outages included, without the first compilation and evaluation. An island's
undisturbed speed is its tokens per step over its median step, into which neither
compilation nor evaluation enters. Times are seconds on one clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandMeasure:
    """The figures of one island over all its incarnations."""

    provisioned_seconds: float
    tokens_per_step: float
    median_step_seconds: float
    """Median seconds of undisturbed steps; 0 if there was none. Both fields are means
    over incarnations, weighted by their steps."""
    computed_tokens: int
    merged_tokens: int
    active: tuple[tuple[float, float], ...] = ()
    """Intervals (start, end) in which the island made steps."""

    @property
    def undisturbed_tokens(self) -> float:
        """Return the tokens that the island would have computed without any delay."""
        if self.median_step_seconds <= 0:
            return 0.0
        return (
            self.provisioned_seconds * self.tokens_per_step / self.median_step_seconds
        )


def goodput(islands: Iterable[IslandMeasure]) -> float:
    """Return merged tokens over those that undisturbed islands would have computed."""
    islands = tuple(islands)
    return _ratio(
        sum(i.merged_tokens for i in islands),
        sum(i.undisturbed_tokens for i in islands),
    )


def compute_goodput(islands: Iterable[IslandMeasure]) -> float:
    """Return goodput with computed tokens, merged or not, as the paper's table does."""
    islands = tuple(islands)
    return _ratio(
        sum(i.computed_tokens for i in islands),
        sum(i.undisturbed_tokens for i in islands),
    )


def uptime(islands: Iterable[IslandMeasure], wall_seconds: float) -> float:
    """Return the share of the wall time in which at least one island made steps."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(span for island in islands for span in island.active):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return _ratio(covered, wall_seconds)


def participation(merges_in: int, merges_while_alive: int) -> float:
    """Return the share of the merges during an island's life that it was part of."""
    return _ratio(merges_in, merges_while_alive)


def _ratio(part: float, whole: float) -> float:
    """Return part / whole, and 0 for 0 / 0: a run that has not begun has no goodput."""
    return part / whole if whole > 0 else 0.0
