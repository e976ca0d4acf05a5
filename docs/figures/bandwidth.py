"""Draw the bandwidth of one site, and the speed over ordinary links.

    python docs/figures/bandwidth.py

It reads docs/results/raw/goodput.json; docs/results/goodput.md has the commands.
"""

from __future__ import annotations

import json

from drawing import BLUE, GREEN, GREY, INK, ORANGE, RAW, draw, paper, say
from matplotlib.figure import Figure


def make() -> Figure:
    """Return the figure: bars on a logarithmic axis."""
    found = json.loads((RAW / "goodput.json").read_bytes())
    int8, int4 = found["bandwidth_int8"], found["bandwidth_int4"]
    bars = [
        ("data-parallel", int8["data_parallel_gbit_per_s"], GREY),
        ("decoupled, int8", int8["decoupled_gbit_per_s"], BLUE),
        ("decoupled, int4", int4["decoupled_gbit_per_s"], GREEN),
        ("published, decoupled", 0.84, ORANGE),
    ]
    figure, (axes,) = paper(7, 3.0)
    for place, (_, rate, colour) in enumerate(reversed(bars)):
        axes.barh(place, rate, 0.6, color=colour)
        axes.annotate(
            f"{rate:.3g} Gbit/s",
            (rate, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_yticks(range(len(bars)), [name for name, *_ in reversed(bars)], color=INK)
    axes.set_xscale("log")
    axes.set(xlim=(0.3, 900))
    times = bars[0][1] / bars[1][1]
    say(
        axes,
        f"1/{times:.0f} of the traffic of data-parallel training",
        "Gbit/s of one of 8 sites: 7 B parameters, steps of 1 s, H = 24 (logarithmic)",
    )
    return figure


if __name__ == "__main__":
    draw("bandwidth", make)
