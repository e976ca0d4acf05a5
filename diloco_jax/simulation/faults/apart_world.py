"""A world of faults whose coordinator has workers on other machines.

Workers outlive the lead. The next one dials them, again and again, and they go on with
it: each obeys the lead with the largest number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diloco_jax.protocol.coordinator import workers
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.holding import (
    BeginWorker,
    Committed,
    CycleKept,
    Drop,
    Forget,
    FragmentKept,
    FragmentsRestored,
    FromWorker,
    Obeyed,
    RestoreFragments,
    ToHolder,
    first_number,
    next_number,
)
from diloco_jax.protocol.messages import AnchorRequest
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.apart_workers import (
    WORKERS_SILENCE_S,
    ApartWorker,
    DialledLine,
    WorkerNetwork,
)
from diloco_jax.simulation.faults.arrays import Anchor, Anchors
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.network import FaultyLine
from diloco_jax.simulation.faults.observing import Incarnation
from diloco_jax.simulation.faults.scene import (
    ROUND_S,
    FaultyIsland,
    Peer,
    SnapshotRounds,
)
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    RESTART_S,
    RETRY_S,
    RUN_ID,
    Restart,
    Schedule,
    WorkerPartition,
)
from diloco_jax.simulation.faults.worker_crashes import WorkerCrashes
from diloco_jax.simulation.faults.world import FaultyWorld, Strike
from diloco_jax.simulation.virtual.arrays import VirtualFetch


class LedWorker:
    """One worker as one life of a lead has it: the part of the product's `Supervised`
    that dials, and dials again."""

    def __init__(self, leading: Leading, worker: ApartWorker) -> None:
        self.leading, self.worker = leading, worker
        self.files: dict[int, Anchor] = {}
        """Anchors of the beginning of a run or a term, until they are there."""
        self.line: DialledLine | None = None
        """The present line, once the worker has answered."""
        self.restored: FragmentsRestored | None = None
        """The first answer."""
        self._dialled: DialledLine | None = None
        self._dials, self._until = 0, 0.0
        self._missed: dict[str, Forget] = {}
        self._unheard: list[Callable[[ApartCoordinator], None]] = []
        """News from before the lead serves."""

    def act(self, act: Callable[[], None]) -> None:
        """Do something in the lead's process, if it lives and once it is awake."""
        self.leading.act(act)

    def open(self, asked: RestoreFragments) -> None:
        """Dial until the worker answers, or for too long."""
        leading = self.leading
        self._until = leading.world.clock.now + leading.world.schedule.outage_s
        self._dial(asked)

    def leads_for(self, coordinator: object) -> bool:
        """Tell whether it is the side of this coordinator."""
        return self.leading.coordinator is coordinator

    def wants(self, line: DialledLine) -> bool:
        """Tell whether the lead still waits for the answer to this dial."""
        return line is self._dialled

    def send(self, message: ToHolder) -> None:
        """Send a message, unless the worker is away."""
        if self.line is not None:
            self.line.tell(message)
        elif isinstance(message, Forget):
            self._missed[message.island] = message

    def end(self, *, in_order: bool) -> None:
        """Hang up. in_order: the lead ends by itself, and its workers with it."""
        line = self.line or self._dialled
        self.line = self._dialled = None
        if line is not None:
            line.hang_up(ends=in_order)

    def tell(self, what: Callable[[ApartCoordinator], None]) -> None:
        """Tell the coordinator something, in its turn, once it serves."""
        coordinator = self.leading.coordinator
        if coordinator is None:
            self._unheard.append(what)
        else:
            coordinator.in_turn(lambda: what(coordinator))

    def serve(self) -> None:
        """Tell the coordinator what waited for it."""
        unheard, self._unheard = self._unheard, []
        for what in unheard:
            self.tell(what)

    def _dial(self, asked: RestoreFragments) -> None:
        leading, worker = self.leading, self.worker
        self._dials += 1
        begin = BeginWorker(
            config={},
            workdir="",
            run_id=RUN_ID,
            worker=worker.number,
            fragments=worker.fragments,
            bind="",
            ticket_key=b"",
            lead=leading.number,
            dial=self._dials,
        )
        network = leading.world.networks_of_workers[worker.number]
        line = self._dialled = DialledLine(self, worker, network, begin, asked)
        line.dial()
        wait_s = self._until - leading.world.clock.now

        def look() -> None:
            if self._dialled is line:
                leading.fail()

        leading.world.clock.after(max(wait_s, 0.0), lambda: leading.act(look))

    # ---- what a line brings ---------------------------------------------------------

    def hear(self, line: DialledLine, message: FromWorker) -> None:
        """Take a message of the worker."""
        if isinstance(message, FragmentsRestored) and line is self._dialled:
            self._dialled, self.line = None, line
            for missed in self._missed.values():
                line.tell(missed)
            self._missed.clear()
            self.files = {}
            self._is_back(message)
        elif line is self.line:
            self.tell(lambda coordinator: self._pass_on(coordinator, message))

    def _is_back(self, message: FragmentsRestored) -> None:
        if self.restored is None:
            self.restored = message
            self.leading.look()
            return
        lost = tuple(one.fragment for one in message.lost)
        back = WorkerBack(worker=self.worker.number, lost=lost)

        def tell(coordinator: ApartCoordinator) -> None:
            monitor = coordinator.monitor
            for fragment, anchor in anchors_of(message):
                monitor.restored(fragment, anchor)
                monitor.published(fragment, anchor)
            monitor.worker_back([f for f in self.worker.fragments if f not in lost])
            coordinator.hear(back)
            self.leading.world.worker_crashes.look(coordinator)

        self.tell(tell)

    def _pass_on(self, coordinator: ApartCoordinator, message: FromWorker) -> None:
        if isinstance(message, FragmentKept):
            self.leading.kept(coordinator, message)
        else:
            coordinator.hear(message)  # type: ignore[arg-type]

    def lose_line(self, line: DialledLine) -> None:
        """Dial again; the coordinator decides first upon a worker that it had."""
        world = self.leading.world
        if line is self._dialled:
            self._dialled = None
            again = functools.partial(self._again, line.asked, self._until)
            world.clock.after(RETRY_S, lambda: self.act(again))
        elif line is self.line:
            self.line = None
            self.tell(self._is_away)

    def _again(self, asked: RestoreFragments, until: float) -> None:
        if self._dialled is None and self.line is None and self._until == until:
            self._dial(asked)

    def _is_away(self, coordinator: ApartCoordinator) -> None:
        coordinator.monitor.worker_away(self.worker.fragments)
        coordinator.hear(WorkerAway(worker=self.worker.number))
        coordinator.in_turn(lambda: self._bring_back(coordinator))

    def _bring_back(self, coordinator: ApartCoordinator) -> None:
        if coordinator.dead:
            return
        asked = asked_of(self.worker, coordinator.state)
        world = self.leading.world
        world.clock.after(RETRY_S, lambda: self.act(lambda: self.open(asked)))

    def is_refused(self, line: DialledLine) -> None:
        """End: the worker obeys a later lead."""
        if line is self._dialled:
            self.leading.fail()


