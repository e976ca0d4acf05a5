"""Begin a run, go on with a stopped one, or give one that is over more tokens; and the
options of `diloco coordinator`, which say so, and of `diloco worker`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, Placement
from diloco_jax.config.fields import setting
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.config.options import TRUST_CODE
from diloco_jax.config.resolving import with_choices_of, with_model_of
from diloco_jax.coordinator.roster import Roster
from diloco_jax.protocol.coordinator.state import RunExtended, RunResumed, State
from diloco_jax.wire import addresses
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
    """Return the config with the first parameters of the run in this workdir, and what
    was chosen for it as it began.

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
    return with_choices_of(written.run, with_model_of(written.run, config))


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


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
    """See `diloco coordinator --help`."""

    init: str = setting(
        "",
        metavar="[hf:DIR|hf:OWNER/NAME|run:WORKDIR|from-island:NAME]",
        help="Begin a new run in WORKDIR, with parameters that are drawn or that an "
        "island begins with, or with the model and parameters of a folder of weights "
        "or of a run. Without it, the run there goes on, or else the run whose anchors "
        "the islands offer.",
    )
    resume: bool = setting(
        False, help="The whole run was stopped: all its islands have ended."
    )
    run_id: str = setting(
        "",
        metavar="RUN",
        help="The run whose state was lost: of islands that offer their anchors, those "
        "of this run alone are gathered. Status and log of a coordinator that gathers "
        "name the run of each island.",
    )
    trust: str = setting(
        "",
        metavar="ISLAND",
        help="The island whose values a run without state goes on with where two "
        "islands differ, and no third offers its own.",
    )
    trust_code: bool = setting(False, help=TRUST_CODE)

    def check_run(self) -> None:
        """Raise ConfigError for a --run-id beside what says which run it is."""
        others = {
            "--init begins a run": self.init,
            "--resume goes on from the workdir": self.resume,
        }
        for why, given in others.items():
            if self.run_id and given:
                raise ConfigError(
                    f"--run-id {self.run_id} is for a coordinator that has lost its "
                    f"state, and {why}; leave one of them out"
                )


DRAWN = "drawn"
"""Value of an `--init` that names no source."""


def with_source(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the value of an `--init` that has none."""
    spelled = []
    for argument, follows in zip(arguments, [*arguments, "--"][1:], strict=True):
        spelled.append(argument)
        if argument == "--init" and follows.startswith("-"):
            spelled.append(DRAWN)
    return spelled


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """The options of `diloco worker`."""

    index: int = setting(-1, help="Number of the worker, from 0.")

    listen: str = setting(
        "",
        help="HOST:PORT where it listens, and serves islands at the next port; empty = "
        "its address in placement.worker_addresses.",
    )

    def address(self, placement: Placement) -> str:
        """Return where the worker listens. Raises ConfigError, naming option or
        field."""
        given = placement.worker_addresses
        if not given:
            raise ConfigError(
                "placement.worker_addresses is empty: name there where each worker "
                "runs, or leave `diloco worker` out, and the coordinator merges itself"
            )
        if not 0 <= self.index < len(given):
            raise ConfigError(
                f"--index {self.index}, but placement.worker_addresses has "
                f"{len(given)} addresses; give a number from 0 to {len(given) - 1}"
            )
        dialled = given[self.index]
        own = self.listen or dialled
        _, port = addresses.parse_address(own, "--listen")
        if port != addresses.parse_address(dialled)[1]:
            raise ConfigError(
                f"--listen {own}, but the coordinator dials {dialled} "
                f"(placement.worker_addresses); give the same port"
            )
        return own
