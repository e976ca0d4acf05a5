"""The faults of a schedule, as one table: fields, how they are drawn, what they strike.

A fault strikes at `at_s`, or as soon afterwards as there is something to strike.
Fields are annotated with how they are drawn, in this order.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    get_origin,
    get_type_hints,
)

import msgspec

from diloco_jax.config import ConfigError
from diloco_jax.config.fields import BETWEEN, SECONDS, Bound, within
from diloco_jax.protocol.coordinator.state import KeepAsked, Timer
from diloco_jax.simulation.clock import Way

LEASE_S = 4.0
"""Seconds of silence after which a peer counts as gone (`placement.time_budget_s`)."""
LOOKS_EVERY_S = 0.5
"""Seconds between two looks of an operator whether all is as it was ordered."""
PATIENCE_S = 600.0
"""Longest time in seconds until the last fault has struck."""
JOIN_S = 2.0
"""Longest join in seconds that is drawn, about the time until the first step."""
BOUNDS = {
    "behind": Bound(0, 1),  # The first incarnation is 1.
    "ahead": Bound(0, 1),
    "factor": Bound(1e-6, 100),
    "effects": Bound(0, 1000),
    "worker": Bound(0, 1000),
    "appends": Bound(0, 1000),
    "written_share": BETWEEN,
    # A clock may have any reading.
    "clock_s": SECONDS,
    "forward_s": SECONDS,
}
SECONDS_BOUND = Bound(0, PATIENCE_S)
"""Bounds of all other fields."""

# ---- how values are drawn ---------------------------------------------------------

DrawValue = Callable[[random.Random], Any]


def one_of(*values: Any) -> DrawValue:
    """Return a draw of one of these values."""
    return lambda rng: rng.choice(values)


def uniform(low: float, high: float, digits: int = 2) -> DrawValue:
    """Return a draw of a number between two others."""
    return lambda rng: round(rng.uniform(low, high), digits)


def coin(rng: random.Random) -> bool:
    """Draw True or False."""
    return rng.random() < 0.5


def seconds(rng: random.Random) -> float:
    """Draw seconds shorter or longer than a lease."""
    return round(rng.choice([0.3, 1.0, 2.0]) * LEASE_S * rng.uniform(0.3, 1), 2)


def none_or_seconds(rng: random.Random) -> float:
    """Draw 0 or `seconds`."""
    return rng.choice([0.0, seconds(rng)])


def times(*factors: float) -> DrawValue:
    """Return a draw of `seconds`, times one of these."""
    return lambda rng: round(seconds(rng) * rng.choice(factors), 2)


def down_seconds(*longest: float) -> DrawValue:
    """Return a draw of seconds up to one of these."""
    return lambda rng: round(rng.choice(longest) * rng.uniform(0.5, 1), 2)


# ---- what all have ----------------------------------------------------------------


def _tag(name: str) -> str:
    """Return the tag of a class: `IslandCrash` -> "island_crash"."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Drawn(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A part of a schedule, as JSON without the default values."""


class Restart(Drawn, frozen=True, kw_only=True):
    """Return of a coordinator that died.

    down_s: seconds until it starts again.
    clock_s: reading of its monotonic clock at that start.
    noticed_s: seconds after which the islands see that their connections are broken.
    power_cut: its newest snapshot cannot be read, if there is one before it.
    """

    down_s: float
    clock_s: float = 0.0
    noticed_s: float = 0.0
    power_cut: bool = False

    @property
    def lasts_s(self) -> float:
        """Seconds until it is there again, for all that see it."""
        return max(self.down_s, self.noticed_s)


def restart(rng: random.Random) -> Restart:
    """Draw the return of a coordinator."""
    return Restart(
        down_s=down_seconds(0.2, 3.0, 9.0)(rng),
        clock_s=round(rng.choice([10.0, 5000.0]) * rng.random(), 1),
        noticed_s=rng.choice([0.0, 0.0, 4.0]),
    )


Seconds = Annotated[float, seconds]
Coin = Annotated[bool, coin]
Effects = Annotated[int, one_of(*range(12))]
Appends = Annotated[int, one_of(*range(3))]
Again = Annotated[Restart, restart]