class Leading:
    """One life of a lead, with all its workers. number: which workers compare. then:
    called once each has answered."""

    def __init__(
        self, world: ApartWorld, number: int, then: Callable[[], None]
    ) -> None:
        self.world, self.number = world, number
        self.coordinator: ApartCoordinator | None = None
        self._ended, self._then = False, then
        self._workers = [LedWorker(self, worker) for worker in world.workers]
        self._kept: dict[int, int] = {}
        """Fragments of each cycle that are kept."""

    def begin(self, state: State, files: Mapping[int, Anchor]) -> None:
        """Have all workers go on from this state. files: anchors that they have not."""
        for one in self._workers:
            own = one.worker.fragments
            one.files = {f: anchor for f, anchor in files.items() if f in own}
            one.open(asked_of(one.worker, state))

    def look(self) -> None:
        """Go on if each worker has answered."""
        if all(one.restored is not None for one in self._workers):
            self._then()

    def restored(self) -> Iterator[tuple[int, Anchor]]:
        """Yield what each worker has answered with."""
        for one in self._workers:
            assert one.restored is not None
            yield from anchors_of(one.restored)

    def serve(self, coordinator: ApartCoordinator) -> None:
        """Tell a coordinator what its workers have lost, then what they say."""
        self.coordinator = coordinator
        for one in self._workers:
            assert one.restored is not None
            lost = tuple(fragment.fragment for fragment in one.restored.lost)
            if lost:
                coordinator.monitor.worker_died(lost)
                coordinator.monitor.worker_away(lost)
                coordinator.hear(WorkerBack(worker=one.worker.number, lost=lost))
        for one in self._workers:
            one.serve()

    def hold(self, message: ToHolder) -> None:
        """Pass a message to the worker that has its fragment."""
        if isinstance(message, Forget):
            for one in self._workers:
                one.send(message)
            return
        of = message.delta if isinstance(message, Drop) else message
        self._workers[self.world.worker_of(of.fragment).number].send(message)

    def kept(self, coordinator: ApartCoordinator, message: FragmentKept) -> None:
        """Make a cycle of what workers have kept, once it is whole."""
        cycle = message.keep.cycle
        self._kept[cycle] = self._kept.get(cycle, 0) + 1
        if self._kept[cycle] == self.world.config.fragments:
            coordinator.hear(CycleKept(cycle=cycle))

    def act(self, act: Callable[[], None]) -> None:
        """Do something in this process, if it lives and once it is awake."""

        def do() -> None:
            if not self._ended:
                act()

        if self.coordinator is None:
            do()
        else:
            self.coordinator.when_awake(do)

    def end(self, *, in_order: bool) -> None:
        """Hang up on all workers; see `LedWorker.end`."""
        self._ended = True
        for one in self._workers:
            one.end(in_order=in_order)

    def fail(self) -> None:
        """End the process: a worker does not come, or obeys a later lead."""
        self.world.lead_fails()


