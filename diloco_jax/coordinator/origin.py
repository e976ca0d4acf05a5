"""Make the coordinator's state: for a new run, or from the disk after a crash.

After a crash the lead recovers from its snapshot and its log, which say what is
committed. The holder then brings its fragments to these versions
(`holding/restoring.py`). `term.py` makes the state from the islands' anchors, if the
disk is lost.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from etils.epath import Path as Folder

from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator import notes
from diloco_jax.coordinator.holding.restoring import make_store
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.coordinator.state_snapshots import StateSnapshots
from diloco_jax.core import outer
from diloco_jax.core.fragments import FragmentPlan, digest_all
from diloco_jax.machine import give_memory_back
from diloco_jax.models.model import Model, Params
from diloco_jax.observability.tape import Tape, not_on_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import recovery, steering, workers
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, initial
from diloco_jax.protocol.holding import Committed, FragmentsRestored, RestoreFragments
from diloco_jax.weights.first import first_pieces, keep_source, keep_tokenizer

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
        notes.dated(
            notes.Begun(
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
        notes.dated(
            notes.Recovered(
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
