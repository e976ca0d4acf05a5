"""A world of faults whose coordinator has a standby, and workers on other machines.

Workers outlive whoever leads. The next lead dials them, and they go on with it: each
obeys the lead with the largest number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.holding import may_replace_snapshots
from diloco_jax.protocol.outposts import (
    Obeyed,
    first_number,
    next_number,
    reign_of,
)
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.apart_coordinator import ApartCoordinator
from diloco_jax.simulation.faults.apart_lead import Leading
from diloco_jax.simulation.faults.apart_line import WORKERS_SILENCE_S, WorkerNetwork
from diloco_jax.simulation.faults.apart_worker import ApartWorker
from diloco_jax.simulation.faults.arrays import Anchor, Anchors
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.fault import DrawnFault, Restart
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.network import FaultyLine
from diloco_jax.simulation.faults.schedule import LEASE_S, RETRY_S, Schedule
from diloco_jax.simulation.faults.snapshots import ROUND_S, SnapshotRounds
from diloco_jax.simulation.faults.standby_node import Node, Role
from diloco_jax.simulation.faults.standby_world import NODES, StandbyWorld
from diloco_jax.simulation.faults.worker_crashes import (
    WorkerCrashes,
    WorkerPartition,
)

UNIX_S = 1.7e9
"""Unix time as a run begins, by a clock that is right."""


class ApartNode(Node):
    """A machine with a coordinator that may lead workers elsewhere."""

    def __init__(
        self, world: ApartWorld, name: str, rate: float, unix_ahead_s: float
    ) -> None:
        """unix_ahead_s: by which its time of day is wrong."""
        super().__init__(world, name, rate)
        self.leading: Leading | None = None
        self.last_lead = 0
        """Number of the last lead; on its disk."""
        self._unix_ahead_s = unix_ahead_s

    @property
    def led(self) -> int:
        """See Node."""
        return reign_of(self.last_lead)

    @property
    def unix_s(self) -> float:
        """Its time of day."""
        return UNIX_S + self._unix_ahead_s + self.clock()

    def kill(self) -> None:
        """See Node; lines to workers break."""
        super().kill()
        self.leave_workers(in_order=False)

    def leave_workers(self, *, in_order: bool) -> None:
        """Hang up on all workers. in_order: the process ends by itself."""
        leading, self.leading = self.leading, None
        if leading is not None:
            leading.end(in_order=in_order)


class ApartWorld(StandbyWorld):
    """World with two coordinators' machines, and one for each worker."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        count, sizes = self.config.workers, self.config.fragment_sizes
        self._dealt = deal(sizes, count)
        self.workers = [
            ApartWorker(self, number, self._fragments_of(number))
            for number in range(count)
        ]
        self._networks = {
            (node, number): WorkerNetwork(self.clock, schedule.latency_s)
            for node in self.nodes
            for number in range(count)
        }
        self._mandates = self._starts = 0
        """Mandates that a person has removed; leads that were started."""

    def _node(self, name: str, rate: float) -> Node:
        drawn = self.schedule.standby
        assert drawn is not None
        ahead_s = drawn.unix_ahead_s[NODES.index(name)]
        return ApartNode(self, name, rate, ahead_s)

    def _crashes_of_workers(self) -> WorkerCrashes:
        return ApartCrashes(self, liveness.gathered_within_s(self.schedule))

    def _rounds_of_snapshots(self) -> SnapshotRounds:
        return ApartRounds(self)

    def _fragments_of(self, number: int) -> tuple[int, ...]:
        return tuple(f for f, of in enumerate(self._dealt) if of == number)

    def worker_of(self, fragment: int) -> ApartWorker:
        """Return the worker that has a fragment."""
        return self.workers[self._dealt[fragment]]

    # ---- who leads ------------------------------------------------------------------

    def _read(self, node: Node, clock_s: float) -> None:
        """Have the workers go on before anything is served."""
        assert isinstance(node, ApartNode)
        if node.disk.damaged and node.cede():
            return
        state = self._recovered(node.disk, clock_s)
        then = functools.partial(self._loaded, node, clock_s)
        self._bring_up(node, state, node.disk.files(), then)

    def _begin_term(self, node: Node, opened: Opened) -> None:
        assert isinstance(node, ApartNode)
        then = functools.partial(super()._begin_term, node, opened)
        self._bring_up(node, opened.state, dict(enumerate(opened.anchors)), then)

    def _bring_up(
        self,
        node: ApartNode,
        state: State,
        files: Mapping[int, Anchor],
        then: Callable[[], None],
    ) -> None:
        """Dial all workers. files: anchors of the beginning of a run or a term."""
        self._starts += 1
        reign = node.reign
        at_least = first_number(reign, node.unix_s)
        node.last_lead = next_number(node.last_lead, at_least)
        order = (self._mandates, reign, self._starts)
        node.leading = Leading(self, node, order, node.last_lead, then)
        node.leading.begin(state, files)

    def _go_on(self, state: State, clock_s: float) -> None:
        """Let a coordinator go on, with workers that have answered."""
        node = self._leading
        assert isinstance(node, ApartNode)
        leading = node.leading
        assert leading is not None
        node.disk.hand_over()
        self.monitor.recovered(state)
        for fragment, anchor in leading.restored():
            self.monitor.restored(fragment, anchor)
            self.monitor.published(fragment, anchor)
        coordinator = self._made(state, Anchors(()), clock_s - self.clock.now)
        assert isinstance(coordinator, ApartCoordinator)
        self.coordinator = coordinator
        for worker in self.workers:
            if worker.process is None:
                self.monitor.worker_died(worker.fragments)
            else:
                for key in worker.process.deltas:
                    self.monitor.arrived(key)
        leading.serve(coordinator)
        self._serve(coordinator)

    def _made(
        self, state: State, merging: Anchors, offset_s: float
    ) -> FaultyCoordinator:
        node = self._leading
        assert isinstance(node, ApartNode)
        node.coordinator = ApartCoordinator(self, node, state, offset_s)
        return node.coordinator

    def _go_back(self) -> None:
        """See StandbyWorld. The mandate is made anew, so the person also removes what
        workers know of the leads before."""
        super()._go_back()
        self._mandates += 1
        for worker in self.workers:
            worker.obeyed = Obeyed()

    # ---- processes ------------------------------------------------------------------

    def ended(self, node: Node, role: Role, after_s: float) -> None:
        """See StandbyWorld; a process that ends by itself ends its workers."""
        assert isinstance(node, ApartNode)
        node.leave_workers(in_order=True)
        super().ended(node, role, after_s)

    def lose(self, node: Node, restart: Restart, *, renamed: bool) -> None:
        """See StandbyWorld."""
        assert isinstance(node, ApartNode)
        node.last_lead = 0
        super().lose(node, restart, renamed=renamed)

    def stop(self, node: Node, for_s: float, *, asleep: bool = False) -> None:
        """See StandbyWorld. Workers leave a lead that is silent."""
        super().stop(node, for_s, asleep=asleep)
        life = node.life

        def leave() -> None:
            if node.paused and node.life == life:
                for worker in self.workers:
                    line = self.network(node, worker).line
                    if line is not None:
                        line.leave()

        if for_s >= WORKERS_SILENCE_S:
            self.clock.after(WORKERS_SILENCE_S, leave)

    def fill_disk(self, for_s: float, *, brimful: bool) -> None:
        """See FaultyWorld: the lead's disk, or those of all workers."""
        disks: list[Disk] = [self.disk]
        if not brimful:
            disks = [worker.disk for worker in self.workers]
        for disk in disks:
            self.fill(disk, for_s, brimful=brimful)

    # ---- the network ----------------------------------------------------------------

    def network(self, node: Node, worker: ApartWorker) -> WorkerNetwork:
        """Return the network between a node and a worker."""
        return self._networks[node.name.partition(".")[0], worker.number]

    def cut(
        self, fault: DrawnFault, number: int, nodes: list[Node], for_s: float
    ) -> bool:
        """Part a worker from nodes for a while; False if it is parted from one."""
        worker = self.workers[number % len(self.workers)]
        networks = [self.network(node, worker) for node in nodes]
        if not networks or any(network.parted for network in networks):
            return False
        for network in networks:
            network.cut(for_s)
        # A worker that lost its line in it is dialled again, and serves.
        return self.begun(fault, for_s + LEASE_S + 4 * RETRY_S)


class ApartCrashes(WorkerCrashes):
    """The faults of workers on other machines."""

    _world: ApartWorld

    def lead_dies(self, coordinator: FaultyCoordinator, restart: Restart) -> None:
        """End a lead: what islands send to workers arrives all the same."""
        coordinator.die()
        for island in self._world.processes:
            if isinstance(island.line, FaultyLine):
                island.line.linger()

    def lead_is_up(self, coordinator: FaultyCoordinator) -> None:
        """Look after what its workers have lost."""
        self.look(coordinator)

    def end_those_of(self, disk: Disk) -> None:
        """See WorkerCrashes: there are none."""

    def part(self, fault: WorkerPartition) -> bool:
        """Part a worker from the node that leads."""
        world = self._world
        if not isinstance(world.coordinator, ApartCoordinator):
            return False
        nodes = [world.coordinator.node]
        return world.cut(fault, fault.worker, nodes, fault.for_s)

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
        if not may_replace_snapshots(process.heard):
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
