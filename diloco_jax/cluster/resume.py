"""`diloco run --resume WORKDIR`: go on with a run that was stopped.

The run keeps its `RunConfig`; islands and placement may differ. Nothing in the workdir
changes before all checks of this module have passed.
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
from diloco_jax.config.resolving import resolve, with_model_of
from diloco_jax.coordinator.going_on import too_few
from diloco_jax.coordinator.notes import Recovered
from diloco_jax.core.learning_rate import learning_rate
from diloco_jax.files import absolute, expand, write_json
from diloco_jax.observability.tape import newest_record
from diloco_jax.protocol.records import from_tape

OPTION = "--resume"
TRUST_CODE = "--trust-code"


def with_config(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `diloco run` with a CONFIG: if `--resume WORKDIR` comes
    without one, add the config.json of that workdir."""
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
    # Before the config is read: a config of another format may have other fields.
    workdirs.read_config(workdir, trust_code=TRUST_CODE in arguments)
    return [str(workdir / run_files.CONFIG), *arguments]


def require_one_workdir(arguments: Sequence[str], workdir: str, resume: str) -> None:
    """Raise ConfigError if the command line gives both a workdir and another one to
    resume. The workdir in a config file only says where its runs begin."""
    options = {argument.split("=")[0] for argument in arguments}
    if not resume or options.isdisjoint(("--workdir", "--placement.workdir")):
        return
    if Path(absolute(workdir)).resolve() != Path(absolute(resume)).resolve():
        raise ConfigError(
            f"--workdir {workdir} with {OPTION} {resume}: a run goes on in its own "
            f"workdir; leave --workdir out"
        )


def resumed_config(config: Config, workdir: Path) -> Config:
    """Return the config with which the run in `workdir` goes on.

    config: the user's config; the run fills what it leaves open (corpus, outer
    optimizer). Raises ConfigError if the workdir holds no run, one of another config or
    format, or one that a coordinator serves just now.
    """
    if not workdir.is_dir():
        raise ConfigError(_no_folder(workdir))
    facts = workdirs.read_facts(workdir)
    written = read_config_json(workdir / run_files.CONFIG).run
    placement = dataclasses.replace(config.placement, workdir=str(workdir))
    run = _filled(with_model_of(written, config).run, written)
    config = resolve(dataclasses.replace(config, run=run, placement=placement))
    total = config.run.total_tokens
    more = workdirs.with_more_tokens(written, total)
    where = ("in the run", "in the config")
    lines = differences(shared_fields(more), shared_fields(config.run), where)
    if lines:
        raise ConfigError(
            f"run {facts.run_id} in {workdir} goes on with its own settings alone, but "
            f"the config has others: {'; '.join(lines)}. Islands and placement may "
            f"differ, and a run that is over may get more total_tokens; for anything "
            f"else, begin a new run"
        )
    if more != written:
        _require_over(workdir, written.total_tokens, total)
    lock = workdir / run_files.LOCK
    if lock.exists():
        with workdirs.held(lock, "a coordinator"):
            pass
    return config


def _no_folder(workdir: Path) -> str:
    return f"{OPTION} {workdir}: there is no such folder; give the workdir of a run"


def _require_over(workdir: Path, before: int, total: int) -> None:
    """Raise ConfigError unless the run is over and has less than `total` tokens."""
    summary = workdirs.read_summary(workdir)
    if summary.get("phase") != "done":
        raise ConfigError(
            f"total_tokens = {total}, but the run in {workdir} is on its way to "
            f"{before}: leave total_tokens out until it is over, then extend it"
        )
    if summary["tokens"] >= total:
        raise ConfigError(too_few(total, summary["tokens"], workdir))


def finished(config: Config, workdir: Path) -> dict[str, Any]:
    """Return the summary of a run that is over; empty while it is not, or if the config
    extends it."""
    summary = workdirs.read_summary(workdir)
    over = summary.get("phase") == "done"
    return summary if over and summary["tokens"] >= config.run.total_tokens else {}


class ReplacedFiles:
    """The files of the workdir that a resumed run writes anew.

    Making this object writes the new `config.json`, and removes the old summary and the
    address of a coordinator that was killed. `undo` is for a start that failed."""

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
        """Restore config and summary as they were."""
        for path, octets in self._before.items():
            write_json(json.loads(octets), path)


def tell_resumed(workdir: Path, console: Console) -> None:
    """Print from which merges the run goes on, once the coordinator is up."""
    line = newest_record(workdir / run_files.TAPE, "recovered")
    recovered = from_tape(line, Recovered)
    merges = sum(version.number for version in recovered.versions)
    console.print(
        f"goes on after {merges:,} merges from global parameters "
        f"{recovered.parameters_digest}",
        highlight=False,
    )


def tell_extended(config: Config, workdir: Path, console: Console) -> None:
    """Print what an extension does to the learning rate; nothing if there is none."""
    summary = workdirs.read_summary(workdir)
    done, total = summary.get("tokens", 0), config.run.total_tokens
    if summary.get("phase") != "done" or done >= total:
        return
    inner = config.run.inner
    console.print(
        f"extended from {done:,} to {total:,} tokens: the learning rate, which ended "
        f"at {learning_rate(inner, 1.0):.3g}, goes on from "
        f"{learning_rate(inner, done / total):.3g}",
        highlight=False,
        soft_wrap=True,
    )


def _filled(run: RunConfig, written: RunConfig) -> RunConfig:
    """Fill in the fields that `resolving.resolve` decided when the run began."""
    data = run.data
    if not data.digest:
        data = dataclasses.replace(data, digest=written.data.digest)
    return dataclasses.replace(run, data=data, outer=run.outer.filled(written.outer))
