"""A coordinator with a standby, and workers on other machines, among faults."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from diloco_jax.coordinator.holding.under_way import MergesUnderWay
from diloco_jax.protocol.coordinator.events import WorkerBack
from diloco_jax.protocol.holding import FragmentsRestored
from diloco_jax.protocol.working import BeginWorker
from diloco_jax.simulation.faults import apart_process, apart_world
from diloco_jax.simulation.faults.apart_line import DialledLine
from diloco_jax.simulation.faults.apart_process import HoldingProcess
from diloco_jax.simulation.faults.apart_world import ApartWorld
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.fault import Restart
from diloco_jax.simulation.faults.kinds import AnyFault, CoordinatorCrash
from diloco_jax.simulation.faults.observing import ViolationError
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    DrawnIsland,
    DrawnStandby,
    Schedule,
)
from diloco_jax.simulation.faults.standby_faults import (
    MandateAway,
    NodeStop,
    StandbyCrash,
    StandbyFull,
    WorkerCut,
)
from diloco_jax.simulation.faults.worker_crashes import WorkerCrash, WorkerPartition

AT_S = 9.0
LONG_S = 5 * LEASE_S
STANDBY = DrawnStandby(rates=(0.99, 1.01), workers_apart=True)
SCHEDULE = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=1200,
    fragment_sizes=(2, 1, 1, 2),
    workers=2,
    outage_s=110.0,
    standby=STANDBY,
)


class Watched(ApartWorld):
    """Keeps when each lead began, and which processes workers had then."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.led: list[tuple[float, str]] = []
        self.processes_led: list[list[HoldingProcess | None]] = []

    def _made(self, *arguments: Any) -> FaultyCoordinator:
        self.led.append((self.clock.now, self._leading.name))
        self.processes_led.append([worker.process for worker in self.workers])
        return super()._made(*arguments)

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
    """The node itself, if it is back in time, or its standby."""
    world = played(death(down_s=down_s))
    assert world.takeovers == ({"log": 1} if down_s == LONG_S else {})
    assert len(world.led) == 2
    before, after = world.processes_led
    assert None not in before
    assert before == after
    assert world.terms == {1}


def test_one_that_gathers_has_processes_begin_anew() -> None:
    """They do not know the versions of the next term, which come with their files."""
    away = StandbyCrash(at_s=AT_S - 3, down_s=LONG_S)
    world = played(away, death(down_s=2 * LONG_S))
    assert world.takeovers == {"gathering": 1}
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
    assert not world.takeovers
    assert [worker.process for worker in world.workers] == world.processes_led[0]
    assert all(not back.lost for back in backs)
    assert len(backs) == (leases > 2)


def test_a_standby_that_takes_over_waits_for_a_worker_that_it_does_not_reach() -> None:
    cut = WorkerCut(at_s=AT_S - 1, worker=1, to="standby", for_s=LONG_S)
    world = played(cut, death(down_s=2 * LONG_S))
    assert world.takeovers == {"log": 1}
    assert world.led[1][1] == "second"
    assert world.led[1][0] > cut.at_s + cut.for_s
    assert world.led[1][0] < cut.at_s + cut.for_s + 1


def test_a_worker_that_died_with_its_disk_is_gathered_by_who_took_over() -> None:
    lost = WorkerCrash(at_s=AT_S, worker=0, down_s=LONG_S, disk_lost=True)
    world = played(lost, death(at_s=AT_S + 1))
    assert world.takeovers == {"log": 1}
    assert world.terms == {1, 2}


def test_a_disk_that_is_lost_before_any_island_has_its_fragments_comes_back() -> None:
    """As a person would bring it: nobody else has them."""
    lost = WorkerCrash(at_s=0.5, worker=0, down_s=3.0, disk_lost=True)
    assert played(lost).terms == {1}


def test_no_fetch_gets_less_than_the_island_has_heard_of() -> None:
    """Its lead may have been succeeded, and know less."""
    world = played()
    assert world.coordinator is not None
    fragment = world.workers[0].fragments[0]
    newest = world.coordinator.state.fragments[fragment].version
    fetched = world.coordinator.fetch(fragment, newest, None)
    assert fetched is not None
    assert fetched.version == newest
    assert world.coordinator.fetch(fragment, newest.next(), newest) is None