class ScheduledFault(Drawn, frozen=True, kw_only=True, tag_field="kind", tag=_tag):
    """A fault of any kind. at_s: seconds from the start of the run."""

    at_s: float

    @classmethod
    @functools.cache
    def draws(cls) -> dict[str, DrawValue]:
        """Return the fields that are drawn from a seed, in order."""
        hints = get_type_hints(cls, include_extras=True).items()
        return {
            name: hint.__metadata__[0]
            for name, hint in hints
            if get_origin(hint) is Annotated
        }

    @property
    def kind(self) -> str:
        """Name of the kind in JSON."""
        return str(self.__struct_config__.tag)

    @property
    def awaits_end(self) -> bool:
        """True if it happens only once the run has its tokens. Nobody waits for it to
        see that the run goes on."""
        return bool(getattr(self, "at_end", False))

    def strike(self, world: Any) -> bool:
        """Do or arm it in a `world.FaultyWorld`; return False if there is nothing to
        strike just now. `world.begun` is called once it really happens."""
        target = self.target(world)
        lasts_s = None if target is None else self.happen(world, target)
        return lasts_s is not None and bool(world.begun(self, lasts_s))

    def target(self, world: Any) -> Any:
        """Return what it strikes; None if that is not there just now."""
        return world

    def happen(self, world: Any, target: Any) -> float | None:
        """Do it; return the seconds until it is over. None: there is nothing to strike
        just now."""
        raise NotImplementedError


def check(part: ScheduledFault | Restart) -> None:
    """Raise ConfigError for a value out of its bounds."""
    for field in part.__struct_fields__:
        value = getattr(part, field)
        if isinstance(value, Restart):
            check(value)
        elif field in BOUNDS or isinstance(value, float):
            within(part, BOUNDS.get(field, SECONDS_BOUND), field)
        elif value == ():
            raise ConfigError(f"{field} = []; name at least one")


# ---- islands ----------------------------------------------------------------------


class IslandFault(ScheduledFault, frozen=True, kw_only=True):
    """Base: a fault of an island whose newest process has not ended."""

    island: str

    def target(self, world: Any) -> Any:
        island = world.islands[self.island]
        return None if island.ended is not None else island


class IslandCrash(IslandFault, frozen=True, kw_only=True):
    """An island's process dies and starts again.

    noticed: the coordinator sees the connection break; otherwise only its lease ends.
    lingers: messages that it had sent still arrive.
    """

    down_s: Seconds
    noticed: Coin = True
    lingers: Coin = False

    def happen(self, world: Any, island: Any) -> float:
        world.crash_island(self.island, self.down_s, self.noticed, self.lingers)
        return self.down_s


class JoinCrash(IslandFault, frozen=True, kw_only=True):
    """An island dies, starts again, and dies again `joining_s` into its join."""

    down_s: Annotated[float, uniform(0.1, 3)]
    joining_s: Annotated[float, uniform(0, JOIN_S)]

    def happen(self, world: Any, island: Any) -> float:
        world.crash_island(self.island, self.down_s)
        again_s = self.down_s + self.joining_s
        world.clock.after(again_s, lambda: world.crash_island(self.island, self.down_s))
        return again_s + self.down_s


class Leave(IslandFault, frozen=True, kw_only=True):
    """An island says goodbye, and comes back as another incarnation.

    notice_s: seconds of notice, at most, in which the island is asked for its open
    takes.
    """

    away_s: Seconds
    notice_s: Annotated[float, one_of(0.0, 0.3, 3.0)] = 0.0

    def happen(self, world: Any, island: Any) -> float:
        if self.notice_s:
            island.notice(self.notice_s)
        else:
            island.leave("stopped")
        again_s = self.notice_s + self.away_s
        world.start_island_after(again_s, self.island)
        return again_s


class Replacement(IslandFault, frozen=True, kw_only=True):
    """The next incarnation starts while the present one, now stale, goes on."""

    def happen(self, world: Any, island: Any) -> float:
        world.start_island(self.island)
        return 0.0


class Impostor(IslandFault, frozen=True, kw_only=True):
    """A second process says hello under the name of an incarnation.

    behind: 0 for the present incarnation, 1 for the one before it.
    """

    behind: Annotated[int, one_of(*range(2))] = 0

    def happen(self, world: Any, island: Any) -> float:
        impostor = world.make_island(self.island, island.incarnation - self.behind)
        # No two processes have one session.
        impostor.session += f".impostor.{world.struck[self.kind]}"
        world.connect(impostor)
        return 0.0


