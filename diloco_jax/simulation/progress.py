"""How far a simulation is: a function that is told what share is done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], None]


def nobody(share: float) -> None:
    """Nobody is told."""


def part(progress: Progress, index: int, parts: int) -> Progress:
    """For part `index`, from 0, of so many equal parts."""
    return lambda share: progress((index + share) / parts)
