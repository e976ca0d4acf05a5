"""What can go wrong: each kind with its data and with what it does to a world.

A fault strikes at `at_s`, or as soon after it as there is something to strike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.simulation.faults.fault import DrawnFault, Restart
from diloco_jax.simulation.faults.network import Way

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld


# ---- islands ----------------------------------------------------------------------


class IslandCrash(DrawnFault, frozen=True):
    """An island's process dies and starts again.

    noticed: the coordinator sees the connection break; otherwise only its lease ends.
    lingers: what it had sent still arrives.
    """

    island: str
    down_s: float
    noticed: bool = True
    lingers: bool = False

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        return world.crash_island(
            self.island, self.down_s, noticed=self.noticed, lingers=self.lingers
        ) and world.begun(self, self.down_s)


class JoinCrash(DrawnFault, frozen=True):
    """It dies, starts again, and dies again `joining_s` into its join."""

    island: str
    down_s: float
    joining_s: float

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        if not world.crash_island(self.island, self.down_s):
            return False
        again_s = self.down_s + self.joining_s
        world.clock.after(again_s, lambda: self._again(world))
        return world.begun(self, again_s + self.down_s)

    def _again(self, world: FaultyWorld) -> None:
        world.crash_island(self.island, self.down_s)


class Leave(DrawnFault, frozen=True):
    """It says goodbye, and comes back as another incarnation. notice_s: it is about to
    for so long at most, and asked for what is open of it."""

    island: str
    away_s: float
    notice_s: float = 0.0

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
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
    """The next incarnation starts while this one, now stale, goes on."""

    island: str

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        if world.islands[self.island].ended is not None:
            return False
        world.start_island(self.island)
        return world.begun(self, 0.0)


class Impostor(DrawnFault, frozen=True):
    """A second process says hello under an incarnation of before (`behind` of them)
    or, 0, of now."""

    island: str
    behind: int = 0

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        island = world.islands[self.island]
        if island.ended is not None:
            return False
        impostor = world.make_island(self.island, island.incarnation - self.behind)
        impostor.session += ".impostor"
        world.connect(impostor)
        return world.begun(self, 0.0)


class StepJump(DrawnFault, frozen=True):
    """Its steps take `factor` times as long for a while."""

    island: str
    for_s: float
    factor: float

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        world.slowness[self.island] = self.factor
        world.clock.after(self.for_s, lambda: self._end(world))
        # A step that began meanwhile takes as long as it takes.
        step_s = self.factor * world.schedule.islands[self.island].step_s
        return world.begun(self, self.for_s + step_s)

    def _end(self, world: FaultyWorld) -> None:
        world.slowness[self.island] = 1.0


class Unfit(DrawnFault, frozen=True):
    """Its next delta is not finite."""

    island: str

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        island = world.islands[self.island]
        if island.ended is not None:
            return False
        island.body.finite = False
        return world.begun(self, 0.0)


# ---- the coordinator and its disk ---------------------------------------------------


class CoordinatorCrash(DrawnFault, frozen=True):
    """It dies before its next but `effects` effect is carried out."""

    restart: Restart
    effects: int = 0

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        return world.crash_after(self, self.restart, self.effects)


class DiskFailure(DrawnFault, frozen=True):
    """The next but `appends` append fails, and the process ends.

    written: whether the record is on the disk all the same.
    """

    restart: Restart
    appends: int = 0
    written: bool = False

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        written_share = float(self.written)
        return world.fail_append(self, self.restart, self.appends, written_share)


class TornWrite(DrawnFault, frozen=True):
    """Likewise, and a part of the record is on the disk."""

    restart: Restart
    appends: int = 0
    written_share: float = 0.5

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        return world.fail_append(self, self.restart, self.appends, self.written_share)


class SnapshotFailure(DrawnFault, frozen=True):
    """The next snapshot does not get complete."""

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        world.fail_snapshot(self)
        return True


class DiskGone(DrawnFault, frozen=True):
    """The coordinator dies, and finds an empty disk for the next `gone_s`: if that is
    long, a new term is begun on it, and what comes back is of no use."""

    restart: Restart
    gone_s: float

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        if world.coordinator is None:
            return False
        world.disk.empty = True
        world.clock.after(self.gone_s, lambda: self._back(world))
        world.crash_coordinator(self.restart)
        gathers_s = self.restart.down_s + world.new_term_within_s
        return world.begun(self, max(self.gone_s, gathers_s))

    def _back(self, world: FaultyWorld) -> None:
        world.disk.empty = False


class DiskLost(DrawnFault, frozen=True):
    """The coordinator dies, and its disk is gone for good."""

    restart: Restart

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        if world.coordinator is None:
            return False
        world.disk.empty = True
        world.crash_coordinator(self.restart)
        return world.begun(self, self.restart.down_s + world.new_term_within_s)


class ClockJump(DrawnFault, frozen=True):
    """The coordinator's clock jumps forward, as on a machine that slept."""

    forward_s: float

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        if world.coordinator is None:
            return False
        world.coordinator.clock_offset += self.forward_s
        world.coordinator.hear(Timer())
        return world.begun(self, 0.0)


