"""Make the state that a coordinator's life begins with, its holder and its log.

It is that of the run on this disk as far as it was durable, of a new run, or of a new
term, which begins with anchors of islands; one island may give a run's first
parameters. A new state is durable before any island hears of it.

After a crash the lead recovers from its snapshot and its log, which say what is
committed. The holder, in this process or at workers as the config asks, then brings its
fragments to these versions. In this process it does so beside the run: each fragment is
merged and served once it is back.
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
from diloco_jax.coordinator.holding.fragment_snapshots import KeptCycles, make_store
from diloco_jax.coordinator.holding.holder import FragmentHolder, lost_here, make_holder
from diloco_jax.coordinator.service import Searched
from diloco_jax.coordinator.snapshots import StateSnapshots
from diloco_jax.coordinator.workers import WorkersHolder, has_result
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.tiles import digest_all
from diloco_jax.observability.tape import Tape, not_on_tape, read_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import members, recovery, steering
from diloco_jax.protocol.coordinator.search import Aim, FoundTerm
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, initial
from diloco_jax.protocol.holding import (
    Commit,
    Committed,
    FragmentsRestored,
    RestoreFragments,
)
from diloco_jax.protocol.messages import NOTHING, Version
from diloco_jax.weights.first import keep_source, keep_tokenizer

logger = logging.getLogger(__name__)


class MadeState(NamedTuple):
    """A state, with the holder of its fragments and the log of what follows."""

    state: State
    holder: FragmentHolder
    log: journal.RecordLog


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateMaker:
    """Makes the state of one life, with the holder of its fragments."""

    config: Config
    policy: PolicyConfig
    plan: FragmentPlan
    workdir: Path
    states: StateSnapshots
    kept: KeptCycles
    tape: Tape
    opened: contextlib.ExitStack
    """Closed at the end of the life; it then ends a restore that is under way, and
    breaks the lines to workers."""
    open_log: Callable[[int], journal.RecordLog]
    """Opens the log after that snapshot."""
    search: Callable[[Aim, FragmentHolder | None], Searched]
    """Asks islands for anchors, for that holder."""
    trusted: str = ""
    """See `Aim`."""

    # ---- the holder of this life ----------------------------------------------------

    def all_lost(self, term: int) -> FragmentHolder:
        """Return a holder that waits for the anchors of all fragments. term: that which
        begins with them."""
        holder = self._holder(term)
        holder.restore(RestoreFragments(fragments=self._all_at(NOTHING)))
        return holder

    def _holder(self, term: int, *, over: bool = False) -> FragmentHolder:
        """Return a holder without arrays, for `restore`."""
        if self.config.placement.workers == 1:
            whose = checkpoint.whose(self.config.run, self.policy.run_id, self.plan)
            store = make_store(self.config, self.plan)
            everything = range(len(self.plan.fragments))
            holder = make_holder(
                self.config, store, self.kept, self.workdir, whose, everything
            )
            self.opened.callback(holder.close)  # A start may fail while it restores.
            return holder
        workers = WorkersHolder(
            self.config,
            self.workdir,
            self.policy.run_id,
            self.plan,
            self.kept,
            term,
            over=over,
        )
        self.opened.callback(workers.end)
        return workers

    def _all_at(self, version: Version) -> tuple[Committed, ...]:
        return tuple(
            Committed(fragment=fragment, version=version, digests={})
            for fragment in range(len(self.plan.fragments))
        )

    # ---- the run on this disk -------------------------------------------------------

    def recovered(self) -> MadeState:
        """Return the state of the run on the disk, as far as it was durable."""
        folder = self.workdir / run_files.LOG
        recovered = recover(self.policy, self.states, folder)
        state = recovered.state
        over = state.phase == "done"
        over = over and state.progress_tokens >= self.config.run.total_tokens
        holder = self._holder(state.term, over=over and has_result(self.workdir))
        restored = holder.restore(recovered.restore)
        tell_recovered(self.config, recovered, restored, self.tape)
        # After the snapshot: a kill may have come between snapshot and log.
        log = self.open_log(recovered.snapshot)
        if lost := [one.fragment for one in restored.lost]:
            found = self.search(self._aim_of_lost(recovered, lost), holder).found
            for record in recovery.term_records(state, found):
                log.append(records.line(record))
                self.tape.append(journal.dated(record))
                state = recovery.fragment_begun(state, record)
            _commit(holder, found)
        return MadeState(state, holder, log)

    def _aim_of_lost(self, recovered: FromLog, lost: Sequence[int]) -> Aim:
        """Return the aim of a coordinator whose workers have lost these fragments, and
        whose log is whole."""
        digests: dict[int, dict[Version, str]] = {fragment: {} for fragment in lost}
        for line in read_tape(self.tape.path):
            if line.get("kind") == "digested" and line["fragment"] in digests:
                version = Version(*line["version"])
                digests[line["fragment"]][version] = line.get("anchor", "")
        state = recovered.state
        return replace(
            aim_of_run(self.config, self.plan, self.trusted),
            lost=tuple(lost),
            term=state.term + 1,
            last_name=state.term_name,
            known={
                fragment: recovery.versions_known(
                    state.fragments[fragment], of_fragment
                )
                for fragment, of_fragment in digests.items()
            },
        )

    # ---- a new run ------------------------------------------------------------------

    def of_new_run(self) -> MadeState:
        """Return the state of a new run. An island gives its parameters, or workers or
        this process draw or read them."""
        state, giver = initial(self.policy), self.config.placement.first_from
        if giver:
            whole = aim_of_run(self.config, self.plan, "")
            aim = replace(whole, names=frozenset((giver,)), first=True)
            searched = self.search(aim, None)
            self._tell_begun(self._environment(), giver, _digest(searched.found))
            made = self._durable(state, searched.holder, None)
            _commit(searched.holder, searched.found)
            return made
        holder = self._holder(1)
        asked = RestoreFragments(fragments=self._all_at(Version()), first=True)
        began = time.monotonic()
        self._tell_begun(holder.restore(asked).environment)
        if self.config.run.model.weights:
            logger.info(
                "%d parameters of %s, read and written in %.1f s",
                self.plan.total,
                self.config.run.model.weights,
                time.monotonic() - began,
            )
        return self._durable(state, holder, None)

    def _tell_begun(
        self, environment: dict[str, Any], giver: str = "", digest: str = ""
    ) -> None:
        """Tell the tape that a run begins, before its first snapshot: a run with one
        goes on after a crash. Keep the files of the weights' source. digest: that of
        the parameters that an island gave."""
        run = self.config.run
        if run.model.weights:
            keep_source(run.model.weights, self.workdir)
        keep_tokenizer(run.data, self.workdir)
        begun = journal.Begun(
            run_id=self.policy.run_id,
            fingerprint=self.policy.fingerprint,
            plan=self.plan.digest(),
            total_tokens=run.total_tokens,
            environment=environment,
            first_from=giver,
            parameters_digest=digest,
        )
        self.tape.append(journal.dated(begun))

    # ---- a new term -----------------------------------------------------------------

    def of_new_term(self, searched: Searched, before: int | None) -> MadeState:
        """Return the state of a new term. before: number of a snapshot that is there,
        of an older run, as where snapshots go elsewhere."""
        if before is not None:
            self.states.require_own(before)
        found, holder = searched.found, searched.holder
        begins = journal.Term(
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
            since=self.tape.went_on,
        )
        self.tape.append(journal.dated(begins))
        logger.warning(
            "term %d of run %s begins with versions %s of islands %s",
            found.term,
            found.run_id,
            [tuple(anchor.replaced) for anchor in found.anchors],
            sorted({anchor.island for anchor in found.anchors}),
        )
        made = self._durable(recovery.first_state(self.policy, found), holder, before)
        _commit(holder, found)
        return made

    def _environment(self) -> dict[str, Any]:
        return make_store(self.config, self.plan).describe()

    def _durable(
        self, state: State, holder: FragmentHolder, before: int | None
    ) -> MadeState:
        """Write the first snapshot of a run or a term, whose fragments are on disk."""
        # After the log's snapshot: where a log is, the run has begun.
        after = -1 if before is None else before
        number = journal.next_number(self.workdir / run_files.LOG, after)
        with self.states.beginning():
            self.states.save(number, state)
        log = self.open_log(number)
        log.forget(number)
        return MadeState(state, holder, log)


class FromLog(NamedTuple):
    """The lead's state, from its snapshots and its log."""

    state: State
    snapshot: int
    """Number of the snapshot of the state."""
    lines: list[journal.Line]
    """Records after it."""
    restore: RestoreFragments
    """The versions to which the holder must bring its fragments."""


