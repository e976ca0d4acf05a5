"""How often a process that crashes is started again: so many times in a row."""

from __future__ import annotations

STEADY_S = 600.0
"""Seconds after which a process that ran has shown that it can: what made it crash
before is over, and restarts are counted anew. Over weeks, every machine fails."""


def crashes_in_a_row(before: int, ran_s: float) -> int:
    """With the one that just ended a life of so many seconds; `before` without it.
    More than `placement.restarts`, and the process is given up."""
    return 1 if ran_s >= STEADY_S else before + 1
