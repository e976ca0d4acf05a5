"""Draw the simulated goodput of 1.2 million chips beside the published one.

    python docs/figures/goodput.py

It reads docs/results/raw/goodput.json; docs/results/goodput.md has the commands.
"""

from __future__ import annotations

import json

from drawing import BLUE, GREY, INK, ORANGE, RAW, draw, paper, say
from matplotlib.figure import Figure

WAYS = {
    "rigid": "data-parallel:\nall stop for each failure",
    "elastic": "data-parallel:\nelastic slices",
    "decoupled_8": "decoupled:\n8 islands",
}


def make() -> Figure:
    """Return the figure: ours as bars, the published ones as lines across them."""
    found = json.loads((RAW / "goodput.json").read_bytes())
    figure, (axes,) = paper(7, 3.8)
    for place, way in enumerate(WAYS):
        ours = 100 * found[way]["compute_goodput"]
        published = 100 * found[way]["published_compute_goodput"]
        colour = BLUE if way.startswith("decoupled") else GREY
        axes.bar(place, ours, 0.55, color=colour)
        axes.text(
            place, ours / 2, f"{ours:.0f} %", ha="center", color="white", weight="bold"
        )
        axes.hlines(published, place - 0.38, place + 0.38, color=ORANGE, lw=2.5)
        axes.text(
            place,
            max(ours, published) + 1.5,
            f"published {published:.0f} %",
            ha="center",
            color=ORANGE,
            fontsize=9,
        )
    axes.set_xticks(range(len(WAYS)), WAYS.values(), color=INK)
    axes.set(ylim=(0, 100))
    say(
        axes,
        "1.2 million chips that fail: islands keep nine tenths of their time",
        y="goodput, % of the chips' time",
    )
    return figure


if __name__ == "__main__":
    draw("goodput", make)