class StepJump(ScheduledFault, frozen=True, kw_only=True):
    """An island's steps take `factor` times as long for a while."""

    island: str
    for_s: Seconds
    factor: Annotated[float, one_of(0.4, 3.0, 8.0)]

    def happen(self, world: Any, target: Any) -> float:
        slowness, name = world.slowness, self.island
        slowness[name] = self.factor
        world.clock.after(self.for_s, lambda: slowness.update({name: 1.0}))
        # A step that began meanwhile keeps its length.
        step_s: float = world.schedule.islands[name].step_s
        return self.for_s + self.factor * step_s


class Unfit(IslandFault, frozen=True, kw_only=True):
    """An island's next delta is not finite."""

    def happen(self, world: Any, island: Any) -> float:
        island.body.finite = False
        return 0.0


class LongDeltas(IslandFault, frozen=True, kw_only=True):
    """An island's deltas are `factor` times too long, and so are the learning rates
    that it says it has, for a while or until its process ends.
    """

    for_s: float
    factor: float

    def happen(self, world: Any, island: Any) -> float:
        world.set_for(self.for_s, island.body, "lie", self.factor)
        world.set_for(self.for_s, island, "boasted_rates", self.factor)
        return self.for_s


class Boast(IslandFault, frozen=True, kw_only=True):
    """An island says that its steps take `factor` of their time, for a while or until
    its process ends."""

    for_s: float
    factor: float

    def happen(self, world: Any, island: Any) -> float:
        world.set_for(self.for_s, island, "boast", self.factor)
        return self.for_s


class MadeUpAnchors(IslandFault, frozen=True, kw_only=True):
    """An island makes up the anchors that a coordinator without them asks it for, for a
    while or until its process ends. ahead: merges by which it claims to be ahead."""

    for_s: float
    ahead: Annotated[int, one_of(*range(2))] = 0

    def happen(self, world: Any, island: Any) -> float:
        world.set_for(self.for_s, island, "lies", self.ahead, usual=None)
        # The others may wait for a third island.
        patience_s: float = 2 * world.schedule.outage_s + world.new_term_within_s
        return self.for_s + patience_s


class BadDonor(IslandFault, frozen=True, kw_only=True):
    """An island gives the others of its region nothing, for a while or until its
    process ends. lies: it gives them something else."""

    for_s: float
    lies: Coin = False

    def happen(self, world: Any, island: Any) -> float:
        how = "lies" if self.lies else "nothing"
        world.set_for(self.for_s, island, "gives_how", how, usual="")
        return self.for_s


class LeadFault(ScheduledFault, frozen=True, kw_only=True):
    """Base: a fault of the coordinator that leads, at the end of the run if it awaits
    that."""

    def target(self, world: Any) -> Any:
        lead = world.coordinator
        at_end = lead is not None and lead.state.phase != "running"
        return lead if at_end or not self.awaits_end else None


# ---- an operator ------------------------------------------------------------------


class Removal(ScheduledFault, frozen=True, kw_only=True):
    """An operator removes an island, and admits it again after `for_s`.

    The config does not name such an island: it was admitted as the run began.
    """

    island: str
    for_s: Seconds

    def happen(self, world: Any, target: Any) -> float:
        world.order(self.island, admitted=False)
        world.clock.after(self.for_s, lambda: world.order(self.island, admitted=True))
        return self.for_s + LOOKS_EVERY_S


class Export(LeadFault, frozen=True, kw_only=True):
    """An operator exports the run, so that its present cycle is kept."""

    def happen(self, world: Any, lead: Any) -> float | None:
        if lead.waits:
            return None
        lead.hear(KeepAsked())
        return 0.0


class RunStop(ScheduledFault, frozen=True, kw_only=True):
    """An operator stops all processes, and resumes the run `for_s` later."""

    for_s: Seconds

    def happen(self, world: Any, target: Any) -> float | None:
        return self.for_s if world.stop_run(self.for_s) else None


# ---- the coordinator, its workers, its disk, its clock ----------------------------


class ArmedFault(ScheduledFault, frozen=True, kw_only=True):
    """Base: a fault that happens once the `unit.Unit` that leads has done something as
    often as its field `awaits` says; without such a field, for the first time."""

    awaits: ClassVar[str]

    def strike(self, world: Any) -> bool:
        return bool(world.arm(self))


class DiskFault(ArmedFault, frozen=True, kw_only=True):
    """Base: an append that fails, and the coordinator's process ends.

    appends: appends that still succeed.
    """

    awaits: ClassVar[str] = "appends"
    appends: Appends = 0

    def happen(self, world: Any, unit: Any) -> float:
        restart: Restart = self.restart  # type: ignore[attr-defined]
        if unit.lead is not None:
            unit.crash(restart)
        return restart.lasts_s


