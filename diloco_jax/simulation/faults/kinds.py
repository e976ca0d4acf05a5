"""Kinds of faults: each with its data and its effect on a world.

A fault strikes at `at_s`, or as soon afterwards as there is something to strike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from diloco_jax.simulation.faults.boasting import Boast
from diloco_jax.simulation.faults.clock_faults import AnyClockFault
from diloco_jax.simulation.faults.fault import DrawnFault, Restart
from diloco_jax.simulation.faults.network import Way
from diloco_jax.simulation.faults.operator import AnyOrder
from diloco_jax.simulation.faults.worker_crashes import WorkerCrash, WorkerPartition

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld


def _set_for(
    world: FaultyWorld, for_s: float, of: object, field: str, value: Any, usual: Any
) -> None:
    """Set a field of an object for a while, and then to its usual value again."""
    setattr(of, field, value)
    world.clock.after(for_s, lambda: setattr(of, field, usual))


# ---- islands ----------------------------------------------------------------------


class IslandCrash(DrawnFault, frozen=True):
    """An island's process dies and starts again.

    noticed: the coordinator sees the connection break; otherwise only its lease ends.
    lingers: messages that it had sent still arrive.
    """

    island: str
    down_s: float
    noticed: bool = True
    lingers: bool = False

    def strike(self, world: FaultyWorld) -> bool:
        return world.crash_island(
            self.island, self.down_s, noticed=self.noticed, lingers=self.lingers
        ) and world.begun(self, self.down_s)


class JoinCrash(DrawnFault, frozen=True):
    """An island dies, starts again, and dies again `joining_s` into its join."""

    island: str
    down_s: float
    joining_s: float

    def strike(self, world: FaultyWorld) -> bool:
        if not world.crash_island(self.island, self.down_s):
            return False
        again_s = self.down_s + self.joining_s
        world.clock.after(again_s, lambda: self._again(world))
        return world.begun(self, again_s + self.down_s)

    def _again(self, world: FaultyWorld) -> None:
        world.crash_island(self.island, self.down_s)


class Leave(DrawnFault, frozen=True):
    """An island says goodbye, and comes back as another incarnation.

    notice_s: seconds of notice, at most, in which the island is asked for its open
    takes.
    """

    island: str
    away_s: float
    notice_s: float = 0.0

    def strike(self, world: FaultyWorld) -> bool:
        island = world.islands[self.island]
        if island.ended is not None:
            return False
        if self.notice_s:
            island.notice(self.notice_s)
        else:
            island.leave("stopped")
        again_s = self.notice_s + self.away_s
        world.start_island_after(again_s, self.island)
        return world.begun(self, again_s)


class Replacement(DrawnFault, frozen=True):
    """The next incarnation starts while the present one, now stale, goes on."""

    island: str

    def strike(self, world: FaultyWorld) -> bool:
        if world.islands[self.island].ended is not None:
            return False
        world.start_island(self.island)
        return world.begun(self, 0.0)


class Impostor(DrawnFault, frozen=True):
    """A second process says hello under the name of an incarnation.

    behind: 0 for the present incarnation, 1 for the one before it.
    """

    island: str
    behind: int = 0

    def strike(self, world: FaultyWorld) -> bool:
        island = world.islands[self.island]
        if island.ended is not None:
            return False
        impostor = world.make_island(self.island, island.incarnation - self.behind)
        # No two processes have one session.
        impostor.session += f".impostor.{world.struck[self.kind]}"
        world.connect(impostor)
        return world.begun(self, 0.0)


class StepJump(DrawnFault, frozen=True):
    """An island's steps take `factor` times as long for a while."""

    island: str
    for_s: float
    factor: float

    def strike(self, world: FaultyWorld) -> bool:
        world.slowness[self.island] = self.factor
        world.clock.after(self.for_s, lambda: self._end(world))
        # A step that began meanwhile keeps its length.
        step_s = self.factor * world.schedule.islands[self.island].step_s
        return world.begun(self, self.for_s + step_s)

    def _end(self, world: FaultyWorld) -> None:
        world.slowness[self.island] = 1.0


class Unfit(DrawnFault, frozen=True):
    """An island's next delta is not finite."""

    island: str

    def strike(self, world: FaultyWorld) -> bool:
        island = world.islands[self.island]
        if island.ended is not None:
            return False
        island.body.finite = False
        return world.begun(self, 0.0)


class LongDeltas(DrawnFault, frozen=True):
    """An island's deltas are `factor` times too long, and so are the learning rates
    that it says it has, for a while or until its process ends.
    """

    island: str
    for_s: float
    factor: float

    def strike(self, world: FaultyWorld) -> bool:
        island = world.islands[self.island]
        if island.ended is not None:
            return False
        _set_for(world, self.for_s, island.body, "lie", self.factor, 1.0)
        _set_for(world, self.for_s, island, "boasted_rates", self.factor, 1.0)
        return world.begun(self, self.for_s)


# ---- the coordinator and its disk ---------------------------------------------------


