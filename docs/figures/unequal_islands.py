"""Draw what islands whose steps take 1 : 1 : 2 : 5 : 20 times as long contribute.

    python docs/figures/unequal_islands.py

It reads docs/results/raw/unequal_islands.json, of real processes; the command is on
docs/results/raw/unequal_islands.md.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from drawing import BLUE, GREY, INK, ORANGE, RAW, draw, paper, say
from matplotlib.figure import Figure

NAMES = {"fast-a": "1", "fast-b": "1", "x2": "2", "x5": "5", "x20": "20"}
"""How long an island's step takes, in steps of the fast ones."""


def make() -> Figure:
    """Return the figure: shares of tokens, and steps of the fast islands."""
    rows = json.loads((RAW / "unequal_islands.json").read_bytes())["islands"]
    figure, (shares, steps) = paper(10, 3.8, 2, width_ratios=(3, 2))
    for place, island in enumerate(NAMES):
        computed, merged = (
            100 * _median(rows, "B", island, field)
            for field in ("share_computed", "share_merged")
        )
        shares.bar(place - 0.2, computed, 0.38, color=GREY)
        shares.bar(place + 0.2, merged, 0.38, color=BLUE)
        shares.text(place, merged + 1, f"{merged:.1f} %", ha="center", color=INK)
    shares.set_xticks(range(len(NAMES)), [f"{n} x" for n in NAMES.values()])
    shares.set_ylim(0, 42)
    shares.annotate("computed", (3.0, 24), color=GREY, weight="bold")
    shares.annotate("merged", (3.0, 20), color=BLUE, weight="bold")
    say(
        shares,
        "All that an island computes is merged, however slow it is",
        "time of the island's step, in steps of the fast ones",
        "share of the run's tokens, %",
    )
    runs = {"A": "alone", "B": "with the\nslow ones", "S": "one of them\nstopped 15 s"}
    for place, run in enumerate(runs):
        seconds = _median(rows, run, "fast-a", "mean_step_seconds")
        colour = ORANGE if run == "S" else BLUE
        steps.plot(place, 1000 * seconds, "o", ms=9, color=colour)
        steps.text(place, 1000 * seconds + 8, f"{1000 * seconds:.0f} ms", ha="center")
    steps.set_xticks(range(len(runs)), runs.values())
    steps.set(xlim=(-0.6, 2.6), ylim=(0, 200))
    say(steps, "The fast ones do not notice", y="mean step of a fast island, ms")
    return figure


def _median(rows: list[dict[str, Any]], run: str, island: str, field: str) -> float:
    found = [r[field] for r in rows if r["run"] == run and r["island"] == island]
    return statistics.median(found)


if __name__ == "__main__":
    draw("unequal_islands", make)
