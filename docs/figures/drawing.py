"""How figures are saved; their colours and paper are those of the package's plots."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

from diloco_jax.observability.history import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    paper,
    say,
)

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "RAW",
    "draw",
    "paper",
    "say",
]
RAW = Path(__file__).parents[1] / "results" / "raw"

matplotlib.use("agg")


def draw(name: str, make: Callable[[], Figure]) -> None:
    """Save a figure as NAME.svg beside its script, or in the folder that the command
    line names. The same data gives the same bytes."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure = make()
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
