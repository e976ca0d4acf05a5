"""The limit on restarts of a process that crashes: a number in a row."""

from __future__ import annotations

STEADY_S = 600.0
"""Seconds of running after which the cause of earlier crashes counts as over, and
restarts are counted anew. Over weeks, every machine fails."""


def crashes_in_a_row(before: int, ran_s: float) -> int:
    """Return the crashes in a row, with the one that ended a life of `ran_s`.

    before: the number without it. Above `placement.restarts` the process is given up.
    """
    return 1 if ran_s >= STEADY_S else before + 1
