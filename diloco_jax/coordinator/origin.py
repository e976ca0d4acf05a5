"""Make the state that a coordinator's life begins with, its holder and its log.

It is that of the run on this disk as far as it was durable, of a new run, or of a new
term, which begins with anchors of islands; one island may give a run's first
parameters. A new state is durable before any island asks for it.

After a crash the lead recovers from its snapshot and its log, which say what is
committed. The holder, in this process or in worker processes as the config asks, then
brings its fragments to these versions (`fragment_snapshots.restore`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from etils.epath import Path as Folder

from diloco_jax import checkpoint, run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator import journal
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator.gatherer import Gathered, Gatherer
from diloco_jax.coordinator.holding.fragment_snapshots import make_store
from diloco_jax.coordinator.holding.holder import StoreHolder, make_holder
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.settings import outer_settings, policy_of
from diloco_jax.coordinator.snapshots import StateSnapshots
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.holder import WorkersHolder
from diloco_jax.core import outer
from diloco_jax.core.fragments import FragmentPlan, digest_all
from diloco_jax.machine import give_memory_back
from diloco_jax.models.model import Model, Params
from diloco_jax.observability.tape import Tape, not_on_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import gathering, recovery, steering, workers
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, initial
from diloco_jax.protocol.holding import Committed, FragmentsRestored, RestoreFragments
from diloco_jax.protocol.values import Version
from diloco_jax.weights.first import first_pieces, keep_source, keep_tokenizer
from diloco_jax.wire.session import Handlers

logger = logging.getLogger(__name__)


def initialise(
    config: Config,
    policy: PolicyConfig,
    model: Model,
    plan: FragmentPlan,
    tape: Tape,
    workdir: Path,
    given: Params | None = None,
) -> tuple[Store, State]:
    """Begin a new run: draw the parameters, or read them. The tape says so first, since
    a run with a snapshot goes on after a crash.

    workdir: the run's, which keeps the files of the weights' source. given: the
    parameters, if an island gave them; they are cleared."""
    run = config.run
    # The draw is not kept beside its copy; files are read a piece at a time.
    began = time.monotonic()
    first = first_pieces(run, model, workdir) if given is None else given
    store = make_store(config, plan, first)
    del first
    if given is not None:
        given.clear()
    if run.model.weights:
        logger.info(
            "%d parameters of %s, read in %.1f s",
            plan.total,
            run.model.weights,
            time.monotonic() - began,
        )
        keep_source(run.model.weights, workdir)
    keep_tokenizer(run.data, workdir)
    give_memory_back()
    tape.append(
        journal.dated(
            journal.Begun(
                run_id=policy.run_id,
                fingerprint=policy.fingerprint,
                plan=plan.digest(),
                total_tokens=run.total_tokens,
                environment=store.describe(),
                first_from="" if given is None else config.placement.first_from,
                parameters_digest="" if given is None else store.digest(),
            )
        )
    )
    return store, initial(policy)


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
        fences=workers.fences(state),
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


def _record(line: Mapping[str, Any], where: str) -> records.Durable:
    try:
        return records.from_log(line)
    except msgspec.ValidationError as error:
        raise durable.DurableError(
            f"{where}: {line.get('kind')!r} is no record of this version ({error}); go "
            f"on with the version of diloco_jax that wrote it"
        ) from error


def gather(
    config: Config,
    workdir: Path,
    plan: FragmentPlan,
    serve: Callable[[Handlers], None],
    run_id: str = "",
) -> Gathered:
    """Wait for islands' anchors; write nothing.

    Args:
      run_id: the run that was lost; empty if nobody knows.
      serve: starts to answer islands' calls with the handlers that it is given.

    Raises:
      ConfigError: no island has the anchors; says why, and what can be done.
    """
    numbers = policy_of(config, plan, run_id)
    gatherer = Gatherer(config.run, numbers, plan, frozenset(config.islands))
    serve(gatherer)
    try:
        return gatherer.gather()
    except ConfigError as error:
        raise ConfigError(
            f"{workdir} holds no run (there is no run.json), and without --init "
            f"nothing is initialised; {error}. Give the workdir of the run, start its "
            f"islands, or give --init for a new one"
        ) from error


def first_given(
    config: Config,
    policy: PolicyConfig,
    plan: FragmentPlan,
    serve: Callable[[Handlers], None],
) -> Params:
    """Wait for the first parameters of the run from `placement.first_from`; write
    nothing.

    Raises ConfigError if they do not come in time: another start waits again.
    """
    giver = config.placement.first_from
    gatherer = Gatherer(config.run, policy, plan, frozenset((giver,)), new=True)
    serve(gatherer)
    return gatherer.gather().params


def begin(
    gathered: Gathered,
    config: Config,
    policy: PolicyConfig,
    plan: FragmentPlan,
    tape: Tape,
) -> tuple[Store, State]:
    """Make the state that the new term begins with: Theta = A, without momentum. The
    tape says so. The gathered parameters are cleared."""
    opened = gathered.opened
    store = make_store(config, plan, gathered.params)
    gathered.params.clear()  # As much as Theta, for as long as this process starts.
    for fragment, version in enumerate(opened.versions):
        store.load(fragment, store.arrays(fragment), version)
    tape.append(
        journal.dated(
            journal.Term(
                term=opened.term,
                run_id=opened.run_id,
                versions=tuple(opened.versions),
                sources=tuple(opened.sources),
                replaced=tuple(opened.replaced),
                tokens=opened.tokens,
                next_position=opened.next_position,
                fingerprint=policy.fingerprint,
                plan=plan.digest(),
                parameters_digest=store.digest(),
                environment=store.describe(),
            )
        )
    )
    logger.warning(
        "term %d of run %s begins with versions %s of islands %s",
        opened.term,
        opened.run_id,
        [tuple(version) for version in opened.replaced],
        sorted(set(opened.sources)),
    )
    return store, gathering.first_state(policy, opened)


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

    def restoring(self, term: int) -> StoreHolder | WorkersHolder:
        """Return a holder without arrays, for `restore`. Workers that an earlier lead
        has left are ended, unless they can go on. term: the run's."""
        placement = self.config.placement
        rendezvous.end_others(self.workdir, placement.workers_here)
        if placement.workers > 1:
            return self._workers(term)
        return self._in_process(make_store(self.config, self.plan, None))

    def beginning(
        self, store: Store, versions: Sequence[Version], term: int
    ) -> StoreHolder | WorkersHolder:
        """Make the fragments of a new run or term durable, and return their holder.

        Worker processes then restore them from the disk, and the store is empty.
        versions: by fragment. term: the run's.
        """
        own = self._in_process(store)
        own.begin()
        if self.config.placement.workers == 1:
            return own
        own.close()
        # The caller has the store, too: workers would need their memory beside it.
        store.clear()
        give_memory_back()
        workers = self._workers(term)
        committed = tuple(
            Committed(fragment=f, version=version, digests={})
            for f, version in enumerate(versions)
        )
        workers.restore(RestoreFragments(fragments=committed))
        return workers

    def _in_process(self, store: Store) -> StoreHolder:
        whose = checkpoint.whose(self.config.run, self.run_id, self.plan)
        everything = range(len(self.plan.fragments))
        return make_holder(
            self.config, store, self.kept, self.workdir, whose, everything
        )

    def _workers(self, term: int) -> WorkersHolder:
        workers = WorkersHolder(
            self.config,
            self.workdir,
            self.run_id,
            self.plan.sizes,
            self.kept,
            term,
        )
        stop_s = self.config.placement.deadlines.stop_s
        self.opened.callback(workers.end, stop_s)
        return workers


