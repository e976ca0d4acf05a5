"""The document of `quality.py`: paired differences with intervals, tables and plots."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import support
from quality_configs import (
    HEADLINE_SEEDS,
    MIN_SEEDS,
    SIZES,
    Row,
)
from quality_levers import LADDER, ORDERS, RUNGS, SHORT
from quality_rows import MIXTURE, RATE, rates, rows, same_runs
from quality_variants import CYCLE, PRESET

from diloco_jax.simulation.sweep import half_interval

BEYOND, BEYOND_PAIRS = 2.0, 8
"""Most points by which a mixture's gap may be above the dense one's, and pairs."""
PUBLISHED_GAPS = {1: -0.1, 2: 0.7, 4: 2.0, 8: 3.9}
"""Percent over data-parallel by islands, 35 M parameters: synchronous, 20 tokens per
parameter, H = 30, each at its own best batch size (arXiv 2503.09799, table 4)."""
FINDINGS = Path(__file__).with_name("quality_findings.md")
"""The page: answers first."""
DETAILS = Path(__file__).with_name("quality_details.md")
"""All that was found; it stands in the appendix, before the rows."""
FIGURE = "The gap to data-parallel: more islands cost more, and what takes it off"
"""The finding that the picture shows."""
ISLANDS = (1, 2, 4, 8, 16)
NUDGE = 1.035
"""Factor of x between lines, so that no interval hides another."""
BYTES = "bytes"
"""In a template, before the rows whose bytes are compared."""
BOUNDS = (
    # Row, as the check calls it, against, upper end of the interval in percent.
    (
        "decoupled, 8 islands",
        "decoupled, 8 islands",
        "synchronous DiLoCo, 8 islands",
        0.5,
    ),
    (
        "decoupled, 4 fast + 4 slow islands",
        "decoupled, 4 fast + 4 slow islands",
        "synchronous DiLoCo, 8 islands",
        0.5,
    ),
    (
        "decoupled, failures as at 1.2 M chips",
        "decoupled, failures as at 1.2 M chips",
        "synchronous DiLoCo, 8 islands",
        1.0,
    ),
    ("decoupled, 8 islands", "int8 both ways", "bf16 both ways", 0.3),
    ("int4 both ways", "int4 both ways", "bf16 both ways", 0.5),
    (
        "one island, outer optimizer",
        "one island, outer optimizer",
        "data-parallel",
        0.0,
    ),
)

Runs = Sequence[dict[str, Any]]
Gap = tuple[float, float, float, int]
"""A value of x, and the result of `difference` there."""


def write(out: Path, doc: str | None, runs: Runs) -> int:
    """Writes quality.md, its appendix, plot and raw numbers; returns the exit code."""
    tables: dict[str, list[dict[str, str]]] = {}
    checks: list[support.Check] = []
    for size in SIZES:
        losses, same = _losses(runs, size), same_runs(size)
        if not losses:
            continue
        for row in rows(SIZES[size]):
            if row.name in losses:
                heading = f"{size}: {row.group}"
                tables.setdefault(heading, []).append(_line(row, losses, same))
        if swept := _swept(size, losses):
            tables[f"{size}: sweep of learning rates (seed 0)"] = swept
        checks += _checks(size, losses)
    _plot(out / "quality.png", runs)
    done = ", ".join(_done(runs, size) for size in SIZES)
    (out / "quality.md").write_text(told(FINDINGS, runs))
    done = support.wrapped(f"Done so far: {done}.")
    text = f"{doc}\n{done}\n\n{told(DETAILS, runs)}"
    return support.write_results(
        out, "quality", text, tables, checks, {"runs": list(runs)}
    )


def told(template: Path, runs: Runs) -> str:
    """The text with `{size; row; against}` replaced by what was found, and wrapped;
    `against` is the row's own if it is left out. After `{bytes; ` stand the bytes of
    payloads over those of `against`, after `{ladder; ` a size. Raises SystemExit naming
    one that is no row."""

    def fill(match: re.Match[str]) -> str:
        words = match[1].split("; ")
        if words[0] == LADDER:
            return ladder(_losses(runs, words[1]))
        size, name, *rest = words[1:] if words[0] == BYTES else words
        by_name = _by_name(size) if size in SIZES else {}
        if unknown := {name, *rest} - by_name.keys():
            raise SystemExit(f"{template.name}: {match[0]}: no {unknown} at {size!r}")
        against = rest[0] if rest else by_name[name].against
        if words[0] == BYTES:
            return _ratio(_found(runs, size, _bytes), name, against)
        return _signed(difference(_losses(runs, size), name, against))

    text = re.sub(r"\{([^{}]+)\}", fill, template.read_text())
    return support.wrapped(text)


@functools.cache
def _by_name(size: str) -> dict[str, Row]:
    """Return all rows of a size, the sweep's too, by name."""
    return {row.name: row for row in (*rows(SIZES[size]), *rates(SIZES[size]))}


