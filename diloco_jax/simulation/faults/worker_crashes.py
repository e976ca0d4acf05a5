"""Crashes of the coordinator's workers, in a world of faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.protocol.coordinator import workers
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.simulation.faults.fault import DrawnFault

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld

AGAIN_S = 0.5
"""Seconds between two looks whether the lead hears again."""


class WorkerCrash(DrawnFault, frozen=True):
    """A worker dies in the middle of the lead's effects, and comes back.

    effects: effects that the lead still carries out. noticed_s: seconds until the lead
    notices. down_s: seconds from then to the worker's return.
    """

    worker: int
    down_s: float
    noticed_s: float = 0.0
    effects: int = 0

    def strike(self, world: FaultyWorld) -> bool:
        return world.worker_crashes.arm(self)


class WorkerCrashes:
    """The crashes of workers in one world; one is armed at a time."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        self._armed: WorkerCrash | None = None
        self._effects_left = 0

    def arm(self, fault: WorkerCrash) -> bool:
        """Arm a crash after `fault.effects` more effects of the lead."""
        if self._armed is not None or self._world.coordinator is None:
            return False
        self._armed, self._effects_left = fault, fault.effects
        return True

    def strike_if_due(self) -> None:
        """Count an effect of the lead; let the armed crash happen if it is due."""
        fault = self._armed
        if fault is None:
            return
        self._effects_left -= 1
        if self._effects_left < 0:
            self._armed = None
            self._crash(fault)
            self._world.begun(fault, fault.noticed_s + fault.down_s)

    def _crash(self, fault: WorkerCrash) -> None:
        """Kill a worker. The lead notices later, and it comes back after that."""
        world = self._world
        coordinator, config = world.coordinator, world.config
        worker = fault.worker % config.workers
        dealt = workers.deal(config.fragment_sizes, config.workers)
        fragments = [f for f, of in enumerate(dealt) if of == worker]
        assert coordinator is not None
        if coordinator.dead_fragments.issuperset(fragments):
            return  # It is dead already, or has no fragment.
        world.crashes += 1
        coordinator.lose(fragments)
        world.monitor.worker_died(fragments)
        anchors = coordinator.anchors

        def notice() -> None:
            if not coordinator.dead:
                world.monitor.worker_away(fragments)
                coordinator.hear(WorkerAway(worker=worker))

        def restore() -> None:
            if coordinator.dead:
                return
            if coordinator.waits:  # The lead hears nothing of it meanwhile.
                world.clock.after(AGAIN_S, restore)
                return
            for fragment in fragments:
                committed = coordinator.state.fragments[fragment].version
                world.disk.restore_fragment(anchors, fragment, committed)
                world.monitor.restored(fragment, anchors.anchors[fragment])
                world.monitor.published(fragment, anchors.anchors[fragment])
            coordinator.dead_fragments -= set(fragments)
            world.monitor.worker_back(fragments)
            coordinator.hear(WorkerBack(worker=worker))

        world.clock.after(fault.noticed_s, notice)
        world.clock.after(fault.noticed_s + fault.down_s, restore)
