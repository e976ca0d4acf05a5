"""A parameter before it has values."""

from __future__ import annotations

from typing import NamedTuple


class Tensor(NamedTuple):
    """A parameter: its shape, its axes' names, and mean and standard deviation at the
    start."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float
    start: float = 0.0
