"""A world of faults whose coordinator has workers on other machines.

Workers outlive the lead. The next one dials them, and they go on with it: each obeys
the lead with the largest number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.holding import Obeyed, first_number, next_number
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.apart_coordinator import ApartCoordinator
from diloco_jax.simulation.faults.apart_lead import Leading
from diloco_jax.simulation.faults.apart_line import WORKERS_SILENCE_S, WorkerNetwork
from diloco_jax.simulation.faults.apart_worker import ApartWorker
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.fault import Restart
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.island import FaultyIsland
from diloco_jax.simulation.faults.links import Peer
from diloco_jax.simulation.faults.network import FaultyLine
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    RESTART_S,
    RETRY_S,
    Schedule,
)
from diloco_jax.simulation.faults.snapshots import ROUND_S, SnapshotRounds
from diloco_jax.simulation.faults.worker_crashes import (
    WorkerCrashes,
    WorkerPartition,
)
from diloco_jax.simulation.faults.world import FaultyWorld

UNIX_S = 1.7e9
"""Time of day as a run begins, by the first machine of the lead."""
BEHIND_S = 1e6
"""Seconds by which clocks are behind in each next term. Those of one term agree: if
islands never heard of it, the same is opened again, and later counts."""


class LeadDisk(Disk):
    """Log and snapshots of the state. Fragments are here until workers have them."""

    def files(self) -> dict[int, Anchor]:
        """Return the anchors that are here, by fragment; the newest of each."""
        return {
            fragment: anchor
            for fragment, saved in enumerate(self._anchors)
            if saved and (anchor := saved[max(saved)]) is not None
        }

    def hand_over(self) -> None:
        """Delete all files of fragments, which workers have by now."""
        for saved in self._anchors:
            saved.clear()


class ApartWorld(FaultyWorld):
    """World with a machine for the lead, and one for each worker."""

    disk: LeadDisk

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.disk = LeadDisk()
        count, sizes = self.config.workers, self.config.fragment_sizes
        self._dealt = deal(sizes, count)
        self.workers = [
            ApartWorker(self, number, self._fragments_of(number))
            for number in range(count)
        ]
        self.networks_of_workers = [
            WorkerNetwork(self.clock, schedule.latency_s) for _ in range(count)
        ]
        self.leading: Leading | None = None
        """The lead's side of its workers, from its first dial to its end."""
        self._last_lead = 0
        """Number of the last lead; on its disk."""

    def _crashes_of_workers(self) -> WorkerCrashes:
        return ApartCrashes(self, liveness.gathered_within_s(self.schedule))

    def _rounds_of_snapshots(self) -> SnapshotRounds:
        return ApartRounds(self)

    def _fragments_of(self, number: int) -> tuple[int, ...]:
        return tuple(f for f, of in enumerate(self._dealt) if of == number)

    def worker_of(self, fragment: int) -> ApartWorker:
        """Return the worker that has a fragment."""
        return self.workers[self._dealt[fragment]]

    # ---- the lead -------------------------------------------------------------------

    def _go_on(self, state: State, clock_s: float) -> None:
        """Have the workers go on before anything is served."""
        then = functools.partial(self._lead, state, clock_s)
        self._bring_up(state, self.disk.files(), then)

    def _gathered(self, opened: Opened | None) -> None:
        """See FaultyWorld. Workers have a new term before it counts."""
        if opened is None:
            self._find_again()
            super()._gathered(opened)
            return
        self.gatherer = None
        for island in self.processes:
            self.lose_connection(island, 0.0)
        then = functools.partial(self._open, opened)
        self._bring_up(opened.state, dict(enumerate(opened.anchors)), then)

    def _open(self, opened: Opened) -> None:
        self.disk.begin(opened.state, opened.anchors)
        self.monitor.opened(opened)
        clock_s = self.clock.now
        self._lead(self._recovered(self.disk, clock_s), clock_s)

    def _find_again(self) -> None:
        """Do what a person does for a lost run whose disk comes back: remove what the
        workers know of the leads before."""
        for worker in self.workers:
            worker.obeyed = Obeyed()

    def _bring_up(
        self, state: State, files: Mapping[int, Anchor], then: Callable[[], None]
    ) -> None:
        """Dial all workers. files: anchors of the beginning of a run or a term."""
        unix_s = UNIX_S - BEHIND_S * state.term + self.clock.now
        at_least = first_number(state.term, unix_s)
        self._last_lead = next_number(self._last_lead, at_least)
        self.leading = Leading(self, self._last_lead, then)
        self.leading.begin(state, files)

    def _lead(self, state: State, clock_s: float) -> None:
        """Let a coordinator go on, with workers that have answered."""
        leading = self.leading
        assert leading is not None
        self.disk.hand_over()
        self.monitor.recovered(state)
        for fragment, anchor in leading.restored():
            self.monitor.restored(fragment, anchor)
            self.monitor.published(fragment, anchor)
        offset_s = clock_s - self.clock.now
        coordinator = ApartCoordinator(self, leading, state, offset_s)
        self.coordinator = coordinator
        for worker in self.workers:
            if worker.process is None:
                self.monitor.worker_died(worker.fragments)
            else:
                for key in worker.process.deltas:
                    self.monitor.arrived(key)
        leading.serve(coordinator)
        self._serve(coordinator)

    def leave_workers(self, *, in_order: bool) -> None:
        """Hang up on all workers. in_order: the process ends by itself, and so do
        they."""
        leading, self.leading = self.leading, None
        if leading is not None:
            leading.end(in_order=in_order)

    def lead_fails(self) -> None:
        """End a lead that cannot go on with its workers; it starts again."""
        dead, clock_s = self.coordinator, self.clock.now
        self.leave_workers(in_order=True)
        if dead is None:
            start = functools.partial(self._start_coordinator, clock_s)
            self.clock.after(RESTART_S, start)
        else:
            dead.die()
            self._went_down(dead, Restart(down_s=RESTART_S, clock_s=clock_s))

    def _start_again_after(self, seconds: float, last: FaultyCoordinator) -> None:
        self.leave_workers(in_order=True)
        super()._start_again_after(seconds, last)

    def crash_coordinator(self, dying: FaultyCoordinator, restart: Restart) -> None:
        """See FaultyWorld. Without its disk, it starts again on another machine."""
        if self.disk.empty:
            self._last_lead = 0
        super().crash_coordinator(dying, restart)

    def lead_sleeps(self, lead: ApartCoordinator, for_s: float) -> None:
        """Have islands and workers leave a lead that is silent for too long."""

        def leave() -> None:
            if lead.stopped and self.coordinator is lead:
                for island in self.processes:
                    self.lose_connection(island, 0.0)

        def part() -> None:
            if lead.stopped and self.coordinator is lead:
                for network in self.networks_of_workers:
                    if network.line is not None:
                        network.line.leave()

        if for_s >= LEASE_S:
            self.clock.after(LEASE_S, leave)
        if for_s >= WORKERS_SILENCE_S:
            self.clock.after(WORKERS_SILENCE_S, part)

    @property
    def new_term_within_s(self) -> float:
        """See FaultyWorld; workers have the term first."""
        brought_up_s = liveness.brought_up_within_s(self.schedule)
        return super().new_term_within_s + brought_up_s

    # ---- disks and network ----------------------------------------------------------

    def fill_disk(self, for_s: float, *, brimful: bool) -> None:
        """See FaultyWorld: the lead's disk, or those of all workers."""
        disks: list[Disk] = [self.disk]
        if not brimful:
            disks = [worker.disk for worker in self.workers]
        for disk in disks:
            self.fill(disk, for_s, brimful=brimful)

    def _peer_for(self, island: FaultyIsland) -> Peer | None:
        lead = self.coordinator
        if isinstance(lead, ApartCoordinator) and lead.stopped:
            return None
        return super()._peer_for(island)


