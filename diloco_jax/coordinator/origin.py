"""What a coordinator's life begins with: the run on this disk, or what is asked of
islands.

After a crash the lead recovers from its snapshot and its log, which say what is
committed. The holder, in this process or at workers as the config asks, then brings its
fragments to these versions. In this process it does so beside the run: each fragment is
merged and served once it is back.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from etils.epath import Path as Folder
from msgspec.structs import replace

from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator import journal
from diloco_jax.coordinator.holding.holder import FragmentHolder, lost_here
from diloco_jax.coordinator.snapshots import StateSnapshots
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.tiles import digest_all
from diloco_jax.observability.tape import Tape, newest_first, not_on_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import members, recovery, steering
from diloco_jax.protocol.coordinator.search import Aim, FoundTerm
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.holding import (
    Commit,
    Committed,
    FragmentsRestored,
    RestoreFragments,
)
from diloco_jax.protocol.messages import Version

logger = logging.getLogger(__name__)


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


def aim_of_lost(aim: Aim, state: State, lost: Sequence[int], tape: Tape) -> Aim:
    """Return the aim of a coordinator whose workers have lost these fragments, and
    whose log is whole. aim: that of one that has lost all."""
    digests: dict[int, dict[Version, str]] = {fragment: {} for fragment in lost}
    sought = {(f, m.version) for f in lost for m in state.fragments[f].newest}
    # From the end: islands hold their anchors for minutes; reading weeks takes more.
    for line in newest_first(tape.path):
        if not sought:
            break
        if line["kind"] in ("digested", "merged"):
            own = line["fragment"], Version(*line["version"])
            if own in sought and line["kind"] == "digested":
                digests[own[0]][own[1]] = line.get("anchor", "")
            sought.discard(own)  # A digest follows its merge.
    return replace(
        aim,
        lost=tuple(lost),
        term=state.term + 1,
        last_name=state.term_name,
        admitted=state.admitted,
        known={
            fragment: recovery.versions_known(state.fragments[fragment], of_fragment)
            for fragment, of_fragment in digests.items()
        },
    )


def commit(holder: FragmentHolder, found: FoundTerm) -> None:
    """Make the anchors visible, whose term is on disk."""
    for anchor in found.anchors:
        holder.hold(Commit(fragment=anchor.fragment, version=anchor.version))


def digest_of(found: FoundTerm) -> str:
    """Return the digest of the parameters that islands gave."""
    return digest_all(anchor.parameters for anchor in found.anchors)