class CoordinatorCrash(ArmedFault, frozen=True, kw_only=True):
    """The coordinator dies in the middle of its effects.

    effects: effects that it still carries out.
    """

    awaits: ClassVar[str] = "effects"
    effects: Effects = 0
    restart: Again

    def happen(self, world: Any, unit: Any) -> float:
        unit.crash(self.restart)
        return self.restart.lasts_s


class WorkerCrash(ArmedFault, frozen=True, kw_only=True):
    """A worker dies in the middle of the lead's effects. The lead ends once it notices,
    and starts again with all workers.

    effects: effects that the lead still carries out. noticed_s: seconds until the lead
    notices. down_s: seconds from then to the start. disk_lost: it has lost its disk.
    """

    awaits: ClassVar[str] = "effects"
    worker: Annotated[int, one_of(*range(3))]
    down_s: Annotated[float, down_seconds(0.2, 3.0, 9.0)]
    noticed_s: Annotated[float, one_of(0.0, 0.0, 0.05, 0.3)] = 0.0
    effects: Effects = 0
    disk_lost: bool = False

    def happen(self, world: Any, unit: Any) -> float:
        lasts_s: float = unit.crash_worker(
            self.worker, self.noticed_s, self.down_s, disk_lost=self.disk_lost
        )
        return lasts_s


class DiskFailure(DiskFault, frozen=True, kw_only=True):
    """An append fails. written: the record is on the disk all the same."""

    written: Coin = False
    restart: Again

    @property
    def written_share(self) -> float:
        """Share of the record that is on the disk."""
        return float(self.written)


class TornWrite(DiskFault, frozen=True, kw_only=True):
    """An append fails, and a part of the record is on the disk."""

    written_share: Annotated[float, uniform(0.02, 0.98)] = 0.5
    restart: Again


class SnapshotFailure(ArmedFault, frozen=True, kw_only=True):
    """The next snapshot is not completed."""

    awaits: ClassVar[str] = "snapshots"

    def happen(self, world: Any, unit: Any) -> float:
        return 0.0


class FullDisk(ScheduledFault, frozen=True, kw_only=True):
    """The disk has room for small records only, for a while. brimful: not even for
    these."""

    for_s: Seconds
    brimful: Coin = False

    def happen(self, world: Any, target: Any) -> float:
        world.unit.fill_disk(self.for_s, brimful=self.brimful)
        return self.for_s


class DiskGone(LeadFault, frozen=True, kw_only=True):
    """The coordinator dies, and finds an empty disk for the next `gone_s` seconds.

    If that takes long, a new term begins on the empty disk, and the old disk is useless
    when it comes back.
    """

    restart: Again
    # Drawn from the coordinator's return on.
    gone_s: Annotated[float, lambda rng: rng.uniform(0, 6)]

    def happen(self, world: Any, lead: Any) -> float:
        world.set_for(self.gone_s, world.unit.disk, "empty", True, usual=False)
        world.unit.crash(self.restart)
        gathered_s: float = self.restart.down_s + world.new_term_within_s
        return max(self.gone_s, gathered_s)


class DiskLost(LeadFault, frozen=True, kw_only=True):
    """The coordinator dies, and its disk is lost for good."""

    restart: Again

    def happen(self, world: Any, lead: Any) -> float:
        world.unit.disk.empty = True
        world.unit.crash(self.restart)
        gathered_s: float = self.restart.down_s + world.new_term_within_s
        return gathered_s


class ClockJump(LeadFault, frozen=True, kw_only=True):
    """The coordinator's clock jumps forward, as one that counts its sleep. at_end: once
    the run has its tokens."""

    forward_s: Annotated[float, uniform(1, 40, digits=1)]
    at_end: bool = False

    def happen(self, world: Any, lead: Any) -> float:
        lead.clock_offset += self.forward_s
        lead.hear(Timer())
        return 0.0


class MachineSleep(LeadFault, frozen=True, kw_only=True):
    """The coordinator's machine sleeps, as a virtual one that is moved: nothing reaches
    it, and its clock stands still. Islands go on. at_end: once the run has its tokens.
    """

    for_s: Annotated[float, times(1.0, 1.0, 5.0)]
    at_end: Annotated[bool, lambda rng: rng.random() < 0.3] = False

    def happen(self, world: Any, lead: Any) -> float | None:
        if lead.stopped:
            return None
        world.sleep(self.for_s)
        return self.for_s


