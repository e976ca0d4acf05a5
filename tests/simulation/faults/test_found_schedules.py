"""Schedules that once violated an invariant, as short as they get."""

from __future__ import annotations

import pytest

from diloco_jax.simulation.faults.faults import (
    CoordinatorCrash,
    Corruption,
    Delay,
    DiskFailure,
    DiskGone,
    DiskLost,
    Impostor,
    IslandCrash,
    JoinCrash,
    Partition,
    Restart,
    WorkerCrash,
)
from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule

FOUND = {
    "the end costs steps: a crash amid effects": Schedule(
        islands={
            "a": DrawnIsland(join_s=0.1, lookahead=2),
            "c": DrawnIsland(join_s=0.4),
        },
        faults=(
            JoinCrash(at_s=0.43, island="a", down_s=2.2, joining_s=0.39),
            CoordinatorCrash(
                at_s=1.32, restart=Restart(down_s=3.76, clock_s=1570.7), effects=8
            ),
            WorkerCrash(at_s=3.83, worker=1, down_s=0.14, effects=7),
            CoordinatorCrash(
                at_s=6.74, restart=Restart(down_s=11.02, clock_s=2831.0), effects=3
            ),
            DiskFailure(
                at_s=7.14,
                restart=Restart(down_s=1.93, clock_s=2.0, noticed_s=4.0),
                appends=2,
                written=True,
            ),
            CoordinatorCrash(
                at_s=9.13, restart=Restart(down_s=2.48, clock_s=1868.1, noticed_s=4.0)
            ),
        ),
        total_tokens=207,
        fragment_sizes=(6,),
        room=1,
        steps_per_cycle=3,
        max_staleness=2,
        outage_s=110.0,
        transfer_s=0.4,
    ),
    "the end costs steps: it comes before all are in the term": Schedule(
        islands={
            "a": DrawnIsland(step_s=0.8, batch_size=2, join_s=1.3),
            "b": DrawnIsland(step_s=0.8, batch_size=2, join_s=0.5),
            "c": DrawnIsland(step_s=2.5, batch_size=2, join_s=0.8),
        },
        faults=(
            JoinCrash(at_s=2.33, island="c", down_s=2.05, joining_s=1.92),
            DiskLost(at_s=5.76, restart=Restart(down_s=0.16, clock_s=4.8)),
            WorkerCrash(at_s=8.66, worker=0, down_s=0.13, noticed_s=0.3, effects=7),
            Delay(at_s=15.24, island="a", for_s=0.91, late_s=1.2),
        ),
        total_tokens=188,
        adopt="overwrite",
        transfer_s=0.4,
    ),
    "two processes come under one name while the coordinator is away": Schedule(
        islands={"c": DrawnIsland(batch_size=2, join_s=0.4)},
        faults=(
            JoinCrash(at_s=5.97, island="c", down_s=0.49, joining_s=1.19),
            DiskFailure(
                at_s=8.15,
                restart=Restart(down_s=2.37, clock_s=3.8, noticed_s=4.0),
                appends=1,
            ),
            Impostor(at_s=8.49, island="c"),
            Impostor(at_s=10.03, island="c"),
        ),
        total_tokens=85,
        fragment_sizes=(7,),
        workers=3,
        steps_per_cycle=3,
        overlap_steps=1,
        max_staleness=0,
        outage_s=125.0,
    ),
    "the last fault ends while all processes start again (seed 121726)": Schedule(
        islands={
            "a": DrawnIsland(join_s=0.4),
            "b": DrawnIsland(step_s=2.5, batch_size=3, join_s=0.6, lookahead=2),
            "c": DrawnIsland(step_s=1.5, batch_size=2, join_s=0.2),
        },
        faults=(
            IslandCrash(
                at_s=5.52, island="c", down_s=6.04, noticed=False, lingers=True
            ),
            DiskLost(
                at_s=9.09, restart=Restart(down_s=0.16, clock_s=1928.2, noticed_s=4.0)
            ),
        ),
        total_tokens=370,
        extended_to=(633,),
        fragment_sizes=(2,),
        steps_per_cycle=3,
        overlap_steps=1,
        max_staleness=0,
        adopt="overwrite",
        outage_s=110.0,
    ),
    "one island alone has a term's lost anchor (seed 452)": Schedule(
        islands={
            "a": DrawnIsland(step_s=1.5, batch_size=3, join_s=0.2, lookahead=2),
            "b": DrawnIsland(step_s=2.5, join_s=1.8, lookahead=2),
            "c": DrawnIsland(step_s=2.5, join_s=0.3, lookahead=2),
            "d": DrawnIsland(join_s=0.7),
        },
        faults=(
            DiskLost(at_s=10.97, restart=Restart(down_s=2.36, clock_s=4197.4)),
            DiskGone(
                at_s=11.41,
                restart=Restart(down_s=2.43, clock_s=4116.4, noticed_s=4.0),
                gone_s=3.32,
            ),
            IslandCrash(at_s=16.92, island="d", down_s=3.45),
            WorkerCrash(
                at_s=22.03,
                worker=0,
                down_s=4.83,
                effects=11,
                disk_lost=True,
            ),
        ),
        total_tokens=418,
        fragment_sizes=(7, 7, 9),
        workers=3,
        room=1,
        steps_per_cycle=3,
        overlap_steps=1,
        quorum=4,
        max_staleness=0,
        transfer_s=1.2,
    ),
    "two islands have not adopted in a term that is lost (seed 911)": Schedule(
        islands={
            "a": DrawnIsland(join_s=0.2, lookahead=2),
            "b": DrawnIsland(step_s=0.8, batch_size=2, join_s=0.6, lookahead=2),
            "c": DrawnIsland(batch_size=3, join_s=1.5, lookahead=2),
        },
        faults=(
            DiskLost(
                at_s=0.86, restart=Restart(down_s=2.72, clock_s=2066.3, noticed_s=4.0)
            ),
            WorkerCrash(at_s=1.82, worker=0, down_s=2.42, noticed_s=0.05, effects=2),
            WorkerCrash(
                at_s=3.6,
                worker=2,
                down_s=0.11,
                noticed_s=0.3,
                effects=10,
                disk_lost=True,
            ),
            Partition(at_s=12.35, island="b", ways=("up",), for_s=6.57),
            Corruption(at_s=12.88, island="c", for_s=3.81),
        ),
        total_tokens=170,
        fragment_sizes=(3,),
        workers=2,
        room=1,
        steps_per_cycle=5,
        overlap_steps=1,
        max_staleness=2,
        outage_s=110.0,
    ),
    "two islands adopted another fragment of a term (seed 954)": Schedule(
        islands={
            "b": DrawnIsland(batch_size=2, join_s=1.2),
            "c": DrawnIsland(step_s=2.5, batch_size=2, join_s=0.9),
            "d": DrawnIsland(step_s=0.8, join_s=0.9),
        },
        faults=(
            DiskGone(at_s=0.83, restart=Restart(down_s=5.54, clock_s=7.9), gone_s=9.44),
            WorkerCrash(at_s=1.29, worker=1, down_s=0.18, noticed_s=0.05, effects=10),
            JoinCrash(at_s=4.6, island="b", down_s=2.04, joining_s=1.39),
            DiskLost(
                at_s=8.62, restart=Restart(down_s=2.28, clock_s=775.8, noticed_s=4.0)
            ),
            WorkerCrash(
                at_s=11.83,
                worker=0,
                down_s=8.7,
                noticed_s=0.3,
                effects=10,
                disk_lost=True,
            ),
        ),
        total_tokens=303,
        fragment_sizes=(5, 9, 7),
        workers=2,
        steps_per_cycle=5,
        overlap_steps=1,
        max_staleness=0,
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found_once_holds(found: str) -> None:
    assert play(FOUND[found]).wrong is None
