"""Goodput and uptime over chips and islands: table, CSV and plot."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from diloco_jax.config import ConfigError
from diloco_jax.simulation.fleets.goodput import (
    GoodputConfig,
    GoodputResult,
    GoodputSample,
    Method,
    simulate_goodput,
)
from diloco_jax.simulation.progress import Progress, nobody, part

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
ISLANDS = (1, 2, 4, 8, 16)
SWEPT = {"method": get_args(Method), "chips": CHIPS, "islands": ISLANDS}
"""Values that a sweep goes over."""
MEASURES = tuple(field.name for field in dataclasses.fields(GoodputSample))


def sweep_goodput(
    config: GoodputConfig,
    chips: Sequence[int],
    islands: Sequence[int],
    progress: Progress = nobody,
) -> list[GoodputResult]:
    """Simulate each number of chips with every method; all else is as in `config`.

    The methods are both data-parallel ones, and decoupled with each number of islands
    that has a quorum. Raises ConfigError.

    With a spread of the step time, a data-parallel step waits for the slowest of
    several groups, as many as the largest number of islands. Without a spread there is
    one group.
    """
    return list(simulated(points(config, chips, islands), progress))


def points(
    config: GoodputConfig, chips: Sequence[int], islands: Sequence[int]
) -> list[GoodputConfig]:
    """Return the valid configs that a sweep simulates. Raises ConfigError."""
    if max(islands) < config.quorum:
        raise ConfigError(
            f"quorum = {config.quorum}, but a sweep has at most {max(islands)} "
            f"islands: no fragment could ever merge; lower quorum"
        )
    groups = max(islands) if config.step_spread else 1
    ways: list[tuple[Method, int, int]] = [
        ("rigid", groups, 1),
        ("elastic", groups, 1),
    ]
    enough = (count for count in islands if count >= config.quorum)
    ways += [("decoupled", count, config.quorum) for count in enough]
    found = [
        dataclasses.replace(
            config, method=method, islands=count, quorum=quorum, chips=total
        )
        for total in chips
        for method, count, quorum in ways
    ]
    for point in found:
        point.validate()
    return found


def simulated(
    configs: Sequence[GoodputConfig], progress: Progress = nobody
) -> Iterator[GoodputResult]:
    """Yield the results of the configs, one by one."""
    for i, config in enumerate(configs):
        yield simulate_goodput(config, part(progress, i, len(configs)))


def write_csv(results: Sequence[GoodputResult], path: Path) -> None:
    """Write one line per point; every measure has its bounds over seeds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        bounded = [f"{m}{end}" for m in MEASURES for end in ("", "_low", "_high")]
        writer.writerow(["method", "chips", "islands", *bounded])
        for result in results:
            config = result.config
            values = [
                getattr(sample, measure)
                for measure in MEASURES
                for sample in (result.mean, result.low, result.high)
            ]
            writer.writerow([config.method, config.chips, config.islands, *values])


def write_plot(results: Sequence[GoodputResult], path: Path) -> None:
    """Plot compute goodput and uptime over chips, one line per way to use them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    lines: dict[str, list[GoodputResult]] = {}
    for result in results:
        lines.setdefault(result.config.label, []).append(result)
    for measure, axis in zip(("compute_goodput", "uptime"), axes, strict=True):
        for name, line in lines.items():
            chips = [result.config.chips for result in line]
            axis.plot(
                chips,
                [getattr(result.mean, measure) for result in line],
                marker="o",
                linestyle="-" if name.startswith("decoupled") else "--",
                label=name,
            )
            axis.fill_between(
                chips,
                [getattr(result.low, measure) for result in line],
                [getattr(result.high, measure) for result in line],
                alpha=0.2,
            )
        axis.set(xscale="log", xlabel="chips", ylabel=measure.replace("_", " "))
        totals = sorted({result.config.chips for result in results})
        axis.set_xticks(totals, [f"{total / 1000:g} k" for total in totals])
        axis.minorticks_off()
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
