"""What a run is measured by: one formula each, for the runtime and the simulator.

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
    """What is known of one island over all its incarnations."""

    provisioned_seconds: float
    tokens_per_step: float
    median_step_seconds: float
    """Of undisturbed steps; 0 if there was none. Both are means over incarnations, each
    as often as it made steps."""
    computed_tokens: int
    merged_tokens: int
    active: tuple[tuple[float, float], ...] = ()
    """Intervals (start, end) in which it was doing steps."""

    @property
    def undisturbed_tokens(self) -> float:
        """Tokens it would have computed had nothing ever held it up."""
        if self.median_step_seconds <= 0:
            return 0.0
        return (
            self.provisioned_seconds * self.tokens_per_step / self.median_step_seconds
        )


def goodput(islands: Iterable[IslandMeasure]) -> float:
    """Merged tokens over those that undisturbed islands would have computed."""
    islands = tuple(islands)
    return _ratio(
        sum(i.merged_tokens for i in islands),
        sum(i.undisturbed_tokens for i in islands),
    )


def compute_goodput(islands: Iterable[IslandMeasure]) -> float:
    """The same with computed tokens, merged or not: what the paper's table counts."""
    islands = tuple(islands)
    return _ratio(
        sum(i.computed_tokens for i in islands),
        sum(i.undisturbed_tokens for i in islands),
    )


def uptime(islands: Iterable[IslandMeasure], wall_seconds: float) -> float:
    """Share of the wall time in which at least one island was doing steps."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(span for island in islands for span in island.active):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return _ratio(covered, wall_seconds)


def participation(merges_in: int, merges_while_alive: int) -> float:
    """Share of the merges during an island's life that it was part of."""
    return _ratio(merges_in, merges_while_alive)


def _ratio(part: float, whole: float) -> float:
    """0 of nothing is 0: a run that has not begun has no goodput."""
    return part / whole if whole > 0 else 0.0
