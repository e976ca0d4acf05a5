"""Make the coordinator's state: for a new run, or from the durable part of an old one.

The third way, from what islands have, is in `term.py`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from etils.epath import Path as Folder

from diloco_jax import merge_route
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator import notes
from diloco_jax.coordinator.publishes import Publishes
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.coordinator.snapshots import Snapshots
from diloco_jax.coordinator.store import Store
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.outer import optimizer as outer
from diloco_jax.memory import give_back
from diloco_jax.models.model import Model, Params
from diloco_jax.observability.tape import Tape, not_on_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, initial
from diloco_jax.protocol.values import Version
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

    workdir: of the run, for files of the time of the read. given: the parameters, of
    the island that was to give them."""
    run = config.run
    pin_s = config.placement.deadlines.reunion_s
    # The draw is not kept beside its copy; files are read a piece at a time.
    began = time.monotonic()
    passes = merge_route.passes_of(config.placement.merge_route)
    first = first_pieces(run, model, workdir) if given is None else given
    store = Store(run, plan, first, pin_s, passes)
    del first
    if run.model.weights:
        logger.info(
            "%d parameters of %s, read in %.1f s",
            plan.total,
            run.model.weights,
            time.monotonic() - began,
        )
        keep_source(run.model.weights, workdir)
    keep_tokenizer(run.data, workdir)
    give_back()
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


def recover(
    config: Config,
    policy: PolicyConfig,
    plan: FragmentPlan,
    snapshots: Snapshots,
    publishes: Publishes,
    log: Path,
    tape: Tape,
) -> tuple[Store, State, int]:
    """Continue the run from its snapshots, the records in `log` and the publishes. The
    tape gets the records that it lacks, and says where the cut was. Return the store,
    the state and the number of the state's snapshot."""
    found, snapshot = snapshots.load_state(functools.partial(durable.goes_on_from, log))
    lines = list(durable.read(log, after=found))
    log_records = [
        _record(line, f"{log}, record {number} after snapshot {found}")
        for number, line in enumerate(lines, start=1)
    ]
    state = recovery.recover(policy, snapshot, log_records, time.monotonic())
    discarded = publishes.discard([f.version for f in state.fragments])
    if discarded:
        logger.info("%d merges were prepared and never committed", discarded)
    committed = {
        (record.fragment, record.version): record.digest
        for record in log_records
        if isinstance(record, records.Merged)
    }
    placement = config.placement
    passes = merge_route.passes_of(placement.merge_route)
    store = Store(config.run, plan, None, placement.deadlines.reunion_s, passes)
    begins, behind = [], False
    for fragment in state.fragments:
        begin, replayed = _restore(
            store, snapshots, publishes, committed, fragment.index, fragment.version
        )
        begins.append(begin)
        behind |= replayed
        give_back()
    untouched = behind and not outer.is_invertible(outer_settings(config.run))
    digest = store.digest()
    if untouched:
        logger.warning(
            "the momentum of outer.optimizer = %r is that of the fragments' snapshots: "
            "it cannot be inferred from the changes that were published since",
            config.run.outer.optimizer,
        )
    logger.info(
        "recovered from snapshot %d and %d records after it: global parameters %s",
        found,
        len(lines),
        digest,
    )
    for line in not_on_tape(tape.path, lines):
        tape.append({**line, "time": time.time()})
    tape.append(
        notes.dated(
            notes.Recovered(
                snapshot=found,
                snapshot_versions=tuple(begins),
                records=len(lines),
                discarded=discarded,
                versions=tuple(f.version for f in state.fragments),
                parameters_digest=digest,
                environment=store.describe(),
                momentum_untouched=untouched,
            )
        )
    )
    return store, state, found


def _restore(
    store: Store,
    snapshots: Snapshots,
    publishes: Publishes,
    committed: Mapping[tuple[int, Version], str],
    fragment: int,
    through: Version,
) -> tuple[Version, bool]:
    """Load a fragment from its newest snapshot that reads, and apply the publishes
    after it. Return the snapshot's version, and True if a publish that moves the outer
    optimizer came after it. committed: digests of the publishes in the log."""
    begin, arrays = snapshots.load_fragment(fragment, through, store.like(fragment))
    if begin.term != through.term:
        raise durable.DurableError(
            f"the newest snapshot of fragment {fragment} is of version {tuple(begin)}, "
            f"the log is at {tuple(through)}: it is of another term; restore the "
            f"workdir from a copy"
        )
    store.load(fragment, arrays, begin)
    version, moved = begin, False
    while version < through:
        version = version.next()
        payload, final = publishes.read(
            fragment, version, committed.get((fragment, version))
        )
        store.replay(fragment, version, payload, final=final)
        store.put_aside(fragment, publishes.mapped)
        moved |= not final
    return begin, moved


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
