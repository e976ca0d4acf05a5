"""Draw what happens to one fragment: taken, sent, merged, published, adopted.

    python docs/figures/how_it_works.py

It emulates two unequal islands for some seconds of virtual time (half a minute on one
core) and draws what happened, as it happened.
"""

from __future__ import annotations

from typing import Any

from drawing import BLUE, GREY, INK, ORANGE, draw, paper, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco_jax import EmulationOptions, History, emulate
from diloco_jax.config import (
    Config,
    IslandConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.simulation.clock import LineSpeed

LINES = {"fast": 2.0, "coordinator": 1.0, "slow": 0.0}
SHOWN_S = (9.6, 15.6)
"""Seconds of virtual time that are drawn, once all is in its stride."""
FRAGMENT_COLOURS = (BLUE, ORANGE)


def config() -> Config:
    """Return two islands, one of them at half the speed, and two fragments."""
    return Config(
        run=RunConfig(
            model=ModelConfig(
                d_model=16, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=16
            ),
            sync=SyncConfig(steps_per_cycle=4, fragments=2, quorum=2),
            sequence_length=32,
            total_tokens=12_000,
        ),
        islands={
            "fast": IslandConfig(batch_size=8, step_seconds=0.5),
            "slow": IslandConfig(batch_size=4, step_seconds=0.8),
        },
    )


def make() -> Figure:
    """Return the figure: time to the right, a line for each process."""
    slow = LineSpeed(latency_s=0.05, up_bytes_per_s=3e4, down_bytes_per_s=3e4)
    options = EmulationOptions(merge_seconds=0.1, line=slow)
    history = emulate(config(), options=options).history
    figure, (axes,) = paper(10, 4.2)
    for name, height in LINES.items():
        axes.axhline(height, color=GREY, lw=1, zorder=0)
        axes.text(
            SHOWN_S[0] - 0.1, height, name, ha="right", va="center", weight="bold"
        )
    _draw_steps(axes, history)
    _draw_fragments(axes, history)
    _name_events(axes, history)
    for place, (text, colour) in enumerate(
        (("fragment 0", FRAGMENT_COLOURS[0]), ("fragment 1", FRAGMENT_COLOURS[1]))
    ):
        axes.text(
            SHOWN_S[1] - 1.5 + 0.78 * place, 2.45, text, color=colour, weight="bold"
        )
    axes.set(xlim=SHOWN_S, ylim=(-0.45, 2.6), yticks=[])
    axes.spines["left"].set_visible(False)
    say(
        axes,
        "Steps go on while fragments travel: taken, merged, sent back, adopted",
        "virtual time, seconds; a tick is the end of a step",
    )
    return figure


def _draw_steps(axes: Axes, history: History) -> None:
    for row in _rows(history.steps):
        height = LINES[row["island"]]
        axes.plot([row["time"]] * 2, [height - 0.06, height + 0.06], color=INK, lw=1)


def _draw_fragments(axes: Axes, history: History) -> None:
    middle = LINES["coordinator"]
    adoptions = _rows(history.adoptions)
    for take in _rows(history.takes):
        colour = FRAGMENT_COLOURS[take["fragment"]]
        start = take["time"], LINES[take["island"]]
        _arrow(axes, start, (take["arrived"], middle), colour)
        axes.plot(*start, "o", color=colour, ms=6)
    for merge in _rows(history.merges):
        colour = FRAGMENT_COLOURS[merge["fragment"]]
        axes.plot(merge["time"], middle, "D", color=colour, ms=9)
        for adoption in adoptions:
            if (adoption["fragment"], adoption["version"]) == (
                merge["fragment"],
                merge["version"],
            ):
                end = adoption["time"], LINES[adoption["island"]]
                _arrow(axes, (merge["time"], middle), end, colour, dashed=True)
                axes.plot(*end, "v", color=colour, ms=8)


def _name_events(axes: Axes, history: History) -> None:
    """Write at the events of the first fragment that is shown whole what they are."""
    takes = [t for t in _rows(history.takes) if t["time"] > SHOWN_S[0]]
    take = next(t for t in takes if t["island"] == "fast")
    same = take["fragment"]
    merge = next(
        m
        for m in _rows(history.merges)
        if m["fragment"] == same and m["time"] > take["arrived"]
    )
    adoption = next(
        a
        for a in _rows(history.adoptions)
        if (a["island"], a["fragment"], a["version"])
        == ("fast", same, merge["version"])
    )
    middle = LINES["coordinator"]
    places = (
        (take["time"], LINES["fast"], "taken at a step's end,\nand sent", (4, 9)),
        (merge["time"], middle, "merged once a quorum\nhas arrived", (-170, -34)),
        (adoption["time"], LINES["fast"], "adopted at a step's end", (6, 10)),
    )
    for time, height, text, offset in places:
        axes.annotate(
            text,
            (time, height),
            offset,
            textcoords="offset points",
            color=INK,
            fontsize=9,
        )


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    *,
    dashed: bool = False,
) -> None:
    if start[0] > SHOWN_S[1] or end[0] < SHOWN_S[0]:
        return
    style = "--" if dashed else "-"
    axes.plot(*zip(start, end, strict=True), style, color=colour, lw=1.3, alpha=0.8)


def _rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    names = list(table)
    columns = (table[name] for name in names)
    return [
        dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)
    ]


if __name__ == "__main__":
    draw("how_it_works", make)