SUCCEEDED = (
    WorkerCut(at_s=AT_S, worker=0, to="primary", for_s=5 * LEASE_S),
    MandateAway(at_s=AT_S + 3.2 * LEASE_S, to="primary", for_s=3 * LEASE_S),
)
"""The lead has lost the line to a worker, and dials until another one leads."""


def test_a_lead_that_was_succeeded_is_refused() -> None:
    refused = []
    refuse = DialledLine.refuse

    def noted(line: DialledLine) -> None:
        refused.append(line.order)
        refuse(line)

    with mock.patch.object(DialledLine, "refuse", noted):
        world = played(*SUCCEEDED)
    assert world.takeovers == {"log": 1}
    assert [reign for _, reign, _ in refused] == [1]


def test_it_would_be_seen_if_a_worker_went_back_to_it() -> None:
    with (
        mock.patch.object(BeginWorker, "is_newer", return_value=True),
        pytest.raises(ViolationError, match="obeyed"),
    ):
        played(*SUCCEEDED)


AHEAD = replace(STANDBY, unix_ahead_s=(1000.0, 0.0))
"""The first node's time of day is ahead."""


def test_no_time_of_day_decides_who_leads() -> None:
    assert played(death(), standby=AHEAD).takeovers == {"log": 1}
    with (
        mock.patch.object(
            apart_world, "first_number", lambda reign, unix_s: int(unix_s)
        ),
        pytest.raises(ViolationError, match="liveness"),
    ):
        played(death(), standby=AHEAD)


def give_up(
    under_way: MergesUnderWay, committed: dict[int, Any], patience_s: float
) -> list[int]:
    """Go on with what nobody has committed."""
    under_way._ordered = {}
    return list(under_way._prepared)


def test_a_merge_that_nobody_has_committed_is_given_up() -> None:
    """The lead dies with merges that are prepared, of which its standby knows none."""
    stop = NodeStop(at_s=AT_S - 0.5, part="primary", for_s=LONG_S)
    faults = (stop, death(at_s=AT_S + 2 * LONG_S))
    fields = {"merge_s": 0.8, "total_tokens": 2400}
    assert played(*faults, **fields).takeovers["log"] >= 1

    def as_it_is(asked: Any, store: Any, lost: Any) -> Any:
        return [
            store._restored(c.fragment, store.current(c.fragment)[0])
            for c in asked.fragments
        ]

    with (
        mock.patch.object(MergesUnderWay, "give_up", give_up),
        mock.patch.object(apart_process, "alive", as_it_is),
        pytest.raises(ViolationError, match=r"restored|anchors|prepared"),
    ):
        played(*faults, **fields)


UNSEEN = (
    MandateAway(at_s=5.29, to="both", for_s=7.09),
    StandbyFull(at_s=5.42, for_s=1.14),
    CoordinatorCrash(at_s=8.24, restart=Restart(down_s=2.99), effects=2),
    NodeStop(at_s=12.32, part="primary", for_s=15.82),
)
"""The first lead commits a version that its standby lacks. It starts again, has the
worker swap the version in, and stops before it serves."""


def test_what_was_swapped_in_and_nobody_has_seen_never_was() -> None:
    """The standby takes over at the version before, and its merge is another one."""
    given_up = []
    really_alive = apart_process.alive

    def alive(asked: Any, store: Any, lost: Any) -> Any:
        given_up.extend(
            committed.version
            for committed in asked.fragments
            if store.current(committed.fragment)[0] > committed.version
        )
        return really_alive(asked, store, lost)

    standby = replace(STANDBY, rates=(0.98, 1.0159), copy_s=0.5)
    islands = {"a": DrawnIsland(join_s=1.7), "c": DrawnIsland(join_s=1.0)}
    schedule = replace(
        SCHEDULE,
        islands=islands,
        faults=UNSEEN,
        standby=standby,
        total_tokens=90,
        fragment_sizes=(3,),
        workers=3,
        steps_per_cycle=3,
        grace=0.0,
        max_staleness=0,
        outage_s=125.0,
        transfer_s=0.2,
        merge_s=0.1,
    )
    world = Watched(schedule)
    with mock.patch.object(apart_process, "alive", alive):
        world.play()
    assert [version.number for version in given_up] == [0]
    assert world.takeovers["log"] == 1
    assert world.terms == {1}


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
