"""Faults of the coordinator's clock: it jumps, or stands still."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.simulation.faults.fault import DrawnFault

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.stoppable import StoppableCoordinator
    from diloco_jax.simulation.faults.world import FaultyWorld


class ClockJump(DrawnFault, frozen=True):
    """The coordinator's clock jumps forward, as one that counts its sleep. at_end: once
    the run has its tokens."""

    forward_s: float
    at_end: bool = False

    @property
    def awaits_end(self) -> bool:
        return self.at_end

    def strike(self, world: FaultyWorld) -> bool:
        lead = world.coordinator
        if lead is None or (self.at_end and lead.state.phase == "running"):
            return False
        lead.clock_offset += self.forward_s
        lead.hear(Timer())
        return world.begun(self, 0.0)


class MachineSleep(DrawnFault, frozen=True):
    """The coordinator's machine sleeps, as a virtual one that is moved: nothing reaches
    it, and its clock stands still. Islands go on. at_end: once the run has its tokens.
    """

    for_s: float
    at_end: bool = False

    @property
    def awaits_end(self) -> bool:
        return self.at_end

    def strike(self, world: FaultyWorld) -> bool:
        lead = cast("StoppableCoordinator | None", world.coordinator)
        if lead is None or lead.stopped:
            return False
        if self.at_end and lead.state.phase == "running":
            return False
        lead.sleep(self.for_s)
        return world.begun(self, self.for_s)


AnyClockFault = ClockJump | MachineSleep
