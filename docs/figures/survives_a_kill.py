"""Draw how many steps each island of a recorded run has made while one was killed.

The committed picture was made on two CPU cores, on 2026-11-24, by

    diloco run configs/quickstart.py --workdir runs/kill --total-tokens 400000 \
        --placement.faults v5p-b@60:kill
    python docs/figures/survives_a_kill.py runs/kill docs/figures/survives_a_kill.svg

It reads the run's tape and summary. A point is a step at which an island took or
adopted a fragment, at the time at which the coordinator heard of it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from diloco_jax.observability.tape import read_tape

matplotlib.use("agg")
matplotlib.rcParams["svg.hashsalt"] = "survives_a_kill"

COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7")  # Okabe and Ito.
INK, PAPER = "#222222", "#ffffff"  # Opaque, so that a dark page shows it as well.
STYLES = ("-", "--", "-")

Lines = dict[str, list[list[tuple[float, int]]]]
"""By island, one list of (seconds, steps) for each incarnation."""


def main(workdir: Path, picture: Path) -> None:
    """Write the picture of the run in `workdir`."""
    records = list(read_tape(workdir / "tape.jsonl"))
    lines, (killed, start, end) = steps_of(records), absence_of(records)
    summary = json.loads((workdir / "summary.json").read_bytes())
    lost = sum(summary["tokens_lost"].values())
    figure, axes = pyplot.subplots(figsize=(8, 4), facecolor=PAPER)
    axes.set_facecolor(PAPER)
    for index, (island, parts) in enumerate(sorted(lines.items())):
        for part in parts:
            axes.plot(
                *zip(*part, strict=True), STYLES[index % 3], color=COLOURS[index], lw=2
            )
        seconds, steps = parts[-1][-1]
        axes.annotate(
            island,
            (seconds, steps),
            (6, 0),
            textcoords="offset points",
            color=COLOURS[index],
            va="center",
            weight="bold",
        )
    axes.axvspan(start, end, color="#999999", alpha=0.25, lw=0)
    axes.annotate(
        f"{killed} is killed\nand away for {end - start:.0f} s",
        (end, 0),
        (6, 8),
        textcoords="offset points",
        color=INK,
    )
    axes.set_title(
        f"{killed} is killed: it loses {lost:,} tokens, and the others keep their pace",
        color=INK,
        loc="left",
    )
    axes.set_xlabel("time since the first step, seconds", color=INK)
    axes.set_ylabel("inner steps of the island", color=INK)
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def steps_of(records: list[dict[str, Any]]) -> Lines:
    """Steps over time; those of an island's earlier incarnations count on."""
    found: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for record in records:
        if record["kind"] == "island":
            key = record["island"], record["incarnation"]
            found[key].append((record["time"], record["record"]["step"]))
    begin = min(time for points in found.values() for time, step in points if step)
    lines: Lines = defaultdict(list)
    for (island, _), points in sorted(found.items()):
        before = lines[island][-1][-1][1] if lines[island] else 0
        lines[island].append([(t - begin, before + s) for t, s in points])
    return lines


def absence_of(records: list[dict[str, Any]]) -> tuple[str, float, float]:
    """The island that was killed, from when and until when it made no step."""
    died = next(r for r in records if r["kind"] == "left" and r["reason"] == "died")
    island, incarnation = died["island"], died["incarnation"]
    stepped = [r for r in records if r["kind"] == "island" and r["record"]["step"]]
    begin = min(r["time"] for r in stepped)
    mine = [r for r in stepped if r["island"] == island]
    last = max(r["time"] for r in mine if r["incarnation"] == incarnation)
    first = min(r["time"] for r in mine if r["incarnation"] > incarnation)
    return island, last - begin, first - begin


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