# ---- the network ------------------------------------------------------------------


class Break(DrawnFault, frozen=True):
    """A connection breaks: what is under way is lost, or still arrives (`lingers`).
    The coordinator sees it (`noticed`), or only that nothing comes."""

    island: str
    away_s: float
    noticed: bool = True
    lingers: bool = False

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        return world.break_connection(
            self.island, self.away_s, noticed=self.noticed, lingers=self.lingers
        ) and world.begun(self, self.away_s)


class Partition(DrawnFault, frozen=True):
    """Nothing comes through in these directions; nobody is told. What was sent waits,
    and is lost if the connection is given up for its silence."""

    island: str
    for_s: float
    ways: tuple[Way, ...] = ("up", "down")

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        world.hold(self.island, self.ways, self.for_s)
        return world.begun(self, self.for_s)


class Repeat(DrawnFault, frozen=True):
    """Messages and transfers arrive a second time, `after_s` later."""

    island: str
    for_s: float
    after_s: float

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        world.networks[self.island].repeat_after_s = self.after_s
        world.clock.after(self.for_s, lambda: self._end(world))
        return world.begun(self, self.for_s + self.after_s)

    def _end(self, world: FaultyWorld) -> None:
        world.networks[self.island].repeat_after_s = 0.0


class Delay(DrawnFault, frozen=True):
    """Everything of one channel arrives so much later: bulk and control overtake each
    other."""

    island: str
    for_s: float
    late_s: float
    channel: Literal["control", "bulk"] = "control"

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        self._be_late(world, self.late_s)
        world.clock.after(self.for_s, lambda: self._be_late(world, 0.0))
        return world.begun(self, self.for_s + self.late_s)

    def _be_late(self, world: FaultyWorld, late_s: float) -> None:
        network = world.networks[self.island]
        if self.channel == "bulk":
            network.bulk_late_s = late_s
        else:
            network.control_late_s = late_s


class Corruption(DrawnFault, frozen=True):
    """Bulk bytes are damaged on the way, and sent again."""

    island: str
    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        """See Fault."""
        world.networks[self.island].corrupts = True
        world.clock.after(self.for_s, lambda: self._end(world))
        return world.begun(self, self.for_s)

    def _end(self, world: FaultyWorld) -> None:
        world.networks[self.island].corrupts = False


AnyFault = (
    IslandCrash
    | JoinCrash
    | Leave
    | Replacement
    | Impostor
    | StepJump
    | Unfit
    | CoordinatorCrash
    | DiskFailure
    | TornWrite
    | SnapshotFailure
    | DiskGone
    | DiskLost
    | ClockJump
    | Break
    | Partition
    | Repeat
    | Delay
    | Corruption
)
