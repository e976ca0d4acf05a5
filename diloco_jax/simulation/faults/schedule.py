"""A run and its faults, as data: drawn from a seed, written as JSON.

A fault strikes at `at_s`, or as soon afterwards as there is something to strike.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from diloco_jax.config import ConfigError, GraceWindow, Placement, RunConfig, SyncConfig
from diloco_jax.config.family_fields import check_member
from diloco_jax.config.fields import (
    AT_LEAST_1,
    BELOW_1,
    BETWEEN,
    NOT_NEGATIVE,
    SECONDS,
    SOME_SECONDS,
    Bound,
    within,
)
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.island.books import AdoptTraits
from diloco_jax.simulation.faults.network import Way


def _tag(name: str) -> str:
    """Return the tag of a class: `IslandCrash` -> "island_crash"."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class DrawnFault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=_tag,
):
    """A fault of any kind. at_s: seconds from the start of the run.

    What it does to a world is in `strike`.
    """

    at_s: float

    @property
    def kind(self) -> str:
        """Name of the kind in JSON."""
        return str(self.__struct_config__.tag)

    @property
    def awaits_end(self) -> bool:
        """True if it happens only once the run has its tokens. Nobody waits for it to
        see that the run goes on."""
        return False


class Restart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Return of a coordinator that died.

    down_s: seconds until it starts again.
    clock_s: reading of its monotonic clock at that start.
    noticed_s: seconds after which the islands see that their connections are broken.
    power_cut: its newest snapshot cannot be read, if there is one before it.
    workers_live: its workers, where it has several, go on without it, with the deltas
    that they have and those that are under way.
    """

    down_s: float
    clock_s: float = 0.0
    noticed_s: float = 0.0
    power_cut: bool = False
    workers_live: bool = False


# ---- islands ---------------------------------------------------------------------


class IslandCrash(DrawnFault, frozen=True):
    """An island's process dies and starts again.

    noticed: the coordinator sees the connection break; otherwise only its lease ends.
    lingers: messages that it had sent still arrive.
    """

    island: str
    down_s: float
    noticed: bool = True
    lingers: bool = False


class JoinCrash(DrawnFault, frozen=True):
    """An island dies, starts again, and dies again `joining_s` into its join."""

    island: str
    down_s: float
    joining_s: float


class Leave(DrawnFault, frozen=True):
    """An island says goodbye, and comes back as another incarnation.

    notice_s: seconds of notice, at most, in which the island is asked for its open
    takes.
    """

    island: str
    away_s: float
    notice_s: float = 0.0


class Replacement(DrawnFault, frozen=True):
    """The next incarnation starts while the present one, now stale, goes on."""

    island: str


class Impostor(DrawnFault, frozen=True):
    """A second process says hello under the name of an incarnation.

    behind: 0 for the present incarnation, 1 for the one before it.
    """

    island: str
    behind: int = 0


class StepJump(DrawnFault, frozen=True):
    """An island's steps take `factor` times as long for a while."""

    island: str
    for_s: float
    factor: float


class Unfit(DrawnFault, frozen=True):
    """An island's next delta is not finite."""

    island: str


class LongDeltas(DrawnFault, frozen=True):
    """An island's deltas are `factor` times too long, and so are the learning rates
    that it says it has, for a while or until its process ends.
    """

    island: str
    for_s: float
    factor: float


class Boast(DrawnFault, frozen=True):
    """An island says that its steps take `factor` of their time, for a while or until
    its process ends."""

    island: str
    for_s: float
    factor: float


# ---- an operator -----------------------------------------------------------------


class Removal(DrawnFault, frozen=True):
    """An operator removes an island, and admits it again after `for_s`.

    The config does not name such an island: it was admitted as the run began.
    """

    island: str
    for_s: float


class Export(DrawnFault, frozen=True):
    """An operator exports the run, so that its present cycle is kept."""


class RunStop(DrawnFault, frozen=True):
    """An operator stops all processes, and resumes the run `for_s` later."""

    for_s: float


# ---- the coordinator, its workers, its disk, its clock ---------------------------


class CoordinatorCrash(DrawnFault, frozen=True):
    """The coordinator dies in the middle of its effects.

    effects: effects that it still carries out.
    """

    restart: Restart
    effects: int = 0