class MadeState(NamedTuple):
    """A state, with the holder of its fragments and the log of what follows."""

    state: State
    holder: StoreHolder | WorkersHolder
    log: durable.RecordLog


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateMaker:
    """Makes the state of one life. open_log: opens the log after that snapshot."""

    config: Config
    policy: PolicyConfig
    plan: FragmentPlan
    workdir: Path
    states: StateSnapshots
    holders: Holders
    tape: Tape
    open_log: Callable[[int], durable.RecordLog]

    def recovered(self) -> MadeState:
        """Return the state of the run on the disk, as far as it was durable."""
        folder = self.workdir / run_files.LOG
        recovered = recover(self.policy, self.states, folder)
        holder = self.holders.restoring(recovered.state.term)
        restored = holder.restore(recovered.restore)
        tell_recovered(self.config, recovered, restored, self.tape)
        # After the snapshot: a kill may have come between snapshot and log.
        log = self.open_log(recovered.snapshot)
        return MadeState(recovered.state, holder, log)

    def of_new_run(self, model: Model, given: Params | None) -> MadeState:
        """Return the state of a new run. given: see `origin.initialise`."""
        store, state = initialise(
            self.config, self.policy, model, self.plan, self.tape, self.workdir, given
        )
        return self._durable(store, state, None)

    def of_new_term(self, gathered: Gathered, found: int | None) -> MadeState:
        """Return the state of a new term. found: number of a snapshot that is there, of
        an older run, as where snapshots go elsewhere."""
        if found is not None:
            self.states.require_own(found)
        store, state = begin(gathered, self.config, self.policy, self.plan, self.tape)
        return self._durable(store, state, found)

    def _durable(self, store: Store, state: State, found: int | None) -> MadeState:
        # After the log's snapshot: where a log is, the run has begun.
        after = -1 if found is None else found
        number = durable.next_number(self.workdir / run_files.LOG, after)
        versions = [fragment.version for fragment in state.fragments]
        holder = self.holders.beginning(store, versions, state.term)
        with self.states.beginning():
            self.states.save(number, state)
        log = self.open_log(number)
        log.forget(number)
        return MadeState(state, holder, log)
