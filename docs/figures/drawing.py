"""How figures are saved; their colours and paper are those of the package's plots.

A figure is one file for light and for dark pages: its style follows the reader's."""

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
    PAPER,
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
    "save",
    "say",
]
RAW = Path(__file__).parents[1] / "results" / "raw"

DARK = {
    PAPER: "#161b22",
    INK: "#e6e9ee",
    "#000000": "#aab3bf",
    GREY: "#7d8793",
    BLUE: "#56b4e9",
    GREEN: "#3fc79b",
    ORANGE: "#ff9e4a",
}
"""On a dark page, instead of each colour."""

matplotlib.use("agg")


def draw(name: str, make: Callable[[], Figure]) -> None:
    """Save a figure as NAME.svg beside its script, or in the folder that the command
    line names."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    save(folder / f"{name}.svg", make)


def save(picture: Path, make: Callable[[], Figure]) -> None:
    """Save a figure. The same data gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": picture.stem}):
        figure = make()
        figure.tight_layout()
        figure.savefig(picture, metadata={"Date": None})
        pyplot.close(figure)
    light = picture.read_text()
    rules = "".join(
        f'[style*="{what}: {colour.lower()}"]{{{what}:{dark}!important}}'
        for colour, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    # What has no colour of its own is black.
    rules += f"svg{{fill:{DARK['#000000']}}}"
    dark = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n"
    head, tag, rest = light.partition(" <defs>\n")
    picture.write_text(f"{head}{dark}{tag}{rest}")
