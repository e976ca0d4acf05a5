"""Make the state that a coordinator's life begins with, its holder and its log.

It is that of the run on this disk as far as it was durable, of a new run, or of a new
term, which begins with anchors of islands; one island may give a run's first
parameters. A new state is durable before any island hears of it.

After a crash the lead recovers from its snapshot and its log, which say what is
committed. The holder, in this process or in worker processes as the config asks, then
brings its fragments to these versions (`fragment_snapshots.restore`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from etils.epath import Path as Folder
from msgspec.structs import replace

from diloco_jax import checkpoint, run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator import journal
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator.anchor_search import Searched
from diloco_jax.coordinator.holding.fragment_snapshots import make_store
from diloco_jax.coordinator.holding.holder import StoreHolder, make_holder
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.coordinator.snapshots import StateSnapshots
from diloco_jax.coordinator.workers.holder import WorkersHolder, has_result
from diloco_jax.core import outer
from diloco_jax.core.fragments import FragmentPlan, digest_all
from diloco_jax.machine import give_memory_back
from diloco_jax.models.model import Model
from diloco_jax.observability.tape import Tape, not_on_tape, read_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import members, recovery, steering, terms
from diloco_jax.protocol.coordinator.search import Aim
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, initial
from diloco_jax.protocol.coordinator.terms import FoundTerm
from diloco_jax.protocol.holding import (
    Commit,
    Committed,
    FragmentsRestored,
    RestoreFragments,
)
from diloco_jax.protocol.values import NOTHING, Version
from diloco_jax.weights.first import first_pieces, keep_source, keep_tokenizer

logger = logging.getLogger(__name__)


def first_store(
    config: Config, model: Model, plan: FragmentPlan, workdir: Path
) -> Store:
    """Draw the parameters of a new run, or read them. workdir: for files that are
    unpacked."""
    run = config.run
    # The draw is not kept beside its copy; files are read a piece at a time.
    began = time.monotonic()
    store = make_store(config, plan, first_pieces(run, model, workdir))
    if run.model.weights:
        logger.info(
            "%d parameters of %s, read in %.1f s",
            plan.total,
            run.model.weights,
            time.monotonic() - began,
        )
    give_memory_back()
    return store


def tell_begun(
    config: Config,
    policy: PolicyConfig,
    plan: FragmentPlan,
    tape: Tape,
    workdir: Path,
    environment: dict[str, Any],
    given_digest: str = "",
) -> None:
    """Tell the tape that a run begins, before its first snapshot: a run with one goes
    on after a crash. Keep the files of the weights' source. given_digest: that of the
    parameters that an island gave."""
    run = config.run
    if run.model.weights:
        keep_source(run.model.weights, workdir)
    keep_tokenizer(run.data, workdir)
    tape.append(
        journal.dated(
            journal.Begun(
                run_id=policy.run_id,
                fingerprint=policy.fingerprint,
                plan=plan.digest(),
                total_tokens=run.total_tokens,
                environment=environment,
                first_from=config.placement.first_from if given_digest else "",
                parameters_digest=given_digest,
            )
        )
    )


class FromLog(NamedTuple):
    """The lead's state, from its snapshots and its log."""

    state: State
    snapshot: int
    """Number of the snapshot of the state."""
    lines: list[durable.Line]
    """Records after it."""
    restore: RestoreFragments
    """The versions to which the holder must bring its fragments."""


def recover(policy: PolicyConfig, snapshots: StateSnapshots, log: Path) -> FromLog:
    """Rebuild the lead's state after a crash."""
    found, snapshot = snapshots.load(functools.partial(durable.goes_on_from, log))
    lines = list(durable.read(log, after=found))
    later = [
        _record(line, f"{log}, record {number} after snapshot {found}")
        for number, line in enumerate(lines, start=1)
    ]
    state = recovery.recover(policy, snapshot, later, time.monotonic())
    if lacking := steering.lacks_room(policy, state.admitted):
        logger.warning("deltas may wait on the disk: %s", lacking)
    digests: list[dict[int, str]] = [{} for _ in state.fragments]
    for record in later:
        if isinstance(record, records.Merged):
            digests[record.fragment][record.version.number] = record.digest
    restore = RestoreFragments(
        fragments=tuple(
            Committed(fragment=f.index, version=f.version, digests=digests[f.index])
            for f in state.fragments
        ),
        fences=members.fences(state),
    )
    return FromLog(state, found, lines, restore)


