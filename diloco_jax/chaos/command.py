"""`diloco chaos`: a local run under strikes, and a report of what they cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco_jax import run_files
from diloco_jax.chaos import measure
from diloco_jax.chaos.options import ChaosOptions
from diloco_jax.chaos.schedule import Strike, parse_strikes, random_strikes
from diloco_jax.chaos.striker import Striker
from diloco_jax.cluster.run import run as run_locally
from diloco_jax.config import Config
from diloco_jax.errors import ConfigError
from diloco_jax.files import write_json
from diloco_jax.observability.tape import read_tape


def run(
    config: Config, config_path: str, console: Console, options: ChaosOptions
) -> tuple[int, dict[str, Any]]:
    """Run the config under its strikes; return the exit code and the report ({} if the
    run did not begin). Raises what `cluster.run.run` raises."""
    islands = tuple(config.islands)
    strikes = scheduled(config, options)
    config = with_restarts(config, strikes)
    for strike in strikes:
        console.print(f"strike: {strike}", highlight=False)
    striker = Striker(
        strikes, islands, lambda text: console.print(f"strike: {text}", highlight=False)
    )
    try:
        code, summary = run_locally(
            config, config_path, console, baseline=False, route=striker.route
        )
    finally:
        striker.close()
    if striker.workdir is None or not (striker.workdir / run_files.TAPE).exists():
        return code, {}
    told = report(striker.workdir, config, strikes, summary)
    _show(told, console)
    return code, told


def scheduled(config: Config, options: ChaosOptions) -> tuple[Strike, ...]:
    """Return the strikes of the options; ConfigError if they cannot be carried out."""
    islands = tuple(config.islands)
    strikes = parse_strikes(options.strikes, islands) or random_strikes(
        options.schedule_seed,
        islands,
        every_s=options.every_s,
        for_s=options.for_s,
        kinds=options.kinds,
    )
    workers = config.placement.workers
    network = next((s for s in strikes if s.of_network), None)
    if workers > 1 and network:
        raise ConfigError(
            f"{network} strikes a link, but placement.workers = {workers} have links "
            f"of their own, which are not struck; set placement.workers = 1"
        )
    return strikes


def with_restarts(config: Config, strikes: tuple[Strike, ...]) -> Config:
    """Return the config with a restart for each kill: they are in a row."""
    restarts = config.placement.restarts + sum(s.kind == "kill" for s in strikes)
    placement = dataclasses.replace(config.placement, restarts=restarts)
    return dataclasses.replace(config, placement=placement)


def report(
    workdir: Path,
    config: Config,
    strikes: tuple[Strike, ...],
    summary: dict[str, Any],
) -> dict[str, Any]:
    """Measure, write report and plot to the workdir, and return the report."""
    found = measure.outcomes(workdir, config.islands)
    told = {
        "planned": [str(strike) for strike in strikes],
        "outcomes": [dataclasses.asdict(outcome) for outcome in found],
        "goodput": summary.get("goodput"),
        "tokens_lost": {
            name: sum(island["tokens_lost"].values())
            for name, island in summary.get("islands", {}).items()
        },
        "longest_gap_medians": measure.longest_gaps(summary),
    }
    write_json(told, workdir / run_files.CHAOS_REPORT)
    tape = list(read_tape(workdir / run_files.TAPE))
    measure.write_plot(found, tape, workdir / run_files.CHAOS_PLOT)
    told["workdir"] = str(workdir)
    return told


def _show(told: dict[str, Any], console: Console) -> None:
    found = [measure.StrikeOutcome(**outcome) for outcome in told["outcomes"]]
    head, *rows = measure.rows(found)
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
    for name, gap in told["longest_gap_medians"].items():
        lost = told["tokens_lost"][name]
        text = f"{name}: longest gap {gap:.1f} median steps, {lost:,} tokens lost"
        console.print(text, highlight=False)
    if told["goodput"] is not None:
        console.print(f"goodput {told['goodput']:.1%}", highlight=False)
    path = Path(told["workdir"]) / run_files.CHAOS_PLOT
    console.print(f"plot: {path}", highlight=False, soft_wrap=True)