class WorkerCrash(DrawnFault, frozen=True):
    """A worker dies in the middle of the lead's effects, and comes back.

    effects: effects that the lead still carries out. noticed_s: seconds until the lead
    notices. down_s: seconds from then to the worker's return. disk_lost: it has lost
    its disk.
    """

    worker: int
    down_s: float
    noticed_s: float = 0.0
    effects: int = 0
    disk_lost: bool = False


class WorkerPartition(DrawnFault, frozen=True):
    """Messages between a worker and its lead wait. Islands reach both. If it lasts, the
    worker ends, the lead notices that a lease later, and it comes back `down_s` after
    that.
    """

    worker: int
    for_s: float
    down_s: float = 1.0


class DiskFailure(DrawnFault, frozen=True):
    """An append fails, and the coordinator's process ends.

    appends: appends that still succeed.
    written: the record is on the disk all the same.
    """

    restart: Restart
    appends: int = 0
    written: bool = False


class TornWrite(DrawnFault, frozen=True):
    """An append fails, and a part of the record is on the disk.

    appends: appends that still succeed.
    """

    restart: Restart
    appends: int = 0
    written_share: float = 0.5


class SnapshotFailure(DrawnFault, frozen=True):
    """The next snapshot is not completed."""


class FullDisk(DrawnFault, frozen=True):
    """The disk has room for small records only, for a while. brimful: not even for
    these."""

    for_s: float
    brimful: bool = False


class DiskGone(DrawnFault, frozen=True):
    """The coordinator dies, and finds an empty disk for the next `gone_s` seconds.

    If that takes long, a new term begins on the empty disk, and the old disk is useless
    when it comes back.
    """

    restart: Restart
    gone_s: float


class DiskLost(DrawnFault, frozen=True):
    """The coordinator dies, and its disk is lost for good."""

    restart: Restart


class ClockJump(DrawnFault, frozen=True):
    """The coordinator's clock jumps forward, as one that counts its sleep. at_end: once
    the run has its tokens."""

    forward_s: float
    at_end: bool = False

    @property
    def awaits_end(self) -> bool:
        return self.at_end


class MachineSleep(DrawnFault, frozen=True):
    """The coordinator's machine sleeps, as a virtual one that is moved: nothing reaches
    it, and its clock stands still. Islands go on. at_end: once the run has its tokens.
    """

    for_s: float
    at_end: bool = False

    @property
    def awaits_end(self) -> bool:
        return self.at_end


# ---- the network -----------------------------------------------------------------


class Break(DrawnFault, frozen=True):
    """A connection breaks.

    lingers: messages under way still arrive; otherwise they are lost.
    noticed: the coordinator sees the break; otherwise it sees only silence.
    """

    island: str
    away_s: float
    noticed: bool = True
    lingers: bool = False


class Partition(DrawnFault, frozen=True):
    """Nothing comes through in these directions, and neither end is told.

    Messages wait, and are lost if an end gives the connection up for its silence.
    """

    island: str
    for_s: float
    ways: tuple[Way, ...] = ("up", "down")


class Repeat(DrawnFault, frozen=True):
    """Messages and transfers arrive a second time, `after_s` later."""

    island: str
    for_s: float
    after_s: float


class Delay(DrawnFault, frozen=True):
    """Everything of one channel arrives `late_s` later: bulk and control overtake each
    other."""

    island: str
    for_s: float
    late_s: float
    channel: Literal["control", "bulk"] = "control"


class Corruption(DrawnFault, frozen=True):
    """Bulk bytes are damaged on the way, and sent again."""

    island: str
    for_s: float


AnyFault = (
    IslandCrash
    | JoinCrash
    | Leave
    | Replacement
    | Impostor
    | StepJump
    | Unfit
    | LongDeltas
    | Removal
    | Export
    | RunStop
    | Boast
    | CoordinatorCrash
    | WorkerCrash
    | WorkerPartition
    | DiskFailure
    | TornWrite
    | SnapshotFailure
    | FullDisk
    | DiskGone
    | DiskLost
    | ClockJump
    | MachineSleep
    | Break
    | Partition
    | Repeat
    | Delay
    | Corruption
)