class SecondCoordinator(LeadFault, frozen=True, kw_only=True):
    """The coordinator's machine sleeps, and an operator starts a second coordinator
    without state. The first comes back beside it."""

    for_s: Annotated[float, times(1.0, 5.0, 5.0)]

    def happen(self, world: Any, lead: Any) -> float | None:
        if lead.waits or world.first is not None:
            return None
        world.begin_second(self.for_s)
        gathered_s: float = 2 * world.new_term_within_s + 2 * LEASE_S
        return self.for_s + gathered_s


# ---- the network ------------------------------------------------------------------


class Break(IslandFault, frozen=True, kw_only=True):
    """A connection breaks.

    lingers: messages under way still arrive; otherwise they are lost.
    noticed: the coordinator sees the break; otherwise it sees only silence.
    """

    away_s: Annotated[float, none_or_seconds]
    noticed: Coin = True
    lingers: Coin = False

    def happen(self, world: Any, island: Any) -> float | None:
        if island.line is None:
            return None
        world.break_connection(island, self.away_s, self.noticed, self.lingers)
        return self.away_s


class NetworkFault(ScheduledFault, frozen=True, kw_only=True):
    """Base: something of an island's network is otherwise for a while."""

    island: str

    def target(self, world: Any) -> Any:
        return world.networks[self.island]


class Partition(NetworkFault, frozen=True, kw_only=True):
    """Nothing comes through in these directions, and neither end is told.

    Messages wait, and are lost if an end gives the connection up for its silence.
    """

    ways: Annotated[tuple[Way, ...], one_of(("up",), ("down",), ("up", "down"))] = (
        "up",
        "down",
    )
    for_s: Seconds

    def happen(self, world: Any, network: Any) -> float:
        world.hold(self.island, self.ways, self.for_s)
        return self.for_s


class Repeat(NetworkFault, frozen=True, kw_only=True):
    """Messages and transfers arrive a second time, `after_s` later."""

    for_s: Seconds
    after_s: Annotated[float, one_of(0.01, 0.5, 3.0)]

    def happen(self, world: Any, network: Any) -> float:
        world.set_for(self.for_s, network, "repeat_after_s", self.after_s, usual=0.0)
        return self.for_s + self.after_s


class Delay(NetworkFault, frozen=True, kw_only=True):
    """Everything of one channel arrives `late_s` later: bulk and control overtake each
    other."""

    for_s: Seconds
    late_s: Annotated[float, uniform(0.5, 4, digits=1)]
    channel: Annotated[Literal["control", "bulk"], one_of("control", "bulk")] = (
        "control"
    )

    def happen(self, world: Any, network: Any) -> float:
        field = f"{self.channel}_late_s"
        world.set_for(self.for_s, network, field, self.late_s, usual=0.0)
        return self.for_s + self.late_s


class Corruption(NetworkFault, frozen=True, kw_only=True):
    """Bulk bytes are damaged on the way, and sent again."""

    for_s: Seconds

    def happen(self, world: Any, network: Any) -> float:
        world.set_for(self.for_s, network, "corrupts", True, usual=False)
        return self.for_s


CRASHES = (CoordinatorCrash, DiskFailure, TornWrite)
"""Crashes of a coordinator whose disk stays."""
LOSSES = (DiskGone, DiskLost)
"""Losses of a state, and with it of what an operator ordered."""
LIKELY: tuple[type[ScheduledFault], ...] = (
    *(IslandCrash, JoinCrash, Leave, Replacement, Impostor, StepJump, Unfit),
    *(CoordinatorCrash, *CRASHES, SnapshotFailure, *LOSSES, ClockJump),
    *(Break, Partition, Repeat, Delay, Corruption),
)
"""Kinds that are equally likely in a drawn schedule, but that a coordinator crashes
twice as often."""
APART: tuple[type[ScheduledFault], ...] = (
    *(LongDeltas, Boast, MadeUpAnchors, BadDonor, Removal, Export, RunStop),
    *(WorkerCrash, FullDisk, MachineSleep, SecondCoordinator),
)
"""Kinds that are drawn apart, each with a share of the schedules."""
AnyFault: TypeAlias = ScheduledFault
if not TYPE_CHECKING:  # For the decoder, which wants a union of what it may meet.
    AnyFault = functools.reduce(operator.or_, LIKELY + APART)
