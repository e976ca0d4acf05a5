"""Common to all figures: colours, paper, and how they are saved.

Colours are those of Okabe and Ito, which the colour-blind tell apart. The paper is
opaque, so that a dark page shows a figure as a light one does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, GREEN, ORANGE, PINK, SKY = "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY, PAPER = "#222222", "#999999", "#ffffff"
RAW = Path(__file__).parents[1] / "results" / "raw"

matplotlib.use("agg")


def paper(
    width: float, height: float, columns: int = 1, **options: object
) -> tuple[Figure, list[Axes]]:
    """Return a figure, in inches, and its axes from left to right."""
    figure, axes = pyplot.subplots(
        1, columns, figsize=(width, height), facecolor=PAPER, squeeze=False, **options
    )
    for one in axes[0]:
        one.set_facecolor(PAPER)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def say(axes: Axes, finding: str, x: str = "", y: str = "") -> None:
    """Write the finding above, and what the axes are, with their units."""
    axes.set_title(finding, color=INK, loc="left", fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)


def draw(name: str, make: Callable[[], Figure]) -> None:
    """Save a figure as NAME.svg beside its script, or in the folder that the command
    line names. The same data gives the same bytes."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure = make()
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
