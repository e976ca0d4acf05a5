"""The limit on restarts of a process that crashes: a number in a row."""

from __future__ import annotations

STEADY_S = 600.0
"""Seconds of running after which the cause of earlier crashes counts as over, and
restarts are counted anew. Over weeks, every machine fails."""


def crashes_in_a_row(before: int, ran_s: float) -> int:
    """Return the number of crashes in a row, including the present one.

    Args:
      before: the number before this crash.
      ran_s: seconds for which the process ran; a long life starts the count anew.
    """
    return 1 if ran_s >= STEADY_S else before + 1
