"""Draw a recorded run in which one island is killed: tokens over time, and the loss.

    python docs/figures/survives_a_kill.py WORKDIR docs/figures/survives_a_kill.svg

The committed picture is of the run that README prints (`first_run.sh`). A point on the
left is a step at which an island took or adopted a fragment, at the time at which the
coordinator heard of it; an island's tokens are its steps times the tokens of each. The
loss is the mean of the islands', smoothed, by what was merged until then. The line
below is where plain training on as many tokens ended (`diloco run --baseline`).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from drawing import BLUE, GREEN, GREY, INK, ORANGE, paper, save, say
from matplotlib.figure import Figure

from diloco_jax.observability.tape import read_lines, read_tape

COLOURS = (BLUE, ORANGE, GREEN)
STYLES = ("-", "--", "-")
SMOOTHED = 25
"""Reports over which the loss is a mean."""

Lines = dict[str, list[list[tuple[float, float]]]]
"""By island, one list of (seconds, million tokens) for each incarnation."""


def make(workdir: Path) -> Figure:
    """Return the picture of the run in `workdir`."""
    records = list(read_tape(workdir / "tape.jsonl"))
    summary = json.loads((workdir / "summary.json").read_bytes())
    lines, (killed, start, end) = tokens_of(records), absence_of(records)
    figure, (left, right) = paper(11, 3.9, 2)
    for index, (island, parts) in enumerate(sorted(lines.items())):
        style, colour = STYLES[index % 3], COLOURS[index % 3]
        for part in parts:
            left.plot(*zip(*part, strict=True), style, color=colour, lw=2)
        left.annotate(
            island,
            parts[-1][-1],
            (6, 5 if index % 2 == 0 else -7),
            textcoords="offset points",
            color=colour,
            va="center",
            weight="bold",
        )
    left.axvspan(start, end, color=GREY, alpha=0.3, lw=0)
    left.annotate(
        f"{killed} is killed, and makes no step for {end - start:.0f} s",
        (end, 0),
        (6, 6),
        textcoords="offset points",
        color=INK,
    )
    lost = sum(summary["tokens_lost"].values())
    merged = summary["tokens_merged"]
    say(
        left,
        f"{killed} is killed: {lost:,} of {merged / 1e6:.2g} M tokens are lost",
        "seconds since the first step",
        "million tokens of each island",
    )
    left.set(xlim=(0, None), ylim=(0, None))
    left.margins(x=0.1)

    tokens, losses = loss_of(workdir)
    right.plot(tokens, losses, color=BLUE, lw=2, label="islands, on what they train on")
    end_loss, plain = summary["eval_loss"], summary["baseline"]["eval_loss"]
    right.plot(
        [merged / 1e6],
        [end_loss],
        "o",
        color=BLUE,
        ms=7,
        label=f"merged model, on validation text: {end_loss:.3f}",
    )
    right.axhline(
        plain,
        color=INK,
        lw=1,
        ls="--",
        label=f"plain training ends at {plain:.3f}",
    )
    right.legend(frameon=False, labelcolor=INK)
    say(
        right,
        f"The loss ends {100 * (end_loss / plain - 1):.1f} % above plain training",
        "million tokens merged",
        "nats per token",
    )
    right.set(xlim=(0, None))
    return figure


def tokens_of(records: list[dict[str, Any]]) -> Lines:
    """Tokens over time; those of an island's earlier incarnations count on."""
    found: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    each: dict[str, int] = {}
    for record in records:
        if record["kind"] == "joined":
            each[record["island"]] = record["tokens_per_step"]
        if record["kind"] == "island":
            key = record["island"], record["incarnation"]
            found[key].append((record["time"], record["record"]["step"]))
    begin = min(time for points in found.values() for time, step in points if step)
    lines: Lines = defaultdict(list)
    for (island, _), points in sorted(found.items()):
        before = lines[island][-1][-1][1] if lines[island] else 0.0
        mine = each[island] / 1e6
        lines[island].append([(t - begin, before + s * mine) for t, s in points])
    return lines


def loss_of(workdir: Path) -> tuple[list[float], list[float]]:
    """Million tokens merged until each report, and the mean loss of those around it."""
    times, merged = merged_of(list(read_tape(workdir / "tape.jsonl")))
    reports = [
        (line["time"], line["loss"])
        for line in read_lines(workdir / "metrics.jsonl")
        if line["kind"] == "island" and line["loss"] is not None
    ]
    tokens = np.interp([time for time, _ in reports], times, merged)
    weights = np.ones(SMOOTHED) / SMOOTHED
    losses = np.convolve([loss for _, loss in reports], weights, "valid")
    half = SMOOTHED // 2
    kept = tokens[half : half + len(losses)]
    return kept.tolist(), losses.tolist()


def merged_of(records: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Times of merges, and the million tokens of the model merged until each."""
    merges = [record for record in records if record["kind"] == "merged"]
    fragments = 1 + max(record["fragment"] for record in merges)
    tokens = [sum(c["tokens"] for c in record["contributions"]) for record in merges]
    so_far = np.cumsum(tokens) / fragments / 1e6
    return [record["time"] for record in merges], so_far.tolist()


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
    save(Path(sys.argv[2]), lambda: make(Path(sys.argv[1])))
