"""A coordinator with workers on other machines, among faults."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from diloco_jax.coordinator.holding.holder import MergesUnderWay
from diloco_jax.protocol.coordinator.events import WorkerBack
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.holding import FragmentsRestored
from diloco_jax.simulation.faults import apart_workers, apart_world
from diloco_jax.simulation.faults.apart_workers import DialledLine, HoldingProcess
from diloco_jax.simulation.faults.apart_world import ApartWorld
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.observing import ViolationError
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    AnyFault,
    CoordinatorCrash,
    DiskLost,
    DrawnIsland,
    MachineSleep,
    Restart,
    Schedule,
    WorkerCrash,
    WorkerPartition,
)
from diloco_jax.simulation.faults.strike import strike

AT_S = 9.0
LONG_S = 5 * LEASE_S
SCHEDULE = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=1200,
    fragment_sizes=(2, 1, 1, 2),
    workers=2,
    workers_apart=True,
    outage_s=110.0,
)


class Watched(ApartWorld):
    """Keeps when each lead began, and which processes workers had then."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule, strike)
        self.led: list[float] = []
        self.processes_led: list[list[HoldingProcess | None]] = []

    def _lead(self, state: State, clock_s: float) -> None:
        self.led.append(self.clock.now)
        self.processes_led.append([worker.process for worker in self.workers])
        super()._lead(state, clock_s)

    @property
    def terms(self) -> set[int]:
        assert self.coordinator is not None
        return {f.version.term for f in self.coordinator.state.fragments}


def played(*faults: AnyFault, **fields: Any) -> Watched:
    world = Watched(replace(SCHEDULE, faults=faults, **fields))
    world.play()
    assert world.struck.total() == len(faults)
    assert all(merges > 3 for merges in world.merges)
    return world


def death(at_s: float = AT_S, down_s: float = LONG_S) -> CoordinatorCrash:
    return CoordinatorCrash(at_s=at_s, restart=Restart(down_s=down_s))


@pytest.mark.parametrize("down_s", [0.5, LONG_S])
def test_the_next_lead_goes_on_with_the_same_processes(down_s: float) -> None:
    world = played(death(down_s=down_s))
    assert len(world.led) == 2
    before, after = world.processes_led
    assert None not in before
    assert before == after
    assert world.terms == {1}


LOST = DiskLost(at_s=AT_S, restart=Restart(down_s=1.0))


def test_one_that_gathers_has_processes_begin_anew() -> None:
    """They do not know the versions of the next term, which come with their files."""
    world = played(LOST)
    before, after = world.processes_led
    assert not set(before) & set(after)
    assert world.terms == {2}


@pytest.mark.parametrize("leases", [1.0, 2.5, 4.0])
def test_a_worker_lives_on_through_a_partition_from_its_lead(leases: float) -> None:
    """No line breaks, or its own end does, or both."""
    backs = []
    hear = FaultyCoordinator.hear

    def heard(self: FaultyCoordinator, event: Any) -> None:
        if isinstance(event, WorkerBack):
            backs.append(event)
        hear(self, event)

    with mock.patch.object(FaultyCoordinator, "hear", heard):
        cut = WorkerPartition(at_s=AT_S, worker=1, for_s=leases * LEASE_S)
        world = played(cut)
    assert len(world.led) == 1
    assert [worker.process for worker in world.workers] == world.processes_led[0]
    assert all(not back.lost for back in backs)
    assert len(backs) == (leases > 2)


def test_a_lead_waits_for_a_worker_that_it_does_not_reach() -> None:
    cut = WorkerPartition(at_s=AT_S - 1, worker=1, for_s=LONG_S)
    world = played(cut, death(down_s=1.0))
    assert cut.at_s + cut.for_s < world.led[1] < cut.at_s + cut.for_s + 1


def test_workers_leave_a_lead_that_sleeps_and_come_back() -> None:
    world = played(MachineSleep(at_s=AT_S, for_s=4 * LEASE_S))
    assert len(world.led) == 1
    assert [worker.process for worker in world.workers] == world.processes_led[0]
    assert all(worker.obeyed.dial == 2 for worker in world.workers)


def test_a_worker_that_died_with_its_disk_is_gathered_by_the_next_lead() -> None:
    lost = WorkerCrash(at_s=AT_S, worker=0, down_s=LONG_S, disk_lost=True)
    world = played(lost, death(at_s=AT_S + 1, down_s=1.0))
    assert len(world.led) == 2
    assert world.terms == {1, 2}


def test_a_disk_that_is_lost_before_any_island_has_its_fragments_comes_back() -> None:
    """As a person would bring it: nobody else has them."""
    lost = WorkerCrash(at_s=0.5, worker=0, down_s=3.0, disk_lost=True)
    assert played(lost).terms == {1}


def test_no_fetch_gets_less_than_the_island_has_heard_of() -> None:
    """A lead that has died may know less."""
    world = played()
    assert world.coordinator is not None
    worker = world.workers[0]
    assert worker.process is not None
    fragment = worker.fragments[0]
    newest, _ = worker.process.current(fragment)
    fetched = world.coordinator.fetch(fragment, newest, None)
    assert fetched is not None
    assert fetched.version == newest
    assert world.coordinator.fetch(fragment, newest.next(), newest) is None


def test_no_time_of_day_decides_which_lead_is_newer() -> None:
    """The clock of the machine on which the next term begins is behind."""
    assert played(LOST).terms == {2}
    with (
        mock.patch.object(apart_world, "first_number", lambda term, unix_s: unix_s),
        pytest.raises(ViolationError, match="liveness"),
    ):
        played(LOST)


def give_up(
    under_way: MergesUnderWay, committed: dict[int, Any], patience_s: float
) -> list[int]:
    """Go on with what nobody has committed."""
    under_way._ordered = {}
    return list(under_way._prepared)


def test_a_merge_that_nobody_has_committed_is_given_up() -> None:
    """The lead sleeps through a prepared merge, and dies before it commits it."""
    sleep = MachineSleep(at_s=AT_S - 0.5, for_s=LONG_S)
    faults = (sleep, death(at_s=AT_S + LEASE_S, down_s=1.0))
    fields = {"merge_s": 0.8, "total_tokens": 2400}
    assert len(played(*faults, **fields).led) == 2

    def as_it_is(asked: Any, store: Any, lost: Any) -> Any:
        return [
            store._restored(c.fragment, store.current(c.fragment)[0])
            for c in asked.fragments
        ]

    with (
        mock.patch.object(MergesUnderWay, "give_up", give_up),
        mock.patch.object(apart_workers, "alive", as_it_is),
        pytest.raises(ViolationError, match=r"restored|anchors|prepared"),
    ):
        played(*faults, **fields)


def test_answers_name_versions_and_values() -> None:
    """Invariants see the answers of a process as they are."""
    answers = []
    say = DialledLine.say

    def said(line: DialledLine, message: Any) -> None:
        if isinstance(message, FragmentsRestored):
            answers.append(message)
        say(line, message)

    with mock.patch.object(DialledLine, "say", said):
        played(death())
    assert len(answers) == 4
    assert all(one.digest for answer in answers for one in answer.fragments)