def _ratio(found: dict[str, dict[int, float]], name: str, against: str) -> str:
    """Return the mean ratio of the pairs of two rows."""
    own, others = found.get(name, {}), found.get(against, {})
    ratios = [own[seed] / others[seed] for seed in own if others.get(seed)]
    return f"{statistics.fmean(ratios):.2f}" if ratios else "not run"


def _done(runs: Runs, size: str) -> str:
    """Return the number of runs, and the device if it was not the CPU."""
    here = [run for run in runs if run["size"] == size]
    devices = Counter(run.get("device", "cpu") for run in here)
    found = f"{devices.total()} runs at {size}"
    others = [f"{n} on an {device}" for device, n in devices.items() if device != "cpu"]
    return f"{found} ({', '.join(others)})" if others else found


def difference(
    losses: dict[str, dict[int, float]], name: str, against: str
) -> tuple[float, float, int] | None:
    """Return the mean paired difference in percent, half of its 95 % interval, and the
    number of pairs; None without a pair. With one pair the interval is infinite."""
    return interval(list(gaps(losses, name, against).values()))


def gaps(
    losses: dict[str, dict[int, float]], name: str, against: str
) -> dict[int, float]:
    """Return the paired differences in percent, by seed."""
    return {
        seed: 100 * (losses[name][seed] / losses[against][seed] - 1)
        for seed in losses.get(name, {})
        if seed in losses.get(against, {})
    }


def beyond(
    losses: dict[str, dict[int, float]], cycle: str
) -> tuple[float, float, int] | None:
    """Return by how many points the gap of 8 islands of a mixture to data-parallel is
    above that of the dense model in the same cycle, paired by seed, as `difference`
    does."""
    name = f"{MIXTURE}, 8 islands{f', {cycle}' if cycle else ''}"
    own = gaps(losses, name, f"{MIXTURE}, data-parallel")
    dense = gaps(losses, cycle or "decoupled, 8 islands", "data-parallel")
    return interval([own[seed] - dense[seed] for seed in own if seed in dense])


def interval(found: Sequence[float]) -> tuple[float, float, int] | None:
    """Return mean, half of its 95 % interval, which is infinite for one, and number."""
    if len(found) < 2:
        return (found[0], float("inf"), 1) if found else None
    return statistics.fmean(found), half_interval(list(found)), len(found)


def shares(
    losses: dict[str, dict[int, float]], order: int, place: int
) -> dict[int, float]:
    """Return what a rung takes off by seed, in percent of the loss of data-parallel."""
    above, below = (losses.get(ORDERS[order][n], {}) for n in (place, place + 1))
    base = losses.get("data-parallel", {})
    seeds = sorted(above.keys() & below.keys() & base.keys())
    return {seed: 100 * (above[seed] - below[seed]) / base[seed] for seed in seeds}