class ApartCrashes(WorkerCrashes):
    """The faults of workers on other machines."""

    _world: ApartWorld

    def lead_dies(self, coordinator: FaultyCoordinator, restart: Restart) -> None:
        """End a lead: what islands send to workers arrives all the same."""
        coordinator.die()
        self._world.leave_workers(in_order=False)
        for island in self._world.processes:
            if isinstance(island.line, FaultyLine):
                island.line.linger()

    def lead_is_up(self, coordinator: FaultyCoordinator) -> None:
        """Look after what its workers have lost."""
        self.look(coordinator)

    def part(self, fault: WorkerPartition) -> bool:
        """Part a worker from its lead."""
        world = self._world
        network = world.networks_of_workers[fault.worker % len(world.workers)]
        if world.coordinator is None or network.parted:
            return False
        network.cut(fault.for_s)
        # A worker that lost its line in it is dialled again, and serves.
        return world.begun(fault, fault.for_s + LEASE_S + 4 * RETRY_S)

    def _worker(self, number: int) -> ApartWorker:
        return self._world.workers[number % len(self._world.workers)]

    def _is_dead(self, coordinator: FaultyCoordinator, worker: int) -> bool:
        one = self._worker(worker)
        return one.process is None or not one.fragments

    def _disk_of(self, coordinator: FaultyCoordinator, worker: int) -> Disk:
        return self._worker(worker).disk

    def _lost(self, coordinator: FaultyCoordinator) -> list[int]:
        processes = [worker.process for worker in self._world.workers]
        return sorted(f for p in processes if p is not None for f in p.lost)

    def _crash(
        self,
        coordinator: FaultyCoordinator,
        worker: int,
        noticed_s: float,
        down_s: float,
    ) -> None:
        self._world.crashes += 1
        self._worker(worker).crash(noticed_s, down_s)


class ApartRounds(SnapshotRounds):
    """Workers write the snapshots of fragments, the lead those of the state."""

    _world: ApartWorld

    def _write(self, fragment: int) -> None:
        world, count = self._world, self._world.config.fragments
        self._later((fragment + 1) % count)
        self._write_fragment(fragment)
        coordinator, disk = world.coordinator, world.disk
        if fragment < count - 1 or coordinator is None or coordinator.waits:
            return
        number, state = disk.rotate(), coordinator.state
        if self._failures:
            world.begun(self._failures.pop(), 0.0)
            return

        def complete() -> None:
            if world.coordinator is coordinator:
                disk.save_state(number, state)

        world.clock.after(ROUND_S / count, complete)

    def _write_fragment(self, fragment: int) -> None:
        world, worker = self._world, self._world.worker_of(fragment)
        process, disk = worker.process, worker.disk
        if process is None or process.dead or fragment in process.lost:
            return
        anchor = process.anchors.anchors[fragment]

        def complete() -> None:
            same_term = process.anchors.anchors[fragment].version.term
            if process.dead or fragment in process.lost:
                return
            if anchor.version.term != same_term:
                return
            if not disk.save_fragment(fragment, anchor):
                return
            line, coordinator = worker.line, world.coordinator
            if coordinator is None or line is None or not line.is_of(coordinator):
                return  # What is committed is not known.
            saved, publishes = disk.saved(fragment), disk.published(fragment)
            world.monitor.cut(fragment, saved, publishes)

        world.clock.after(ROUND_S / world.config.fragments, complete)
