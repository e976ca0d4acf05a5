"""`diloco run --resume WORKDIR`: a run that was stopped goes on.

It goes on with its own `RunConfig`; islands and placement may be others. Nothing in the
workdir changes before everything that can be checked here has been.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError, RunConfig, differences, shared_fields
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator.notes import Recovered
from diloco_jax.files import write_json
from diloco_jax.observability.tape import newest_record
from diloco_jax.paths import absolute, expand
from diloco_jax.protocol.records import from_tape

OPTION = "--resume"


def with_config(arguments: Sequence[str]) -> list[str]:
    """The arguments of `diloco run` with a CONFIG: where `--resume WORKDIR` comes
    without one, the config.json of that workdir."""
    arguments = list(arguments)
    if not arguments or arguments[0].split("=")[0] != OPTION:
        return arguments
    _, equals, value = arguments[0].partition("=")
    if not equals:
        value = arguments[1] if len(arguments) > 1 else ""
    if not value or value.startswith("-"):
        raise ConfigError(f"{OPTION} takes the workdir of the run that is to go on")
    workdir = expand(value)
    if not workdir.is_dir():
        raise ConfigError(_no_folder(workdir))
    if not workdirs.holds_run(workdir):
        raise ConfigError(
            f"{OPTION} {value}: no run is there (there is no run.json); give the "
            f"workdir of a run, or begin one with diloco run CONFIG"
        )
    # Before the config is read: one of another format may have other fields.
    workdirs.require_format(workdir)
    return [str(workdir / run_files.CONFIG), *arguments]


def require_one_workdir(arguments: Sequence[str], workdir: str, resume: str) -> None:
    """Raises ConfigError if the command line asks for a workdir, and to go on in
    another one. The one of a configs file is only where its runs begin."""
    options = {argument.split("=")[0] for argument in arguments}
    if not resume or options.isdisjoint(("--workdir", "--placement.workdir")):
        return
    if Path(absolute(workdir)).resolve() != Path(absolute(resume)).resolve():
        raise ConfigError(
            f"--workdir {workdir} with {OPTION} {resume}: a run goes on in its own "
            f"workdir; leave --workdir out"
        )


def resumed_config(config: Config, workdir: Path) -> Config:
    """The config with which the run in `workdir` goes on.

    config: what the user gave; what it leaves open (corpus, outer optimizer) is as the
    run has it. Raises ConfigError if the workdir holds no run, one of another config or
    format, or one that a coordinator serves just now.
    """
    if not workdir.is_dir():
        raise ConfigError(_no_folder(workdir))
    facts = workdirs.read_facts(workdir)
    written = read_config_json(workdir / run_files.CONFIG).run
    placement = dataclasses.replace(config.placement, workdir=str(workdir))
    run = _filled(config.run, written)
    config = resolve(dataclasses.replace(config, run=run, placement=placement))
    lines = differences(shared_fields(written), shared_fields(config.run))
    if lines:
        raise ConfigError(
            f"run {facts.run_id} in {workdir} goes on with its own settings alone, but "
            f"asked for are others: {'; '.join(lines)} (here: the run's). Islands and "
            f"placement may differ; for anything else, more total_tokens included, "
            f"begin a new run"
        )
    lock = workdir / run_files.LOCK
    if lock.exists():
        with workdirs.held(lock, "a coordinator"):
            pass
    return config


def _no_folder(workdir: Path) -> str:
    return f"{OPTION} {workdir}: there is no such folder; give the workdir of a run"


def finished(workdir: Path) -> dict[str, Any]:
    """The summary of a run that is over; empty while it is not."""
    summary = workdirs.read_summary(workdir)
    return summary if summary.get("phase") == "done" else {}


class ReplacedFiles:
    """The files of the workdir that a resumed run writes anew: made, the new
    `config.json` is there, the old summary and the address of a coordinator that was
    killed are not. `undo` is for a start that failed."""

    def __init__(self, config: Config, workdir: Path) -> None:
        self._before = {
            path: path.read_bytes()
            for path in (workdir / run_files.CONFIG, workdir / run_files.SUMMARY)
            if path.exists()
        }
        write_config_json(config, workdir / run_files.CONFIG)
        for name in (run_files.SUMMARY, run_files.ADDRESS):
            (workdir / name).unlink(missing_ok=True)

    def undo(self) -> None:
        """Config and summary are as they were."""
        for path, octets in self._before.items():
            write_json(json.loads(octets), path)


def tell_resumed(workdir: Path, console: Console) -> None:
    """Once the coordinator is up: with what the run goes on."""
    line = newest_record(workdir / run_files.TAPE, "recovered")
    recovered = from_tape(line, Recovered)
    merges = sum(version.number for version in recovered.versions)
    console.print(
        f"goes on after {merges:,} merges from global parameters "
        f"{recovered.parameters_digest}",
        highlight=False,
    )


def _filled(run: RunConfig, written: RunConfig) -> RunConfig:
    """With what `resolving.resolve` decided when the run began."""
    data = run.data
    if not data.digest:
        data = dataclasses.replace(data, digest=written.data.digest)
    return dataclasses.replace(run, data=data, outer=run.outer.filled(written.outer))
