"""`diloco chaos`: strikes on a run that it starts, or on one of this machine.

`diloco chaos CONFIG` is `diloco run` with strikes. `diloco chaos WORKDIR` strikes a run
of this machine that somebody started.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco_jax import run_files
from diloco_jax.chaos import measure
from diloco_jax.chaos.schedule import (
    ChaosOptions,
    Strike,
    of_options,
    write_schedule,
)
from diloco_jax.chaos.strike import LOOK_S, Moment, Striker
from diloco_jax.cluster.processes import noted, signal_group
from diloco_jax.cluster.run import run as run_locally
from diloco_jax.config import Config
from diloco_jax.errors import EXIT_DONE, ConfigError
from diloco_jax.faults import parse_faults
from diloco_jax.files import write_json
from diloco_jax.observability.terminal import say
from diloco_jax.workdir import is_held, read_config, read_summary


def run(
    config: Config,
    config_path: str,
    console: Console,
    options: ChaosOptions,
    *,
    moment: Moment | None = None,
    look_s: float = LOOK_S,
) -> tuple[int, dict[str, Any]]:
    """Run the config under its strikes; return the exit code and the report ({} if the
    run did not begin). moment, look_s: see `Striker`. Raises what `cluster.run.run`
    raises."""
    strikes, faults = of_options(options, tuple(config.islands))
    planned = [*map(str, strikes), *faults]
    struck = with_restarts(with_faults(config, faults), strikes)
    if options.twin and config.placement.workdir:
        beside = Path(twin_of(config, Path(config.placement.workdir)).placement.workdir)
        if any((beside / sign).exists() for sign in run_files.SIGNS_OF_A_RUN):
            raise ConfigError(
                f"--twin: {beside}, where the run without strikes would be, holds a "
                f"run already; give another --workdir, or remove it"
            )
    if options.save_schedule:
        write_schedule(planned, Path(options.save_schedule))
    for text in planned:
        _tell(console, text)

    def run_under(
        config: Config, strikes: tuple[Strike, ...]
    ) -> tuple[int, dict[str, Any], Path | None]:
        striker = Striker(
            strikes,
            tuple(config.islands),
            functools.partial(_tell, console),
            moment=moment,
            look_s=look_s,
            link_bytes_per_s=options.link_bytes_per_s or math.inf,
            link_delay_s=options.link_delay_s,
        )
        try:
            ran = run_locally(
                config, config_path, console, baseline=False, route=striker.route
            )
        finally:
            striker.close()
        return *ran, striker.workdir

    code, summary, workdir = run_under(struck, strikes)
    if workdir is None or not (workdir / run_files.TAPE).exists():
        return code, {}
    findings = report(workdir, config, planned, summary)
    try:
        if options.twin and code == EXIT_DONE:
            say(console, "\nthe same without strikes")
            code, summary, _ = run_under(twin_of(config, workdir), ())
            if code == EXIT_DONE:
                findings["twin_goodput"] = summary.get("goodput")
                write_json(findings, workdir / run_files.CHAOS_REPORT)
    finally:
        show(findings, workdir, console)
    return code, {**findings, "workdir": str(workdir)}


def with_faults(config: Config, faults: tuple[str, ...]) -> Config:
    """Return the config with these faults too."""
    return config.replace("faults", config.placement.faults + faults).validate()


def with_restarts(config: Config, strikes: tuple[Strike, ...]) -> Config:
    """Return the config with a restart for each kill: they are in a row."""
    faults = parse_faults(config.placement.faults, config.islands).faults
    kills = sum(s.kind == "kill" for s in strikes) + sum(f.kills for f in faults)
    return config.replace("restarts", config.placement.restarts + kills)


def twin_of(config: Config, workdir: Path) -> Config:
    """Return the config of a run in a folder beside the workdir, without faults."""
    beside = workdir.with_name(f"{workdir.name}-twin")
    return config.replace({"faults": (), "workdir": str(beside)})


def report(
    workdir: Path, config: Config, planned: list[str], summary: dict[str, Any]
) -> dict[str, Any]:
    """Measure, write report and plot into the workdir, and return the report. planned:
    the schedule."""
    found = measure.outcomes(workdir, config.islands)
    findings = {
        "planned": planned,
        "outcomes": [dataclasses.asdict(outcome) for outcome in found],
        "goodput": summary.get("goodput"),
        "tokens_lost": {
            name: sum(island["tokens_lost"].values())
            for name, island in summary.get("islands", {}).items()
        },
        "longest_gap_medians": measure.longest_gaps(summary),
    }
    measure.write_plot(found, workdir, workdir / run_files.CHAOS_PLOT)
    write_json(findings, workdir / run_files.CHAOS_REPORT)
    return findings


def show(findings: dict[str, Any], workdir: Path, console: Console) -> None:
    """Print a report for people."""
    found = [measure.StrikeOutcome(**outcome) for outcome in findings["outcomes"]]
    head, *rows = measure.rows(found)
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
    for name, gap in findings["longest_gap_medians"].items():
        lost = findings["tokens_lost"][name]
        text = f"{name}: longest gap {gap:.1f} median steps, {lost:,} tokens lost"
        say(console, text)
    if findings["goodput"] is not None:
        twin = findings.get("twin_goodput")
        beside = f", without strikes {twin:.1%}" if twin is not None else ""
        say(console, f"goodput {findings['goodput']:.1%}{beside}")
    say(console, f"plot: {workdir / run_files.CHAOS_PLOT}")


SETTLE_S = 60.0
"""Seconds after the last strike for which the run is watched."""


def strike_running(
    workdir: Path,
    console: Console,
    options: ChaosOptions,
    *,
    settle_s: float = SETTLE_S,
) -> tuple[int, dict[str, Any]]:
    """Strike the run of this workdir, from now on; return the exit code and the report.

    Raises ConfigError if it does not go on here, or for strikes that only a run that
    `diloco chaos` starts can have.
    """
    config = read_config(workdir, trust_code=True)  # None of it is executed.
    if not _is_running(workdir):
        raise ConfigError(
            f"no process of the run in {workdir} goes on on this machine; start it, or "
            f"give a config, which diloco chaos runs itself"
        )
    strikes, faults = of_options(options, tuple(config.islands))
    _require_possible(strikes, faults, options)
    planned = [*map(str, strikes)]
    if options.save_schedule:
        write_schedule(planned, Path(options.save_schedule))
    _warn(config, strikes, console)

    tell = functools.partial(_tell, console)
    islands = tuple(config.islands)
    striker = Striker(strikes, islands, tell, moment=lambda workdir: True)
    striker.watch(workdir)
    try:
        while not striker.done.wait(LOOK_S):
            if not _is_running(workdir):
                tell("the run is over before its last strikes")
                break
        else:
            tell(f"none is left; what they cost is watched for {settle_s:g} s")
            striker.closed.wait(settle_s)
    except KeyboardInterrupt:
        tell("ended by hand; what was stopped goes on")
    finally:
        striker.close()
    findings = report(workdir, config, planned, read_summary(workdir))
    show(findings, workdir, console)
    return EXIT_DONE, {**findings, "workdir": str(workdir)}


def _is_running(workdir: Path) -> bool:
    """Tell whether the run's launcher goes on, and a process that it noted: without
    it, what it noted may be another's by now."""
    pids = itertools.chain.from_iterable(noted(workdir).values())
    return is_held(workdir) and any(signal_group(pid, 0) for pid in pids)


