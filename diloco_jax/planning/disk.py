"""The coordinator's disk: what a run of expected course holds, and room for the worst.

Each term follows from the code that writes: snapshots of fragments in turns
(`coordinator/snapshots.py`), publishes since the oldest kept one (`publishes.py` of
`coordinator/holding/`), lines that are never deleted (`observability/`), deltas that
memory has no place for (`rooms.py` there).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from diloco_jax.config import Placement
from diloco_jax.coordinator.holding import rooms
from diloco_jax.coordinator.holding.publishes import SPARED_BYTES
from diloco_jax.coordinator.service import METRICS_EVERY_S
from diloco_jax.coordinator.snapshots import BUSY_SHARE
from diloco_jax.files import is_bucket

LINES_PER_MERGE = 1700
"""Bytes of a merge's own lines on tape and in metrics, and of its points of curves."""
LINES_PER_DELTA = 860
"""Bytes on the tape of one island's part in a merge: its take, its adoption, the tokens
of others, the contribution, its direction."""
LINES_PER_REPORT = 850
"""Bytes in metrics and curves of one report of an island."""
LINES_PER_SOURCE = 120
"""The same for the loss on one source of a mixture."""
REPORTS_EVERY_S = max(1.0, METRICS_EVERY_S)
"""Seconds between two reports of an island that are written."""


Owner = Literal["coordinator", "lead", "worker"]
"""A coordinator on one machine, or what of it has a machine of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """Bytes of the coordinator's disk, or of the lead's or a worker's if each has a
    machine of its own, and bytes per second that are written.

    `expected`: the most that a run should hold while nothing goes wrong. `reserve`: the
    room that it must have besides."""

    snapshots: int
    """All kept snapshots of every fragment, and one that is being written. A lead has
    the first one and the last one of each, at the run's beginning and end."""
    log: int
    """Publishes since each fragment's oldest kept snapshot, on average: half a round
    before the next snapshot."""
    lines: int
    """Tape, metrics and curves of the whole run, in all their files: none is deleted.
    """
    exports: int
    """Kept cycles and one that is being written, with `placement.export_every`."""
    expected: int
    """Sum of the fields above, without snapshots that go to a bucket."""
    late_log: int
    """Publishes of half a round more, when every next snapshot is just due, and of the
    round that is under way."""
    deltas: int
    """Deltas that wait on the disk because the merge buffer is full, at most."""
    spared: int
    """Bytes that publishes and snapshots leave free; many more where deltas wait, which
    leave room for two snapshots of everything."""
    reserve: int
    """Sum of the three fields above."""
    bytes: int
    """Bytes that must have room: `expected` and `reserve`."""
    least: int
    """The part of it that does not depend on the length of a step: a fragment's
    snapshots follow its publishes at once, and no reports are written."""
    log_bytes_per_s: float
    snapshot_bytes_per_s: float
    export_bytes_per_s: float
    round_seconds: float
    """Seconds in which every fragment is written once: `placement.snapshot_every_s`, or
    longer where the disk is slow.
    """
    in_bucket: bool
    """True if snapshots go to a bucket, and count for its rate and not the disk's."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that are written to the disk."""
        snapshots = 0.0 if self.in_bucket else self.snapshot_bytes_per_s
        return self.log_bytes_per_s + self.export_bytes_per_s + snapshots

    @property
    def written_per_s(self) -> float:
        """Bytes per second that are written, to the disk and to a bucket."""
        return (
            self.log_bytes_per_s + self.export_bytes_per_s + self.snapshot_bytes_per_s
        )


def plan_disk(
    placement: Placement,
    *,
    params: int,
    fragments: int,
    islands: int,
    state: int,
    largest: int,
    publish: int,
    deltas: int,
    cycles: float,
    cycle_seconds: float,
    bytes_per_s: float,
    sources: int = 0,
    owner: Owner = "coordinator",
) -> DiskPlan:
    """Return the plan of the disk of a coordinator, or of a worker by what it has of
    all that follows. A lead writes neither publishes nor rounds of snapshots.

    params, fragments: numbers of them. state, publish: bytes of all fragments, in a
    snapshot and as one publish of each. largest: bytes of the largest fragment in a
    snapshot. deltas: bytes for which memory has no place, at most. cycles: of the run.
    bytes_per_s: that the disk writes. sources: of a mixture.
    """
    in_bucket, kept = is_bucket(placement.checkpoints), placement.snapshots_kept
    # Snapshots pause so that the disk has time for the rest.
    shortest = 0.0 if in_bucket else BUSY_SHARE * state / bytes_per_s
    round_s = max(placement.snapshot_every_s, shortest)
    # A fragment without a new version is not written again.
    rounds = max(round_s / cycle_seconds, 1.0)
    log = math.ceil((kept - 0.5) * rounds * publish)
    seconds = cycles * cycle_seconds
    lines = of_merges = _merge_lines(cycles * fragments, islands)
    lines += _report_lines(seconds, islands, sources)
    snapshots = kept * state + largest
    every, theta = placement.export_every, 4 * params
    # Cycles are kept by the lead.
    cycles_kept = 1 if owner == "worker" else placement.exports_kept + 1
    exports = cycles_kept * theta if every else 0
    if owner == "worker":
        lines = of_merges = 0
    elif owner == "lead":
        log, publish, deltas, snapshots = 0, 0, 0, state
    here = exports + (0 if in_bucket else snapshots)
    expected = log + lines + here
    late_log = math.ceil((0.5 * rounds + 1) * publish)
    least_log = math.ceil((kept + 1) * publish)  # As above, with a round a cycle.
    # A delta is put on the disk only where this stays free.
    spared = max(SPARED_BYTES, rooms.SPARED_BYTES_EACH * params if deltas else 0)
    reserve = late_log + deltas + spared
    return DiskPlan(
        snapshots=snapshots,
        log=log,
        lines=lines,
        exports=exports,
        expected=expected,
        late_log=late_log,
        deltas=deltas,
        spared=spared,
        reserve=reserve,
        bytes=expected + reserve,
        least=least_log + of_merges + here + deltas + spared,
        log_bytes_per_s=publish / cycle_seconds,
        snapshot_bytes_per_s=0.0 if owner == "lead" else state / round_s,
        export_bytes_per_s=theta / (every * cycle_seconds) if every else 0.0,
        round_seconds=round_s,
        in_bucket=in_bucket,
    )


def _merge_lines(merges: float, islands: int) -> int:
    """Return the bytes of all lines and points of a run's merges."""
    return math.ceil(merges * (LINES_PER_MERGE + islands * LINES_PER_DELTA))


def _report_lines(seconds: float, islands: int, sources: int) -> int:
    """Return the bytes of all lines and points of a run's reports."""
    each = LINES_PER_REPORT + sources * LINES_PER_SOURCE
    return math.ceil(seconds / REPORTS_EVERY_S * islands * each)