def tell_recovered(
    config: Config, recovered: FromLog, restored: FragmentsRestored, tape: Tape
) -> None:
    """Give the tape the records that it lacks, and say where the cut was.

    Raises DurableError for a lost fragment, if no worker has lost it.
    """
    if restored.lost and config.placement.workers == 1:
        raise durable.DurableError(restored.lost[0].why)
    lines, by_fragment = recovered.lines, {f.fragment: f for f in restored.fragments}
    if restored.discarded:
        logger.info("%d merges were prepared and never committed", restored.discarded)
    versions = tuple(f.version for f in recovered.state.fragments)
    behind = any(fragment.moved for fragment in restored.fragments)
    untouched = behind and not outer.is_invertible(outer_settings(config.run))
    digest = digest_all(fragment.digest for fragment in restored.fragments)
    if untouched:
        logger.warning(
            "the momentum of outer.optimizer = %r is that of the fragments' snapshots: "
            "it cannot be inferred from the changes that were published since",
            config.run.outer.optimizer,
        )
    logger.info(
        "recovered from snapshot %d and %d records after it: global parameters %s",
        recovered.snapshot,
        len(lines),
        digest,
    )
    for line in not_on_tape(tape.path, lines):
        tape.append({**line, "time": time.time()})
    tape.append(
        journal.dated(
            journal.Recovered(
                snapshot=recovered.snapshot,
                snapshot_versions=tuple(
                    by_fragment[f].snapshot if f in by_fragment else version
                    for f, version in enumerate(versions)
                ),
                records=len(lines),
                discarded=restored.discarded,
                versions=versions,
                parameters_digest=digest,
                environment=restored.environment,
                momentum_untouched=untouched,
            )
        )
    )


def without_snapshot(workdir: Path, run_id: str, folder: Folder) -> ConfigError:
    """Return the error of a run that has no snapshot in its folder."""
    remedy = "start it with --init again: it ended before its first one"
    if workdirs.has_begun(workdir):
        remedy = (
            "bring that folder back, or begin a new run with --init in another "
            "--workdir"
        )
    return ConfigError(
        f"{workdir} holds run {run_id} but no snapshot of it in {folder}, and without "
        f"--init nothing is initialised; {remedy}"
    )


def nothing_to_go_on_with(workdir: Path, why: ConfigError) -> ConfigError:
    """Return the error of a coordinator that has no run, and found none at islands."""
    return ConfigError(
        f"{workdir} holds no run (there is no run.json), and without --init nothing is "
        f"initialised; {why}. Give the workdir of the run, start its islands, or give "
        f"--init for a new one"
    )


def _record(line: Mapping[str, Any], where: str) -> records.Durable:
    try:
        return records.from_log(line)
    except msgspec.ValidationError as error:
        raise durable.DurableError(
            f"{where}: {line.get('kind')!r} is no record of this version ({error}); go "
            f"on with the version of diloco_jax that wrote it"
        ) from error


def aim_of_run(config: Config, plan: FragmentPlan, trusted: str) -> Aim:
    """Return the aim of a coordinator that has lost its state."""
    return Aim(
        lacking=tuple(range(len(plan.fragments))),
        names=frozenset(config.islands),
        name=secrets.token_hex(4),
        trusted=trusted,
        secret=secrets.token_hex(16),
    )


