"""Draw measured bounds of docs/results/raw against their limits: all that do not hold,
and of each benchmark the tightest that does.

    python docs/figures/limits.py

It reads the raw files there; docs/results/raw/index.md has the list of all.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from drawing import BLUE, GREY, INK, ORANGE, RAW, draw, paper, say
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from results_index import bounds_of, telling

SMALLEST = 0.05
"""Place where anything below a twentieth of its limit is drawn."""
WIDEST = 54
"""Characters of a line of a label; a longer one is wrapped."""
LARGEST = 5.0
"""Place where anything above five times its limit is drawn."""


def make() -> Figure:
    """Return the figure: one line per bound, grouped by benchmark; those with bounds
    that do not hold come first."""
    every = {path.stem: bounds_of(path) for path in sorted(RAW.glob("*.json"))}
    held = sum(bound.holds for bounds in every.values() for bound in bounds)
    total = sum(map(len, every.values()))
    told = {name: telling(bounds) for name, bounds in every.items()}
    groups = [(name, bounds) for name, bounds in told.items() if bounds]
    groups.sort(key=lambda group: group[1][0].holds)
    wrapped = {
        bound: textwrap.wrap(f"{bound.what}: {bound.measured} ({bound.limit})", WIDEST)
        for _, bounds in groups
        for bound in bounds
    }
    lines = len(groups) + sum(map(len, wrapped.values()))
    figure, (axes,) = paper(10, 1.2 + 0.19 * lines)
    ticks: list[float] = []
    labels: list[str] = []
    place = 0
    for name, bounds in groups:
        ticks.append(-place)
        labels.append(name)
        place += 1
        for bound in bounds:
            used = min(max(bound.used, SMALLEST), LARGEST)
            colour = BLUE if bound.holds else GREY if bound.too_few else ORANGE
            mark = "D" if colour == ORANGE else "o"
            middle = -place - (len(wrapped[bound]) - 1) / 2
            axes.plot([used, 1.0], [middle] * 2, color=GREY, lw=0.8, zorder=1)
            axes.plot(used, middle, mark, color=colour, ms=5)
            ticks.append(middle)
            labels.append("\n".join(wrapped[bound]))
            place += len(wrapped[bound])
    axes.axvline(1.0, color=INK, lw=1)
    axes.set_yticks(ticks, labels, color=INK, fontsize=7.5)
    for label in axes.get_yticklabels():
        if label.get_text() in every:
            label.set_fontweight("bold")
    axes.set_xscale("log")
    axes.set(xlim=(SMALLEST * 0.9, LARGEST * 1.1), ylim=(-place, 1))
    marks = {0.1: "0.1", 0.25: "0.25", 0.5: "0.5", 1.0: "limit", 2.0: "2", 4.0: "4"}
    axes.set_xticks([*marks], [*marks.values()])
    axes.minorticks_off()
    say(
        axes,
        f"{held} of {total} measured bounds hold",
        "share of the limit: all that do not hold (grey: too few runs), the tightest",
    )
    return figure


if __name__ == "__main__":
    draw("limits", make)
