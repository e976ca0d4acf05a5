"""Workers outlive a lead that crashes, and the next one hears of what they have."""

from __future__ import annotations

from typing import Any
from unittest import mock

from diloco_jax.protocol.coordinator import takes
from diloco_jax.protocol.holding import DeltaArrived
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.play import Played, play
from diloco_jax.simulation.faults.schedule import (
    CoordinatorCrash,
    DiskFailure,
    DrawnIsland,
    Impostor,
    JoinCrash,
    Restart,
    Schedule,
)


def crash(at_s: float = 6.3, *, workers_live: bool = True) -> Played:
    """Island b, of a quorum of two, is slower: a's delta has arrived."""
    restart = Restart(down_s=1.0, clock_s=50.0, workers_live=workers_live)
    schedule = Schedule(
        islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=2.5)},
        faults=(CoordinatorCrash(at_s=at_s, restart=restart, effects=3),),
        total_tokens=700,
        workers=2,
        quorum=2,
        merge_s=0.3,
        transfer_s=1.1,
    )
    return play(schedule)


def test_what_has_arrived_at_a_worker_is_not_asked_for_again() -> None:
    came: list[DeltaArrived] = []

    def heard(fragment: Any, event: DeltaArrived) -> Any:
        came.append(event)
        return real(fragment, event)

    real = takes.came_early
    with mock.patch.object(takes, "came_early", heard):
        world, wrong = crash()
    assert wrong is None
    assert world.struck["coordinator_crash"] == 1
    assert came
    with mock.patch.object(takes, "came_early", heard):
        came.clear()
        _, wrong = crash(workers_live=False)
    assert wrong is None
    assert came == []


def test_a_worker_that_tells_of_what_it_does_not_have_is_found() -> None:
    def tells_only(before: Any, heir: Any) -> None:
        for key in before._deltas:
            heir.hear(DeltaArrived(**key._asdict()))

    with mock.patch.object(FaultyCoordinator, "leave_deltas_to", tells_only):
        _, wrong = crash()
    assert wrong is not None
    assert wrong.invariant == "held"


def test_many_schedules_have_workers_that_outlive_their_lead() -> None:
    outlived = [
        fault
        for schedule in map(draw, range(200))
        for fault in schedule.faults
        if schedule.workers > 1
        and getattr(getattr(fault, "restart", None), "workers_live", False)
    ]
    assert len(outlived) > 20


def test_two_processes_that_come_under_one_name_are_two() -> None:
    """Both come while the coordinator is away. One is let in, and the other is not."""
    restart = Restart(down_s=2.37, clock_s=3.8, noticed_s=4.0, workers_live=True)
    schedule = Schedule(
        islands={"c": DrawnIsland(batch_size=2, join_s=0.4)},
        faults=(
            JoinCrash(at_s=5.97, island="c", down_s=0.49, joining_s=1.19),
            DiskFailure(at_s=8.15, restart=restart, appends=1),
            Impostor(at_s=8.49, island="c"),
            Impostor(at_s=10.03, island="c"),
        ),
        total_tokens=85,
        fragment_sizes=(7,),
        workers=3,
        steps_per_cycle=3,
        overlap_steps=1,
        grace=0.0,
        max_staleness=0,
        outage_s=125.0,
        transfer_s=0.2,
        merge_s=0.1,
    )
    assert play(schedule).wrong is None
