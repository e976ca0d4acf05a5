"""A lead's side of its workers on other machines: it dials them, again and again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from diloco_jax.protocol.coordinator import workers
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.holding import (
    BeginWorker,
    Committed,
    CycleKept,
    Drop,
    Forget,
    FragmentKept,
    FragmentsRestored,
    FromWorker,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.simulation.faults.apart_line import DialledLine
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.faults.schedule import RETRY_S, RUN_ID

if TYPE_CHECKING:
    from diloco_jax.protocol.coordinator.state import State
    from diloco_jax.simulation.faults.apart_coordinator import ApartCoordinator
    from diloco_jax.simulation.faults.apart_worker import ApartWorker
    from diloco_jax.simulation.faults.apart_world import ApartWorld


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
