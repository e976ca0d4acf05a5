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

import jax
import msgspec

from diloco_jax import environment
from diloco_jax.config import Config
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator import notes
from diloco_jax.coordinator.memory import give_back
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.coordinator.snapshots import Snapshots
from diloco_jax.coordinator.store import Store
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.outer import optimizer as outer
from diloco_jax.models.model import Model
from diloco_jax.observability.tape import Tape, not_on_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, initial

logger = logging.getLogger(__name__)


def initialise(
    config: Config,
    policy: PolicyConfig,
    model: Model,
    plan: FragmentPlan,
    tape: Tape,
) -> tuple[Store, State]:
    """Begin a new run: draw the parameters. The tape says so first, since a run with a
    snapshot goes on after a crash."""
    run = config.run
    pin_s = config.placement.deadlines.pin_s
    # The draw is not kept beside its copy.
    store = Store(run, plan, jax.jit(model.init)(jax.random.key(run.seed)), pin_s)
    give_back()
    tape.append(
        notes.dated(
            notes.Begun(
                run_id=policy.run_id,
                fingerprint=policy.fingerprint,
                plan=plan.digest(),
                environment=environment.describe(),
            )
        )
    )
    return store, initial(policy)


def recover(
    config: Config,
    policy: PolicyConfig,
    plan: FragmentPlan,
    snapshots: Snapshots,
    log: Path,
    tape: Tape,
) -> tuple[Store, State, int]:
    """Continue the run from the newest snapshot that reads and the records in `log`
    after it. The tape gets the records that it lacks, and says where the cut was.
    Return the store, the state and the snapshot's number."""
    pin_s = config.placement.deadlines.pin_s
    store = Store(config.run, plan, None, pin_s)
    found, arrays, snapshot = snapshots.load_newest(
        [store.like(fragment) for fragment in range(len(plan.fragments))],
        functools.partial(durable.goes_on_from, log),
    )
    for fragment, of_run in enumerate(snapshot.fragments):
        store.load(fragment, arrays[fragment], of_run.version)
    del arrays
    give_back()
    lines, log_records = [], []
    for number, (line, payload) in enumerate(durable.read(log, after=found), start=1):
        record = _record(line, f"{log}, record {number} after snapshot {found}")
        lines.append(line)
        log_records.append(record)
        if isinstance(record, records.Merged):
            store.replay(record.fragment, record.version, payload, final=record.final)
    state = recovery.recover(policy, snapshot, log_records, time.monotonic())
    digest = store.digest()
    untouched = not outer.is_invertible(outer_settings(config.run)) and any(
        isinstance(record, records.Merged) and not record.final
        for record in log_records
    )
    if untouched:
        logger.warning(
            "the momentum of outer.optimizer = %r is that of snapshot %d: it cannot "
            "be inferred from the changes that were published since",
            config.run.outer.optimizer,
            found,
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
                snapshot_merges=sum(f.merges for f in snapshot.fragments),
                records=len(lines),
                versions=tuple(f.version for f in state.fragments),
                parameters_digest=digest,
                environment=environment.describe(),
                momentum_untouched=untouched,
            )
        )
    )
    return store, state, found


def _record(line: Mapping[str, Any], where: str) -> records.Durable:
    try:
        return records.from_log(line)
    except msgspec.ValidationError as error:
        raise durable.DurableError(
            f"{where}: {line.get('kind')!r} is no record of this version ({error}); go "
            f"on with the version of diloco_jax that wrote it"
        ) from error