def _aim_of_lost(aim: Aim, recovered: FromLog, lost: Sequence[int], tape: Path) -> Aim:
    """Return the aim of a coordinator whose workers have lost these fragments, and
    whose log is whole. aim: that without a log."""
    digests: dict[int, dict[Version, str]] = {fragment: {} for fragment in lost}
    for line in read_tape(tape):
        if line.get("kind") == "digested" and line["fragment"] in digests:
            version = Version(*line["version"])
            digests[line["fragment"]][version] = line.get("anchor", "")
    state = recovered.state
    return replace(
        aim,
        lacking=tuple(lost),
        term=state.term + 1,
        last_name=state.term_name,
        known={
            fragment: terms.versions_known(state.fragments[fragment], of_fragment)
            for fragment, of_fragment in digests.items()
        },
    )


@dataclasses.dataclass(frozen=True)
class Holders:
    """Makes the holder for one life of a coordinator.

    opened: closed at the end of that life; it then ends worker processes.
    """

    config: Config
    plan: FragmentPlan
    kept: KeptCycles
    workdir: Path
    run_id: str
    opened: contextlib.ExitStack

    def restoring(self, state: State) -> StoreHolder | WorkersHolder:
        """Return a holder without arrays, for `restore`. state: the run's."""
        if self.config.placement.workers == 1:
            return self._in_process(make_store(self.config, self.plan, None))
        done = state.phase == "done"
        done = done and state.progress_tokens >= self.config.run.total_tokens
        return self._workers(state.term, over=done and has_result(self.workdir))

    def beginning(self, store: Store) -> StoreHolder:
        """Make the fragments of a new run durable, and return their holder here."""
        own = self._in_process(store)
        own.begin()
        return own

    def drawing(self) -> tuple[WorkersHolder, FragmentsRestored]:
        """Have workers draw or read the first parameters of a new run."""
        workers = self._workers(1)
        committed = tuple(
            Committed(fragment=f, version=Version(), digests={})
            for f in range(len(self.plan.fragments))
        )
        asked = RestoreFragments(fragments=committed, first=True)
        return workers, workers.restore(asked)

    def _in_process(self, store: Store) -> StoreHolder:
        whose = checkpoint.whose(self.config.run, self.run_id, self.plan)
        everything = range(len(self.plan.fragments))
        return make_holder(
            self.config, store, self.kept, self.workdir, whose, everything
        )

    def _workers(self, term: int, *, over: bool = False) -> WorkersHolder:
        workers = WorkersHolder(
            self.config,
            self.workdir,
            self.run_id,
            self.plan,
            self.kept,
            term,
            over=over,
        )
        stop_s = self.config.placement.deadlines.stop_s
        self.opened.callback(workers.end, stop_s)
        return workers

    def lacking_all(self, term: int) -> StoreHolder | WorkersHolder:
        """Return a holder that waits for the anchors of all fragments. term: that which
        begins with them."""
        holder: StoreHolder | WorkersHolder
        if self.config.placement.workers == 1:
            holder = self._in_process(make_store(self.config, self.plan, None))
        else:
            holder = self._workers(term)
        nothing = tuple(
            Committed(fragment=fragment, version=NOTHING, digests={})
            for fragment in range(len(self.plan.fragments))
        )
        holder.restore(RestoreFragments(fragments=nothing))
        return holder