def _require_possible(
    strikes: Sequence[Strike], faults: Sequence[str], options: ChaosOptions
) -> None:
    links = [str(strike) for strike in strikes if strike.of_network]
    if options.link_bytes_per_s:
        links.append(f"--link-bytes-per-s {options.link_bytes_per_s:g}")
    if options.link_delay_s:
        links.append(f"--link-delay-s {options.link_delay_s:g}")
    for what, why in (
        (faults, "a process strikes itself at a step that it was started with"),
        (links, "links pass through relays that stand before its islands start"),
        (["--twin"] * options.twin, "its twin would run beside it"),
    ):
        if what:
            raise ConfigError(
                f"{', '.join(what)}: not in a run that goes on already, since {why}; "
                f"give the run's config.json instead, which diloco chaos runs"
            )


def _tell(console: Console, text: str) -> None:
    say(console, f"strike: {text}")


def _warn(config: Config, strikes: Sequence[Strike], console: Console) -> None:
    """Tell people if the launcher may give up before the last kill."""
    kills = sum(strike.kind == "kill" for strike in strikes)
    restarts = config.placement.restarts
    if kills > restarts:
        say(
            console,
            f"{kills} kills are planned, and this run starts a process again "
            f"{restarts} times in a row (placement.restarts): it may end",
        )
