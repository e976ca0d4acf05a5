"""Draw the measured bounds of docs/results/raw against their limits.

    python docs/figures/limits.py

It reads the raw files there; docs/results/raw/index.md has the list of all.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from drawing import BLUE, GREY, INK, ORANGE, RAW, draw, paper, say
from matplotlib.figure import Figure

NAMES = (
    "merging",
    "wire",
    "wan",
    "recovery",
    "overhead",
    "inner_step",
    "island_memory",
    "coordinator_memory",
    "coordinator_scale",
    "data",
)
SMALLEST = 0.05
"""Place where anything below a twentieth of its limit is drawn."""


class Bound(NamedTuple):
    """One bound: the share of its limit that is used; at most 1 holds."""

    what: str
    used: float
    measured: str
    limit: str
    holds: bool


def make() -> Figure:
    """Return the figure: one line per bound, grouped by benchmark."""
    groups = [(name, bounds) for name in NAMES if (bounds := bounds_of(name))]
    lines = sum(len(bounds) + 1 for _, bounds in groups)
    figure, (axes,) = paper(9, 1.2 + 0.19 * lines)
    held = total = 0
    ticks, labels, place = [], [], 0
    for name, bounds in groups:
        axes.text(SMALLEST, -place, name, weight="bold", color=INK, va="center")
        place += 1
        for bound in bounds:
            used = max(bound.used, SMALLEST)
            colour = BLUE if bound.holds else ORANGE
            axes.plot([used, 1.0], [-place] * 2, color=GREY, lw=0.8, zorder=1)
            axes.plot(used, -place, "o" if bound.holds else "D", color=colour, ms=5)
            ticks.append(-place)
            labels.append(f"{bound.what}: {bound.measured} ({bound.limit})")
            place, held, total = place + 1, held + bound.holds, total + 1
    axes.axvline(1.0, color=INK, lw=1)
    axes.set_yticks(ticks, labels, color=INK, fontsize=7.5)
    axes.set_xscale("log")
    axes.set(xlim=(SMALLEST * 0.9, 2.5), ylim=(-place, 1))
    axes.set_xticks([0.1, 0.25, 0.5, 1.0, 2.0], ["0.1", "0.25", "0.5", "limit", "2"])
    axes.minorticks_off()
    say(
        axes,
        f"{held} of {total} measured bounds hold",
        "share of the limit that is used (logarithmic); a diamond does not hold",
    )
    return figure


def bounds_of(name: str) -> list[Bound]:
    """Return the bounds of a benchmark whose limit is a number above 0."""
    path = RAW / f"{name}.json"
    if not path.exists():
        return []
    found = []
    for check in json.loads(path.read_bytes())["checks"]:
        sign, _, text = check["bound"].partition(" ")
        try:
            measured, limit = float(check["measured"]), float(text)
        except ValueError:
            continue
        if sign not in ("<=", ">=") or limit <= 0:
            continue
        used = measured / limit if sign == "<=" else limit / max(measured, 1e-12)
        what, told = check["what"], check["measured"]
        found.append(Bound(what, used, told, check["bound"], check["holds"]))
    return found


if __name__ == "__main__":
    draw("limits", make)
