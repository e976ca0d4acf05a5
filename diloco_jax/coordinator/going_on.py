"""Go on with a stopped run, or give a run that is over more tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.config.resolving import with_model_of
from diloco_jax.coordinator.roster import Roster
from diloco_jax.protocol.coordinator.events import RunExtended, RunResumed
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.workdir import RunFacts, begin_run, find_run, holds_run, read_facts
from diloco_jax.workdir import held as held_by_one


def facts_of(config: Config, workdir: Path, *, init: bool, resume: bool) -> RunFacts:
    """Begin a new run in the workdir (init), or find the one that is there; without
    any, there is no run id yet. resume: it may go on to more tokens.

    Raises ConfigError if a run cannot begin, or if another one is there."""
    if init:
        # Late: it imports jax, which a command that only starts processes does without.
        from diloco_jax.weights.first import require_source

        require_source(config.run.model)
        return begin_run(config, workdir)
    if resume or holds_run(workdir):
        return find_run(config, workdir, extends=resume)
    return RunFacts(run_id="", begun_unix=time.time())


def hold(workdir: Path, held: contextlib.ExitStack, *, had_run: bool) -> None:
    """Lock the workdir until `held` ends. had_run: there was a run in it as this
    coordinator came up. Raises ConfigError if there was none, and is one now."""
    held.enter_context(held_by_one(workdir / run_files.LOCK, "a coordinator"))
    if not had_run and holds_run(workdir):
        raise ConfigError(
            f"{workdir} holds a run now, but held none when this coordinator came up; "
            f"start the coordinator again to go on with that run"
        )


def require_run(workdir: Path, run_id: str) -> None:
    """Raise ConfigError if another run than this one is in the workdir."""
    if holds_run(workdir) and (here := read_facts(workdir).run_id) != run_id:
        raise ConfigError(
            f"{workdir} holds run {here}, and --run-id is {run_id}; leave --run-id out "
            f"to go on with the run there, or give an empty --workdir"
        )


def with_beginning_of(config: Config, workdir: Path) -> Config:
    """Return the config with the first parameters of the run in this workdir.

    These are the model of the weights that the run started from
    (`resolving.with_model_of`), and the island that was to give them. A workdir without
    a run changes nothing.
    """
    path = workdir / run_files.CONFIG
    if not (holds_run(workdir) and path.is_file()):
        return config
    written = read_config_json(path)
    first_from = written.placement.first_from
    placement = dataclasses.replace(config.placement, first_from=first_from)
    config = dataclasses.replace(config, placement=placement)
    return with_model_of(written.run, config)


def extension(config: Config, workdir: Path, state: State) -> RunExtended | None:
    """Return the event with which a run that is over goes on to the tokens of its
    config; None if it needs none. The workdir's config.json has these tokens then.

    Raises ConfigError if the config asks for more tokens before the run is over."""
    path, total = workdir / run_files.CONFIG, config.run.total_tokens
    before = read_config_json(path).run.total_tokens
    if state.phase != "done":
        if total != before:
            raise ConfigError(
                f"total_tokens = {total}, but the run in {workdir} is on its way to "
                f"{before}: let it end, then extend it"
            )
        return None
    if state.progress_tokens < total:
        # Before the record: without it, the next start extends the run.
        if total != before:
            write_config_json(config, path)
        return RunExtended()
    if total != before:
        raise ConfigError(too_few(total, state.progress_tokens, workdir))
    return None


def too_few(total_tokens: int, done: int, workdir: Path) -> str:
    """Return the message for an extension to no more tokens than the run has."""
    return (
        f"total_tokens = {total_tokens}, but the run in {workdir} has trained on "
        f"{done} tokens already; give more"
    )


def after_stop(
    facts: RunFacts, roster: Roster, workdir: Path
) -> tuple[RunFacts, RunResumed]:
    """Move the run's times on, as if there had been no stop.

    Writes the run's facts and the roster. Returns the new facts, and the event that
    ends all incarnations from before the stop.
    """
    stopped_s = max(0.0, time.time() - roster.saved_unix())
    steps = roster.resume(stopped_s)
    facts = dataclasses.replace(
        facts,
        begun_unix=facts.begun_unix + stopped_s,
        stopped_seconds=facts.stopped_seconds + stopped_s,
    )
    facts.write(workdir)
    roster.save()
    return facts, RunResumed(steps=steps)