def ladder(losses: dict[str, dict[int, float]]) -> str:
    """Return the rows of a table: the shares of each rung in both orders, and their
    difference, paired by seed."""

    def told(found: dict[int, float]) -> str:
        return _signed(interval(list(found.values())), unit="")

    lines = []
    for name, *places in RUNGS:
        one, other = (
            shares(losses, order, place) for order, place in enumerate(places)
        )
        both = {s: one[s] - other[s] for s in one.keys() & other.keys()}
        shared = all(
            ORDERS[0][places[0] + n] == ORDERS[1][places[1] + n] for n in (0, 1)
        )
        cells = [told(one)] + (["", ""] if shared else [told(other), told(both)])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _signed(found: tuple[float, float, int] | None, unit: str = " %") -> str:
    """Return a difference with its interval and its pairs."""
    if found is None:
        return "not run"
    mean, half, pairs = found
    either = f" ± {half:.1f}" if half < float("inf") else ""
    return f"{mean:+.1f}{unit}{either} ({pairs})"


def _losses(runs: Runs, size: str) -> dict[str, dict[int, float]]:
    """Return the losses of all rows that were run, under any name, by seed."""
    return _found(runs, size, operator.itemgetter("loss"))


def _bytes(run: dict[str, Any]) -> float:
    """Return the bytes of a run's payloads both ways; 0 if it did not count them."""
    return float(run.get("bytes_up", 0) + run.get("bytes_down", 0))


def _found(
    runs: Runs, size: str, figure: Callable[[dict[str, Any]], float]
) -> dict[str, dict[int, float]]:
    """Return a figure of all rows that were run, under any name, by seed."""
    same = same_runs(size)
    done: dict[str, dict[int, float]] = {}
    for run in runs:
        if run["size"] == size:
            done.setdefault(same[run["row"]], {})[run["seed"]] = figure(run)
    return {name: done[first] for name, first in same.items() if first in done}


def _line(
    row: Row, losses: dict[str, dict[int, float]], same: dict[str, str]
) -> dict[str, str]:
    found = losses[row.name]
    line = {
        "row": row.name,
        "loss, mean": f"{statistics.fmean(found.values()):.4f}",
        "seeds": str(len(found)),
        "against": row.against,
        "difference, 95 % interval": "",
    }
    compared = difference(losses, row.name, row.against) if row.against else None
    if row.against and same[row.name] == same[row.against]:
        line["difference, 95 % interval"] = "the same run"
    elif compared is not None:
        mean, half, _ = compared
        either = f"± {half:.2f}" if half < float("inf") else "(one pair)"
        line["difference, 95 % interval"] = f"{mean:+.2f} % {either}"
    return line


def _swept(size: str, losses: dict[str, dict[int, float]]) -> list[dict[str, str]]:
    """Return the table of methods with more than one rate."""
    done = [r.name for r in rates(SIZES[size]) if 0 in losses.get(r.name, {})]
    points = Counter(name.rpartition(RATE)[0] for name in done)
    return [
        {"row": name, "loss": f"{losses[name][0]:.4f}"}
        for name in done
        if points[name.rpartition(RATE)[0]] > 1
    ]


def _checks(size: str, losses: dict[str, dict[int, float]]) -> list[support.Check]:
    """A bound holds if the upper end of an interval of enough pairs is below it."""
    checks = []
    outers = ("", PRESET, CYCLE + PRESET)
    for outer, (name, told, against, bound) in itertools.product(outers, BOUNDS):
        # Both rows with an outer step of 1, then both with the other one.
        compared = difference(losses, name + outer, against + outer)
        if compared is None:
            continue
        mean, half, pairs = compared
        what = f"{size}: {told} over {against}{outer}, upper end of {pairs} pairs"
        check = support.at_most(what, mean + half, bound, ".2f")
        if pairs < HEADLINE_SEEDS:
            what = f"{what} ({HEADLINE_SEEDS} are needed)"
            check = dataclasses.replace(check, what=what, holds=False)
        checks.append(check)
    for cycle in ("", SHORT, SHORT + PRESET):
        if (found := beyond(losses, cycle)) is None:
            continue
        mean, half, pairs = found
        what = f"{size}: gap of a mixture of experts over that of the dense model, "
        what += f"{cycle or 'H = P = 12'}, upper end of {pairs} pairs"
        check = support.at_most(what, mean + half, BEYOND, ".2f")
        if pairs < BEYOND_PAIRS:
            what = f"{what} ({BEYOND_PAIRS} are needed)"
            check = dataclasses.replace(check, what=what, holds=False)
        checks.append(check)
    return checks