class MadeState(NamedTuple):
    """A state, with the holder of its fragments and the log of what follows."""

    state: State
    holder: StoreHolder | WorkersHolder
    log: durable.RecordLog


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateMaker:
    """Makes the state of one life. open_log: opens the log after that snapshot. search:
    asks islands for anchors, for the holder that it is given. trusted: see `Aim`."""

    config: Config
    policy: PolicyConfig
    plan: FragmentPlan
    workdir: Path
    states: StateSnapshots
    holders: Holders
    tape: Tape
    open_log: Callable[[int], durable.RecordLog]
    search: Callable[[Aim, StoreHolder | WorkersHolder | None], Searched]
    trusted: str = ""

    def recovered(self) -> MadeState:
        """Return the state of the run on the disk, as far as it was durable."""
        folder = self.workdir / run_files.LOG
        recovered = recover(self.policy, self.states, folder)
        holder = self.holders.restoring(recovered.state)
        restored = holder.restore(recovered.restore)
        tell_recovered(self.config, recovered, restored, self.tape)
        # After the snapshot: a kill may have come between snapshot and log.
        log = self.open_log(recovered.snapshot)
        state = recovered.state
        if lost := [one.fragment for one in restored.lost]:
            whole = aim_of_run(self.config, self.plan, self.trusted)
            aim = _aim_of_lost(whole, recovered, lost, self.tape.path)
            found = self.search(aim, holder).found
            for record in terms.term_records(state, found):
                log.append(records.line(record))
                self.tape.append(journal.dated(record))
                state = terms.fragment_begun(state, record)
            _commit(holder, found)
        return MadeState(state, holder, log)

    def of_new_run(self, model: Model) -> MadeState:
        """Return the state of a new run. An island gives its parameters, or workers or
        this process draw or read them."""
        state, begun = initial(self.policy), self._begun
        if giver := self.config.placement.first_from:
            whole = aim_of_run(self.config, self.plan, "")
            aim = replace(whole, names=frozenset((giver,)), first=True)
            searched = self.search(aim, None)
            holder: StoreHolder | WorkersHolder = searched.holder
            begun(self._environment(), _digest(searched.found))
            made = self._durable(state, holder, None)
            _commit(holder, searched.found)
            return made
        if self.config.placement.workers > 1:
            holder, restored = self.holders.drawing()
            begun(restored.environment)
        else:
            store = first_store(self.config, model, self.plan, self.workdir)
            begun(store.describe())
            holder = self.holders.beginning(store)
        return self._durable(state, holder, None)

    def _begun(self, environment: dict[str, Any], given_digest: str = "") -> None:
        tell_begun(
            self.config,
            self.policy,
            self.plan,
            self.tape,
            self.workdir,
            environment,
            given_digest,
        )

    def of_new_term(self, searched: Searched, before: int | None) -> MadeState:
        """Return the state of a new term. before: number of a snapshot that is there,
        of an older run, as where snapshots go elsewhere."""
        if before is not None:
            self.states.require_own(before)
        found, holder = searched.found, searched.holder
        self.tape.append(journal.dated(self._term(found)))
        logger.warning(
            "term %d of run %s begins with versions %s of islands %s",
            found.term,
            found.run_id,
            [tuple(anchor.replaced) for anchor in found.anchors],
            sorted({anchor.island for anchor in found.anchors}),
        )
        state = terms.first_state(self.policy, found)
        made = self._durable(state, holder, before)
        _commit(holder, found)
        return made

    def _term(self, found: FoundTerm) -> journal.Term:
        return journal.Term(
            term=found.term,
            name=found.name,
            run_id=found.run_id,
            versions=tuple(anchor.version for anchor in found.anchors),
            sources=tuple(anchor.island for anchor in found.anchors),
            replaced=tuple(anchor.replaced for anchor in found.anchors),
            tokens=found.tokens,
            next_position=found.next_position,
            fingerprint=self.policy.fingerprint,
            plan=self.plan.digest(),
            parameters_digest=_digest(found),
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, Any]:
        return make_store(self.config, self.plan, None).describe()

    def _durable(
        self, state: State, holder: StoreHolder | WorkersHolder, before: int | None
    ) -> MadeState:
        """Write the first snapshot of a run or a term, whose fragments are on disk."""
        # After the log's snapshot: where a log is, the run has begun.
        after = -1 if before is None else before
        number = durable.next_number(self.workdir / run_files.LOG, after)
        with self.states.beginning():
            self.states.save(number, state)
        log = self.open_log(number)
        log.forget(number)
        return MadeState(state, holder, log)


def _commit(holder: StoreHolder | WorkersHolder, found: FoundTerm) -> None:
    """Make the anchors visible, whose term is on disk."""
    for anchor in found.anchors:
        holder.hold(Commit(fragment=anchor.fragment, version=anchor.version))


def _digest(found: FoundTerm) -> str:
    return digest_all(anchor.digest for anchor in found.anchors)
