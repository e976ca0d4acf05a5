"""Faults of the coordinator's workers: crashes, lost disks, and partitions between a
worker and its lead."""

from __future__ import annotations

import functools

from diloco_jax.protocol.coordinator import workers
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.network import FaultyLine
from diloco_jax.simulation.faults.scene import Scene
from diloco_jax.simulation.faults.schedule import Restart, WorkerCrash, WorkerPartition

AGAIN_S = 0.5
"""Seconds between two looks whether the lead hears again, or whether a lost fragment
can be gathered."""
SILENT_LEASES = 2
"""Leases without a word of the lead after which a worker ends."""


class WorkerCrashes:
    """The faults of workers in one world; one crash is armed at a time."""

    def __init__(self, world: Scene, gathered_within_s: float) -> None:
        """gathered_within_s: from a worker's return to the anchors of what it lost."""
        self._world, self._gathered_within_s = world, gathered_within_s
        self._armed: WorkerCrash | None = None
        self._effects_left = 0
        self._outlived: FaultyCoordinator | None = None
        """The lead that died last, if its workers live."""

    def lead_dies(self, coordinator: FaultyCoordinator, restart: Restart) -> None:
        """End a lead. If its workers outlive it, what islands send them arrives."""
        world = self._world
        coordinator.die()
        lives = restart.workers_live and not restart.power_cut
        self._outlived = coordinator if lives and world.config.workers > 1 else None
        if self._outlived is not None:
            for island in world.processes:
                if isinstance(island.line, FaultyLine):
                    island.line.linger()

    def lead_is_up(self, coordinator: FaultyCoordinator) -> None:
        """Tell a lead which has just come up what its workers have lost, and which
        deltas those have that outlived the lead before."""
        self._tell_lost(coordinator)
        before, self._outlived = self._outlived, None
        # With another term its disk was lost, and theirs with it.
        if before is not None and before.state.term == coordinator.state.term:
            before.leave_deltas_to(coordinator)

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
        if not self._is_dead(coordinator, fault.worker):
            if fault.disk_lost:
                self._disk_of(coordinator, fault.worker).lose(fragments)
                lasts_s += self._gathered_within_s
            self._crash(coordinator, fault.worker, fault.noticed_s, fault.down_s)
        world.begun(fault, lasts_s)

    def part(self, fault: WorkerPartition) -> bool:
        """Let the messages between a worker and its lead wait."""
        world, coordinator = self._world, self._world.coordinator
        if coordinator is None or coordinator.waits:
            return False
        fragments = self.fragments_of(fault.worker)
        if not fragments:  # It holds none, and nobody speaks to it.
            return world.begun(fault, fault.for_s)
        if coordinator.parted or self._is_dead(coordinator, fault.worker):
            return False
        coordinator.parted = set(fragments)

        def heal() -> None:
            if not coordinator.dead:
                coordinator.heal()

        def end() -> None:
            if not coordinator.dead and coordinator.parted == set(fragments):
                self._crash(coordinator, fault.worker, lease_s, fault.down_s)

        lasts_s, lease_s = fault.for_s, world.config.lease_s
        silence_s = SILENT_LEASES * lease_s
        if fault.for_s <= silence_s:
            world.clock.after(fault.for_s, heal)
        else:
            world.clock.after(silence_s, end)
            lasts_s = silence_s + lease_s + fault.down_s
        return world.begun(fault, lasts_s)

    def fragments_of(self, worker: int) -> list[int]:
        """Return the fragments of a worker."""
        config = self._world.config
        dealt = workers.deal(config.fragment_sizes, config.workers)
        return [f for f, of in enumerate(dealt) if of == worker % config.workers]

    def _is_dead(self, coordinator: FaultyCoordinator, worker: int) -> bool:
        """Tell whether a worker is dead, or holds no fragment."""
        return coordinator.dead_fragments.issuperset(self.fragments_of(worker))

    def _disk_of(self, coordinator: FaultyCoordinator, worker: int) -> Disk:
        """Return the disk that a worker writes."""
        return coordinator.disk

    def _lost(self, coordinator: FaultyCoordinator) -> list[int]:
        """Return the fragments that workers have lost, as far as they live."""
        return sorted(coordinator.lost_fragments)

    def _tell_lost(self, coordinator: FaultyCoordinator) -> None:
        world = self._world
        for worker in range(world.config.workers):
            lost = coordinator.lost_fragments & set(self.fragments_of(worker))
            if lost:
                coordinator.monitor.worker_died(sorted(lost))
                coordinator.monitor.worker_away(sorted(lost))
                coordinator.hear(WorkerBack(worker=worker, lost=tuple(sorted(lost))))
        self.look(coordinator)

    def _crash(
        self,
        coordinator: FaultyCoordinator,
        worker: int,
        noticed_s: float,
        down_s: float,
    ) -> None:
        """Kill a worker. The lead notices later, and it comes back after that."""
        world, fragments = self._world, self.fragments_of(worker)
        worker %= world.config.workers
        world.crashes += 1
        coordinator.lose(fragments)
        coordinator.monitor.worker_died(fragments)

        def notice() -> None:
            if not coordinator.dead:
                coordinator.forget_line(fragments)
                coordinator.monitor.worker_away(fragments)
                coordinator.hear(WorkerAway(worker=worker))

        def restore() -> None:
            if coordinator.dead:
                return
            if coordinator.waits:  # The lead hears nothing of it meanwhile.
                world.clock.after(AGAIN_S, restore)
                return
            self._restore(coordinator, worker)

        world.clock.after(noticed_s, lambda: coordinator.when_awake(notice))
        world.clock.after(noticed_s + down_s, restore)

    def _restore(self, coordinator: FaultyCoordinator, worker: int) -> None:
        """Let a worker come back with what is on its disk."""
        fragments, monitor = self.fragments_of(worker), coordinator.monitor
        anchors, lost = coordinator.anchors, []
        for fragment in fragments:
            committed = coordinator.state.fragments[fragment].version
            if not coordinator.disk.restore_fragment(anchors, fragment, committed):
                lost.append(fragment)
                continue
            monitor.restored(fragment, anchors.anchors[fragment])
            monitor.published(fragment, anchors.anchors[fragment])
        coordinator.dead_fragments -= set(fragments)
        coordinator.lost_fragments -= set(fragments)
        coordinator.lost_fragments |= set(lost)
        monitor.worker_back([f for f in fragments if f not in lost])
        coordinator.hear(WorkerBack(worker=worker, lost=tuple(lost)))
        self.look(coordinator)

    def look(self, coordinator: FaultyCoordinator) -> None:
        """Look now and then whether some process has an anchor of each lost fragment
        that counts. If none has, the run is lost, unless that disk comes back."""
        world = self._world
        lost = self._lost(coordinator)
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
            worker = next(
                w
                for w in range(world.config.workers)
                if fragment in self.fragments_of(w)
            )
            disk = self._disk_of(coordinator, worker)
            disk.bring_back(fragment, state.version)
            if not self._is_dead(coordinator, worker):
                self._crash(coordinator, worker, 0.0, AGAIN_S)
                return  # Its return looks again.
        world.clock.after(AGAIN_S, functools.partial(self.look, coordinator))