def _plot(path: Path, runs: Runs) -> None:
    """Plot the gap to data-parallel by islands, and what each rung takes off it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (islands, rungs) = pyplot.subplots(
        1, 2, figsize=(12, 5.5), layout="constrained"
    )
    figure.suptitle(FIGURE, fontsize="x-large")
    _plot_islands(islands, runs)
    _plot_ladder(rungs, runs)
    islands.set(title="More islands cost more", xlabel="islands")
    islands.set(ylabel="loss over data-parallel, %")
    islands.axhline(0, color="0.8", zorder=0)
    islands.minorticks_off()
    rungs.set(title="8 islands, from H = P = 24 to data-parallel")
    rungs.set(xlabel="what the change takes off, % of data-parallel's loss")
    rungs.axvline(0, color="0.8", zorder=0)
    for axes in (islands, rungs):
        # Below the axes no label can lie on a line or on another label.
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        axes.legend(fontsize="small", ncol=2, frameon=False, **below)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_islands(axes: Any, runs: Runs) -> None:
    """Plot our gaps by the number of islands, beside the published ones."""
    by_islands: dict[float, tuple[str, str]] = {
        count: (_of(count), "data-parallel") for count in ISLANDS
    }
    lines = {size: _gaps(_losses(runs, size), by_islands) for size in SIZES}
    drawn = {label: points for label, points in lines.items() if points}
    for order, (label, points) in enumerate(drawn.items()):
        xs, gaps, halves, pairs = zip(*points, strict=True)
        moved = [x * NUDGE ** (order - (len(drawn) - 1) / 2) for x in xs]
        bars = list(map(_bar, halves, pairs))
        axes.errorbar(moved, gaps, bars, marker="o", elinewidth=1, label=label)
    label = "published, 35 M, synchronous"
    axes.plot(PUBLISHED_GAPS.keys(), PUBLISHED_GAPS.values(), "k--", label=label)
    axes.set_xscale("log")
    axes.set_xticks(ISLANDS, [f"{count}" for count in ISLANDS])


def _plot_ladder(axes: Any, runs: Runs) -> None:
    """Plot the shares of the rungs, in the first order."""
    drawn = [size for size in SIZES if shares(_losses(runs, size), 0, 0)]
    for number, size in enumerate(drawn):
        losses = _losses(runs, size)
        found = [interval(list(shares(losses, 0, own).values())) for _, own, _ in RUNGS]
        rungs = [(y, *each) for y, each in enumerate(found) if each]
        for y, mean, half, pairs in rungs:
            place = y + (number - (len(drawn) - 1) / 2) / (len(drawn) + 1)
            bar = {"height": 1 / (len(drawn) + 1), "color": f"C{number}"}
            axes.barh(place, mean, xerr=_bar(half, pairs), **bar)
        axes.barh(0, 0, color=f"C{number}", label=size)
    axes.set_yticks(range(len(RUNGS)), [name for name, *_ in RUNGS])
    axes.invert_yaxis()


def _of(count: int) -> str:
    if count == 1:
        return "one island, outer optimizer"
    return f"decoupled, {count} islands"


def _gaps(
    losses: dict[str, dict[int, float]], rows_by_x: dict[float, tuple[str, str]]
) -> list[Gap]:
    """Return the gaps of the pairs of rows that were run."""
    return [
        (x, *found)
        for x, pair in sorted(rows_by_x.items())
        if (found := difference(losses, *pair))
    ]


def _bar(half: float, pairs: int) -> float:
    """Return half of an interval as drawn: that of two pairs would hide all others."""
    return half if pairs >= MIN_SEEDS else 0.0