def asked_of(worker: ApartWorker, state: State) -> RestoreFragments:
    """Return what a worker has to go on from."""
    committed = tuple(
        Committed(fragment=f, version=state.fragments[f].version, digests={})
        for f in worker.fragments
    )
    return RestoreFragments(fragments=committed, fences=workers.fences(state))


def anchors_of(answer: FragmentsRestored) -> Iterator[tuple[int, Anchor]]:
    """Yield the anchors that a worker has, by fragment."""
    for one in answer.fragments:
        yield one.fragment, Anchor(one.snapshot, bytes.fromhex(one.digest))


class ApartCoordinator(FaultyCoordinator):
    """One life of a coordinator. What islands send goes to its workers, which are
    there while it is stopped, and once it is dead."""

    def __init__(
        self, world: ApartWorld, leading: Leading, state: State, clock_offset: float
    ) -> None:
        super().__init__(world, state, Anchors(()), clock_offset)
        self._apart_world, self._workers = world, leading
        self._worker_of = world.worker_of

    @property
    def waits(self) -> bool:
        """See FaultyCoordinator; True as well once it has ended."""
        return super().waits or self.dead

    def sleep(self, for_s: float) -> None:
        """See FaultyCoordinator. Islands and workers reach each other."""
        self._stopped = True
        self.clock.after(for_s, lambda: self._wake_up(for_s))
        self._apart_world.lead_sleeps(self, for_s)

    def in_turn(self, act: Callable[[], None]) -> None:
        """Do something after all events that wait for space."""
        if self._effects:
            self._later.append(act)
        else:
            act()

    def has(self, fragment: int) -> bool:
        """See FaultyCoordinator: here is no fragment."""
        return False

    def hold(self, message: ToHolder) -> None:
        """See VirtualCoordinator."""
        self._workers.hold(message)

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """See VirtualCoordinator."""
        process = self._worker_of(key.fragment).process
        if process is not None:
            process.upload(key, encoded)

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """See VirtualCoordinator. A lead that has died may know less than the
        island."""
        process = self._worker_of(fragment).process
        return None if process is None else process.fetch(fragment, want, have)

    def anchor(
        self,
        who: Incarnation,
        asked: AnchorRequest,
        anchor: Anchor,
        wanted: Callable[[], bool],
    ) -> None:
        """See FaultyCoordinator."""
        process = self._worker_of(asked.fragment).process
        if process is not None:
            process.anchor(who, asked, anchor, wanted)


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

    def __init__(self, schedule: Schedule, strike: Strike) -> None:
        super().__init__(schedule, strike)
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