RUN_ID = "run"
SEQUENCE_LENGTH = 8
LEASE_S = 4.0
"""Seconds of silence after which a peer counts as gone (`placement.time_budget_s`)."""
COMPILE_BUDGET_S = 10.0
QUARANTINE_AFTER = 2
"""Unfit deltas in a row after which an island is quarantined; one cycle releases it."""
EXPORT_EVERY = 2
"""Cycles between two that are kept."""
RESTART_S = 1.0
"""Seconds from the end of a refused process to the next process."""
RETRY_S = 0.5
"""Seconds between attempts to connect, to find a disk, or to strike."""
PATIENCE_S = 600.0
"""Longest time in seconds until the last fault has struck."""
MOST_STEPS = 10_000
"""Steps of all islands, where a second of waiting counts as one step. A run of this
length has far fewer calls than `world.MOST_CALLS`.
"""
BATCH_SIZE = Bound(1, 1000)
LEAD = Bound(0, 100)
FAULT = {
    "behind": Bound(0, 1),  # The first incarnation is 1.
    "factor": Bound(1e-6, 100),
    "effects": Bound(0, 1000),
    "worker": Bound(0, 1000),
    "appends": Bound(0, 1000),
    "written_share": BETWEEN,
    # A clock may have any reading.
    "clock_s": SECONDS,
    "forward_s": SECONDS,
}
FAULT_SECONDS = Bound(0, PATIENCE_S)
"""Bounds of all other fields."""


