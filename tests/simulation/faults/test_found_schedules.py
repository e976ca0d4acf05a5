"""Schedules that once violated an invariant, as short as they get."""

from __future__ import annotations

import pytest

from diloco_jax.simulation.faults.faults import (
    CoordinatorCrash,
    Delay,
    DiskFailure,
    DiskLost,
    Impostor,
    IslandCrash,
    JoinCrash,
    Restart,
    WorkerCrash,
)
from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule

FOUND = {
    "the end costs steps: a crash amid effects": Schedule(
        islands={"a": DrawnIsland(join_s=0.1, lead=2), "c": DrawnIsland(join_s=0.4)},
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
            "b": DrawnIsland(step_s=2.5, batch_size=3, join_s=0.6, lead=2),
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
}


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found_once_holds(found: str) -> None:
    assert play(FOUND[found]).wrong is None
