"""Progress of a simulation: a function that is called with the share that is done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], None]


def nobody(share: float) -> None:
    """Ignore the progress."""


def part(progress: Progress, index: int, parts: int) -> Progress:
    """Return the progress of part `index`, from 0, of `parts` equal parts."""
    return lambda share: progress((index + share) / parts)
