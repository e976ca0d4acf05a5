"""Messages between a worker and its lead wait, and what was said is not said again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.play import Played, play
from diloco_jax.simulation.faults.schedule import (
    AnyFault,
    DiskFailure,
    DrawnIsland,
    JoinCrash,
    Restart,
    Schedule,
    WorkerCrash,
    WorkerPartition,
)


def played(*faults: AnyFault, **fields: Any) -> Played:
    return play(Schedule(faults=faults, fragment_sizes=(1, 2), **fields))


def test_an_anchor_that_comes_before_its_order_is_sent_again() -> None:
    """The lead asks an island for the anchor of a lost fragment. The worker hears of it
    last: it is busy until then, and the island comes again."""
    world, wrong = played(
        DiskFailure(
            at_s=5.75,
            restart=Restart(down_s=8.15, clock_s=540.8),
            appends=2,
            written=True,
        ),
        WorkerCrash(
            at_s=6.02,
            worker=1,
            down_s=8.22,
            noticed_s=0.05,
            effects=6,
            disk_lost=True,
        ),
        WorkerPartition(at_s=8.6, worker=1, for_s=2.87, down_s=1.74),
        JoinCrash(at_s=9.62, island="a", down_s=1.47, joining_s=0.63),
        islands={
            "a": DrawnIsland(batch_size=2, join_s=1.9),
            "b": DrawnIsland(step_s=0.8, join_s=0.2),
        },
        total_tokens=557,
        workers=3,
        steps_per_cycle=5,
        overlap_steps=1,
        quorum=2,
        outage_s=125.0,
    )
    assert wrong is None
    assert world.struck["worker_partition"] == world.struck["worker_crash"] == 1
    assert world.coordinator is not None
    assert world.coordinator.state.fragments[0].version.term == 2


def long_partition() -> Played:
    """Deltas that arrive in the partition are under way for longer than the time to the
    next tick."""
    return played(
        WorkerPartition(at_s=5.0, worker=0, for_s=30.0, down_s=0.2),
        islands={"a": DrawnIsland(), "b": DrawnIsland()},
        total_tokens=900,
        workers=2,
        steps_per_cycle=4,
        transfer_s=1.9,
        overlap_steps=4,
    )


def test_what_a_dead_worker_has_said_does_not_count() -> None:
    world, wrong = long_partition()
    assert wrong is None
    assert world.struck["worker_partition"] == 1


def test_it_would_be_seen_if_it_did() -> None:
    forget_line = FaultyCoordinator.forget_line

    def hears_it_when_the_next_one_is_back(
        coordinator: Any, fragments: Sequence[int]
    ) -> None:
        late = list(coordinator._from_worker)
        assert late
        forget_line(coordinator, fragments)

        def tell() -> None:
            if coordinator.dead_fragments.isdisjoint(fragments):
                for event in late:
                    coordinator.hear(event)
            else:
                coordinator.clock.after(0.01, tell)

        coordinator.clock.after(0.0, tell)

    with mock.patch.object(
        FaultyCoordinator, "forget_line", hears_it_when_the_next_one_is_back
    ):
        _, wrong = long_partition()
    assert wrong is not None
    assert wrong.invariant == "held"