def recover(policy: PolicyConfig, snapshots: StateSnapshots, log: Path) -> FromLog:
    """Rebuild the lead's state after a crash."""
    found, snapshot = snapshots.load(functools.partial(journal.goes_on_from, log))
    lines = list(journal.read(log, after=found))
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
        raise lost_here(restored.lost[0].why)
    lines = recovered.lines
    if restored.discarded:
        logger.info("%d merges were prepared and never committed", restored.discarded)
    versions = tuple(f.version for f in recovered.state.fragments)
    logger.info(
        "recovered from snapshot %d and %d records after it",
        recovered.snapshot,
        len(lines),
    )
    for line in not_on_tape(tape.path, lines):
        tape.append({**line, "time": time.time()})
    tape.append(
        journal.dated(
            journal.Recovered(
                snapshot=recovered.snapshot,
                records=len(lines),
                discarded=restored.discarded,
                versions=versions,
                environment=restored.environment,
                since=tape.went_on,
            )
        )
    )
    for fragment in restored.fragments:
        tape.append(journal.dated(journal.noted(fragment)))


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


def nothing_to_go_on_with(workdir: Path, why: Exception) -> Exception:
    """Return the error of a coordinator that has no run, and found none at islands, of
    the same kind."""
    return type(why)(
        f"{workdir} holds no run (there is no run.json), and without --init nothing is "
        f"initialised; {why}. Give the workdir of the run, start its islands, or give "
        f"--init for a new one"
    )


def _record(line: Mapping[str, Any], where: str) -> records.Durable:
    try:
        return records.from_log(line)
    except msgspec.ValidationError as error:
        raise journal.DurableError(
            f"{where}: {line.get('kind')!r} is no record of this version ({error}); go "
            f"on with the version of diloco_jax that wrote it"
        ) from error


def aim_of_run(config: Config, plan: FragmentPlan, trusted: str) -> Aim:
    """Return the aim of a coordinator that has lost its state."""
    return Aim(
        lost=tuple(range(len(plan.fragments))),
        names=frozenset(config.islands),
        name=secrets.token_hex(4),
        trusted=trusted,
        secret=secrets.token_hex(16),
    )


def _commit(holder: FragmentHolder, found: FoundTerm) -> None:
    """Make the anchors visible, whose term is on disk."""
    for anchor in found.anchors:
        holder.hold(Commit(fragment=anchor.fragment, version=anchor.version))


def _digest(found: FoundTerm) -> str:
    return digest_all(anchor.parameters for anchor in found.anchors)
