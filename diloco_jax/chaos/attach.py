"""`diloco chaos WORKDIR`: strikes on a run of this machine that somebody started."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco_jax import run_files
from diloco_jax.chaos.command import report, scheduled, show
from diloco_jax.chaos.options import ChaosOptions
from diloco_jax.chaos.schedule import Strike, write_schedule
from diloco_jax.chaos.striker import LOOK_S, Striker
from diloco_jax.config import Config
from diloco_jax.errors import EXIT_DONE, ConfigError
from diloco_jax.files import write_json
from diloco_jax.workdir import read_config

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
    strikes, faults = scheduled(config, options)
    _require_possible(strikes, faults, options)
    planned = [*map(str, strikes)]
    if options.save_schedule:
        write_schedule(planned, Path(options.save_schedule))
    _warn(config, strikes, console)

    def say(text: str) -> None:
        console.print(f"strike: {text}", highlight=False)

    striker = Striker(
        strikes, tuple(config.islands), say, moment=lambda workdir: True, look_s=LOOK_S
    )
    striker.watch(workdir)
    try:
        while not striker.done.wait(LOOK_S):
            if not _is_running(workdir):
                say("the run is over before its last strikes")
                break
        else:
            say(f"none is left; what they cost is watched for {settle_s:g} s")
            striker.closed.wait(settle_s)
    except KeyboardInterrupt:
        say("ended by hand; what was stopped goes on")
    finally:
        striker.close()
    summary = workdir / run_files.SUMMARY
    facts = json.loads(summary.read_bytes()) if summary.exists() else {}
    findings = report(workdir, config, planned, facts)
    write_json(findings, workdir / run_files.CHAOS_REPORT)
    findings["workdir"] = str(workdir)
    show(findings, console)
    return EXIT_DONE, findings


def _is_running(workdir: Path) -> bool:
    """Tell whether a process goes on that the run's launcher noted."""
    try:
        noted = json.loads((workdir / run_files.PROCESSES).read_bytes())
    except OSError:
        return False
    return any(_is_alive(pid) for pids in noted.values() for pid in pids)


def _is_alive(pid: int) -> bool:
    try:
        # The launcher made it the leader of its group.
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def _require_possible(
    strikes: Sequence[Strike], faults: Sequence[str], options: ChaosOptions
) -> None:
    links = [str(strike) for strike in strikes if strike.of_network]
    if options.link_bytes_per_s:
        links.append(f"--link-bytes-per-s {options.link_bytes_per_s:g}")
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


def _warn(config: Config, strikes: Sequence[Strike], console: Console) -> None:
    """Tell people if the launcher may give up before the last kill."""
    kills = sum(strike.kind == "kill" for strike in strikes)
    restarts = config.placement.restarts
    if kills > restarts:
        console.print(
            f"{kills} kills are planned, and this run starts a process again "
            f"{restarts} times in a row (placement.restarts): it may end",
            highlight=False,
        )