class CoordinatorCrash(DrawnFault, frozen=True):
    """The coordinator dies in the middle of its effects.

    effects: effects that it still carries out.
    """

    restart: Restart
    effects: int = 0

    def strike(self, world: FaultyWorld) -> bool:
        return world.crash_after(self, self.restart, self.effects)


class DiskFailure(DrawnFault, frozen=True):
    """An append fails, and the coordinator's process ends.

    appends: appends that still succeed.
    written: the record is on the disk all the same.
    """

    restart: Restart
    appends: int = 0
    written: bool = False

    def strike(self, world: FaultyWorld) -> bool:
        written_share = float(self.written)
        return world.fail_append(self, self.restart, self.appends, written_share)


class TornWrite(DrawnFault, frozen=True):
    """An append fails, and a part of the record is on the disk.

    appends: appends that still succeed.
    """

    restart: Restart
    appends: int = 0
    written_share: float = 0.5

    def strike(self, world: FaultyWorld) -> bool:
        return world.fail_append(self, self.restart, self.appends, self.written_share)


class SnapshotFailure(DrawnFault, frozen=True):
    """The next snapshot is not completed."""

    def strike(self, world: FaultyWorld) -> bool:
        world.snapshots.fail(self)
        return True


class FullDisk(DrawnFault, frozen=True):
    """The disk has room for small records only, for a while. brimful: not even for
    these."""

    for_s: float
    brimful: bool = False

    def strike(self, world: FaultyWorld) -> bool:
        world.fill_disk(self.for_s, brimful=self.brimful)
        return world.begun(self, self.for_s)


class DiskGone(DrawnFault, frozen=True):
    """The coordinator dies, and finds an empty disk for the next `gone_s` seconds.

    If that takes long, a new term begins on the empty disk, and the old disk is useless
    when it comes back.
    """

    restart: Restart
    gone_s: float

    def strike(self, world: FaultyWorld) -> bool:
        if world.coordinator is None:
            return False
        world.disk.empty = True
        world.clock.after(self.gone_s, lambda: self._back(world))
        world.crash_coordinator(world.coordinator, self.restart)
        gathers_s = self.restart.down_s + world.new_term_within_s
        return world.begun(self, max(self.gone_s, gathers_s))

    def _back(self, world: FaultyWorld) -> None:
        world.disk.empty = False


class DiskLost(DrawnFault, frozen=True):
    """The coordinator dies, and its disk is lost for good."""

    restart: Restart

    def strike(self, world: FaultyWorld) -> bool:
        if world.coordinator is None:
            return False
        world.disk.empty = True
        world.crash_coordinator(world.coordinator, self.restart)
        return world.begun(self, self.restart.down_s + world.new_term_within_s)


# ---- the network ------------------------------------------------------------------


class Break(DrawnFault, frozen=True):
    """A connection breaks.

    lingers: messages under way still arrive; otherwise they are lost.
    noticed: the coordinator sees the break; otherwise it sees only silence.
    """

    island: str
    away_s: float
    noticed: bool = True
    lingers: bool = False

    def strike(self, world: FaultyWorld) -> bool:
        return world.break_connection(
            self.island, self.away_s, noticed=self.noticed, lingers=self.lingers
        ) and world.begun(self, self.away_s)


class Partition(DrawnFault, frozen=True):
    """Nothing comes through in these directions, and neither end is told.

    Messages wait, and are lost if an end gives the connection up for its silence.
    """

    island: str
    for_s: float
    ways: tuple[Way, ...] = ("up", "down")

    def strike(self, world: FaultyWorld) -> bool:
        world.hold(self.island, self.ways, self.for_s)
        return world.begun(self, self.for_s)


class Repeat(DrawnFault, frozen=True):
    """Messages and transfers arrive a second time, `after_s` later."""

    island: str
    for_s: float
    after_s: float

    def strike(self, world: FaultyWorld) -> bool:
        network = world.networks[self.island]
        _set_for(world, self.for_s, network, "repeat_after_s", self.after_s, 0.0)
        return world.begun(self, self.for_s + self.after_s)


class Delay(DrawnFault, frozen=True):
    """Everything of one channel arrives `late_s` later: bulk and control overtake each
    other."""

    island: str
    for_s: float
    late_s: float
    channel: Literal["control", "bulk"] = "control"

    def strike(self, world: FaultyWorld) -> bool:
        network, field = world.networks[self.island], f"{self.channel}_late_s"
        _set_for(world, self.for_s, network, field, self.late_s, 0.0)
        return world.begun(self, self.for_s + self.late_s)


class Corruption(DrawnFault, frozen=True):
    """Bulk bytes are damaged on the way, and sent again."""

    island: str
    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        network = world.networks[self.island]
        _set_for(world, self.for_s, network, "corrupts", True, False)
        return world.begun(self, self.for_s)


AnyFault = (
    IslandCrash
    | JoinCrash
    | Leave
    | Replacement
    | Impostor
    | StepJump
    | Unfit
    | LongDeltas
    | AnyOrder
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
    | AnyClockFault
    | Break
    | Partition
    | Repeat
    | Delay
    | Corruption
)
