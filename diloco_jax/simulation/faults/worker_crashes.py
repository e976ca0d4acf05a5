"""Faults of the coordinator's workers: one that dies or is not reached ends the lead,
which starts again with all of them; and one may lose its disk."""

from __future__ import annotations

import functools
from collections.abc import Callable

from diloco_jax.protocol.coordinator import workers
from diloco_jax.protocol.coordinator.events import FragmentsLost
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.scene import Scene
from diloco_jax.simulation.faults.schedule import Restart, WorkerCrash

AGAIN_S = 0.5
"""Seconds between two looks whether a lost fragment can be gathered."""


class WorkerCrashes:
    """The faults of workers in one world; one crash is armed at a time."""

    def __init__(
        self,
        world: Scene,
        gathered_within_s: float,
        crash: Callable[[FaultyCoordinator, Restart], None],
    ) -> None:
        """gathered_within_s: from a start to the anchors of what a worker lost. crash:
        ends a lead."""
        self._world, self._gathered_within_s = world, gathered_within_s
        self._crash = crash
        self._armed: WorkerCrash | None = None
        self._effects_left = 0

    def lead_is_up(self, coordinator: FaultyCoordinator) -> None:
        """Tell a lead which has just come up what its workers have lost."""
        for worker in range(self._world.config.workers):
            lost = coordinator.lost_fragments & set(self.fragments_of(worker))
            if lost:
                own = tuple(sorted(lost))
                coordinator.monitor.worker_died(own)
                coordinator.monitor.worker_away(own)
                coordinator.hear(FragmentsLost(worker=worker, fragments=own))
        self.look(coordinator)

    def arm(self, fault: WorkerCrash) -> bool:
        """Arm a crash after `fault.effects` more effects of the lead."""
        if self._armed is not None or self._world.coordinator is None:
            return False
        self._armed, self._effects_left = fault, fault.effects
        return True

    def strike_if_due(self, coordinator: FaultyCoordinator) -> None:
        """Count an effect of the lead; let the armed crash happen if it is due."""
        world, fault = self._world, self._armed
        if fault is None or coordinator is not world.coordinator:
            return
        self._effects_left -= 1
        if self._effects_left >= 0:
            return
        self._armed = None
        fragments = self.fragments_of(fault.worker)
        lasts_s = fault.noticed_s + fault.down_s
        if not coordinator.dead_fragments.issuperset(fragments):
            if fault.disk_lost:
                coordinator.disk.lose(fragments)
                lasts_s += self._gathered_within_s
            coordinator.lose(fragments)
            coordinator.monitor.worker_died(fragments)
            self._end_unit(coordinator, fault.noticed_s, fault.down_s)
        world.begun(fault, lasts_s)

    def _end_unit(
        self, coordinator: FaultyCoordinator, noticed_s: float, down_s: float
    ) -> None:
        """End a lead once it notices that a worker is gone."""
        world = self._world

        def notice() -> None:
            if world.coordinator is coordinator and not coordinator.dead:
                restart = Restart(down_s=down_s, clock_s=world.clock.now)
                self._crash(coordinator, restart)

        world.clock.after(noticed_s, lambda: coordinator.when_awake(notice))

    def fragments_of(self, worker: int) -> list[int]:
        """Return the fragments of a worker."""
        config = self._world.config
        dealt = workers.deal(config.fragment_sizes, config.workers)
        return [f for f, of in enumerate(dealt) if of == worker % config.workers]

    def look(self, coordinator: FaultyCoordinator) -> None:
        """Look now and then whether some process has an anchor of each lost fragment
        that counts. If none has, the run is lost, unless that disk comes back."""
        world, lost = self._world, sorted(coordinator.lost_fragments)
        if coordinator.dead or not lost:
            return
        for fragment in lost:
            state = coordinator.state.fragments[fragment]
            known = {merged.version for merged in state.newest}
            if any(
                island.ended is None
                and island.boundary is not None
                and island.body.anchor(fragment).version in known
                for island in world.islands.values()
            ):
                continue
            coordinator.disk.bring_back(fragment, state.version)
            self._end_unit(coordinator, 0.0, AGAIN_S)
            return  # The next start looks again.
        world.clock.after(AGAIN_S, functools.partial(self.look, coordinator))