class DrawnIsland(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """An island: its batch, its speed and its hosts."""

    step_s: float = 1.0
    batch_size: int = 1
    join_s: float = 1.0
    """Seconds from its welcome to its first step."""
    lead: int = 0
    """Boundaries that its hosts need to agree on a decision; 0: it has one host."""


class Schedule(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Everything that a played run depends on. Times count from its start."""

    islands: dict[str, DrawnIsland]
    faults: tuple[AnyFault, ...] = ()
    total_tokens: int
    extended_to: tuple[int, ...] = ()
    """Tokens in all to which the run goes on, each time that it is over."""
    fragment_sizes: tuple[int, ...] = (2, 1)
    """Parameters by fragment."""
    workers: int = 1
    """Holders of fragments."""
    room: int = 0
    """Fragments of a worker for whose deltas, of all islands, memory has room; 0:
    nobody counts them."""
    workers_apart: bool = False
    """The workers are on machines of their own, and go on with the next lead."""
    steps_per_cycle: int = 4
    overlap_steps: int = 2
    quorum: int = 1
    grace: float = 0.0
    grace_window: GraceWindow = "alike"
    max_staleness: int = 1
    adopt: str = "rebase"
    outage_s: float = 20.0
    """Seconds of data that an island holds."""
    latency_s: float = 0.05
    transfer_s: float = 0.2
    """Seconds that a delta, or the answer to a fetch, is under way."""
    merge_s: float = 0.1

    def configs(self) -> tuple[RunConfig, PolicyConfig]:
        """Return the configs for the production code."""
        run = RunConfig(
            sequence_length=SEQUENCE_LENGTH,
            total_tokens=self.total_tokens,
            sync=SyncConfig(
                steps_per_cycle=self.steps_per_cycle,
                fragments=len(self.fragment_sizes),
                overlap_steps=self.overlap_steps,
                quorum=self.quorum,
                grace=self.grace,
                grace_window=self.grace_window,
                max_staleness=self.max_staleness,
                adopt=self.adopt,
                quarantine_after=QUARANTINE_AFTER,
                release_cycles=1,
            ),
        )
        placement = Placement(
            time_budget_s=LEASE_S,
            outage_budget_s=self.outage_s,
            compile_budget_s=COMPILE_BUDGET_S,
            export_every=EXPORT_EVERY,
        )
        batches: dict[str, int | None] = {
            name: plan.batch_size
            for name, plan in self.islands.items()
            if name not in self.scavenged
        }
        sizes = self.fragment_sizes
        least = {name: self._least_s(name) for name in self.islands}
        config = policy_config(
            run, placement, RUN_ID, sizes, batches, least_seconds=least
        )
        return run, msgspec.structs.replace(
            config,
            workers=self.workers,
            room_each=1 if self.room else 0,
            merge_buffer_bytes=self.room * len(self.islands),
        )

    def _least_s(self, name: str) -> float:
        """Return the seconds of a sequence in the island's shortest steps."""
        jumps = (
            f.factor
            for f in self.faults
            if isinstance(f, StepJump) and f.island == name
        )
        plan = self.islands[name]
        return plan.step_s * min((1.0, *jumps)) / plan.batch_size

    @property
    def scavenged(self) -> frozenset[str]:
        """Islands that the config does not name: an operator admits and removes
        them."""
        return frozenset(f.island for f in self.faults if isinstance(f, Removal))

    @property
    def rule(self) -> AdoptTraits:
        """Adopt rule of the islands."""
        return ADOPT_RULES.find(self.adopt)

    @property
    def pacing_s(self) -> float:
        """Step time of the K-th fastest island, in seconds."""
        times = sorted(plan.step_s for plan in self.islands.values())
        return times[self.quorum - 1]

    @property
    def slowest_s(self) -> float:
        """Step time of the slowest island, in seconds."""
        return max(plan.step_s for plan in self.islands.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all islands together."""
        return sum(
            plan.batch_size * SEQUENCE_LENGTH / plan.step_s
            for plan in self.islands.values()
        )

    def json(self) -> str:
        """Return one line of JSON without the default values."""
        return msgspec.json.encode(self).decode()


def from_json(text: str) -> Schedule:
    """Read a schedule from JSON. Raises ConfigError if the text is not one."""
    try:
        schedule = msgspec.json.decode(text, type=Schedule)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--schedule is not a schedule of faults: {error}") from error
    unknown = {
        name
        for fault in schedule.faults
        if (name := getattr(fault, "island", None)) is not None
    } - set(schedule.islands)
    if unknown:
        raise ConfigError(
            f"--schedule has faults of islands {sorted(unknown)}, its islands are "
            f"{sorted(schedule.islands)}"
        )
    _check_values(schedule)
    _check_apart(schedule)
    if not 1 <= schedule.quorum <= len(schedule.islands):
        raise ConfigError(
            f"--schedule has quorum {schedule.quorum} and {len(schedule.islands)} "
            f"islands; choose a quorum from 1 to {len(schedule.islands)}"
        )
    return schedule


def _check_apart(schedule: Schedule) -> None:
    """Refuse workers on machines of their own where they cannot be."""
    if not schedule.workers_apart:
        return
    if schedule.workers < 2:
        raise ConfigError(
            f"--schedule has workers_apart and workers = {schedule.workers}; give it "
            f"at least 2, or leave out workers_apart"
        )
    if any(fault.kind == "disk_gone" for fault in schedule.faults):
        raise ConfigError(
            "--schedule has workers_apart and the fault disk_gone: workers that obey "
            "the lead of a new term refuse that of the old disk; leave one of them "
            "out, or let the disk be lost (disk_lost)"
        )


def _check_values(schedule: Schedule) -> None:
    if not schedule.islands or not schedule.fragment_sizes:
        raise ConfigError(
            f"--schedule has {len(schedule.islands)} islands and "
            f"{len(schedule.fragment_sizes)} fragments; give at least one of each"
        )
    if min(schedule.fragment_sizes) < 1:
        raise ConfigError(
            f"--schedule has fragment_sizes {schedule.fragment_sizes}; each must be at "
            f"least 1"
        )
    check_member("adopt", ADOPT_RULES, schedule.adopt)
    within(schedule, AT_LEAST_1, "total_tokens", "steps_per_cycle", "workers")
    within(schedule, NOT_NEGATIVE, "overlap_steps", "max_staleness")
    within(schedule, BELOW_1, "grace")
    within(schedule, SECONDS, "outage_s", "latency_s", "transfer_s", "merge_s")
    for plan in schedule.islands.values():
        within(plan, SOME_SECONDS, "step_s")
        within(plan, BATCH_SIZE, "batch_size")
        within(plan, SECONDS, "join_s")
        within(plan, LEAD, "lead")
    _check_length(schedule)
    for fault in schedule.faults:
        _check_fault(fault)


def _check_length(schedule: Schedule) -> None:
    """Refuse an overlong schedule: it would look like a violation of liveness."""
    total_tokens = max(schedule.total_tokens, *schedule.extended_to, 0)
    seconds = total_tokens / schedule.tokens_per_s
    rates = (1 / plan.step_s + 1 for plan in schedule.islands.values())
    steps = seconds * sum(rates)
    if not steps <= MOST_STEPS:
        raise ConfigError(
            f"total_tokens = {total_tokens} takes {seconds:.3g} s: "
            f"{steps:.2g} steps and seconds of all islands, more than {MOST_STEPS:,}; "
            f"lower total_tokens or extended_to, or choose other step_s or batch_size"
        )


def _check_fault(fault: AnyFault | Restart) -> None:
    for field in fault.__struct_fields__:
        value = getattr(fault, field)
        if isinstance(value, Restart):
            _check_fault(value)
        elif field in FAULT or isinstance(value, float):
            within(fault, FAULT.get(field, FAULT_SECONDS), field)
        elif value == ():
            raise ConfigError(f"{field} = []; name at least one")
