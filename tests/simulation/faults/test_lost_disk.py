"""A coordinator whose disk is gone: a new term, from what islands have."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.messages import Version
from diloco_jax.simulation.faults.faults import (
    AnyFault,
    CoordinatorCrash,
    DiskFailure,
    DiskGone,
    DiskLost,
    Impostor,
    IslandCrash,
    Leave,
    MadeUpAnchors,
    Partition,
    Replacement,
    Restart,
    SecondCoordinator,
    TornWrite,
)
from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule
from diloco_jax.simulation.faults.unit import Unit
from diloco_jax.simulation.faults.world import FaultyWorld

RESTART = Restart(down_s=0.5)


def played(*faults: AnyFault, **fields: Any) -> FaultyWorld:
    """With nothing wrong. Merges are at about 5, 10, ... seconds."""
    world, wrong = play(schedule(*faults, **fields))
    assert wrong is None
    assert world.struck.total() == len(faults)
    return world


def schedule(*faults: AnyFault, **fields: Any) -> Schedule:
    defaults: dict[str, Any] = {
        "islands": {"a": DrawnIsland(), "b": DrawnIsland()},
        "total_tokens": 600,
        "fragment_sizes": (1,),
    }
    return Schedule(faults=faults, **{**defaults, **fields})


def versions(world: FaultyWorld) -> list[Version]:
    assert world.coordinator is not None
    return [f.version for f in world.coordinator.state.fragments]


def test_a_disk_that_is_lost_costs_a_term_and_no_version() -> None:
    world = played(DiskLost(at_s=21.0, restart=RESTART), fragment_sizes=(2, 1))
    unharmed = played(fragment_sizes=(2, 1))
    assert {version.term for version in versions(world)} == {2}
    for found, expected in zip(versions(world), versions(unharmed), strict=True):
        assert expected.term == 1
        assert found.number >= expected.number - 2
    assert world.coordinator is not None
    totals = ledger.run_totals(world.config, world.coordinator.state)
    assert totals.carried > 0
    assert totals.in_flight <= 1, "what is left of rounding down"
    assert totals.lost == {}
    assert {i.incarnation for i in world.islands.values()} == {1}


def test_a_disk_that_is_back_in_time_is_gone_on_with() -> None:
    soon = DiskGone(at_s=21.0, restart=RESTART, gone_s=0.3)
    assert {version.term for version in versions(played(soon))} == {1}
    late = DiskGone(at_s=21.0, restart=RESTART, gone_s=20.0)
    assert {version.term for version in versions(played(late))} == {2}
    twice = [DiskLost(at_s=at_s, restart=RESTART) for at_s in (15.0, 30.0)]
    assert {version.term for version in versions(played(*twice))} == {3}


@pytest.mark.parametrize(
    ("names", "liar"), [(names, n) for names in ("abc", "abcd") for n in names]
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_liar_at_any_place_gives_the_term_nothing(
    names: str, liar: str, ahead: int
) -> None:
    """Not even one that claims the newest version."""
    islands = {name: DrawnIsland() for name in names}
    lies = MadeUpAnchors(at_s=20.5, island=liar, for_s=90, ahead=ahead)
    lost = DiskLost(at_s=21.0, restart=RESTART)
    world = played(lies, lost, islands=islands, total_tokens=1600, outage_s=110.0)
    assert {version.term for version in versions(world)} == {2}


def test_a_liar_that_two_cannot_check_is_stopped_by_an_operator() -> None:
    """They differ at one version, and wait for a third island."""
    lies = MadeUpAnchors(at_s=20.5, island="a", for_s=90)
    world = played(lies, DiskLost(at_s=21.0, restart=RESTART), total_tokens=1600)
    assert {version.term for version in versions(world)} == {2}


@pytest.mark.parametrize(("for_s", "term"), [(1.0, 1), (12.0, 2), (40.0, 2)])
def test_the_first_of_two_coordinators_goes_on_only_if_it_is_back_in_time(
    for_s: float, term: int
) -> None:
    """Otherwise islands tell it of the second one's term, and it ends."""
    islands = {name: DrawnIsland() for name in "abc"}
    second = SecondCoordinator(at_s=20.5, for_s=for_s)
    with mock.patch.object(Unit, "crash") as crash:
        world = played(second, islands=islands, total_tokens=1600)
    assert {version.term for version in versions(world)} == {term}
    assert world.first is None
    assert not crash.called
    assert {i.incarnation for i in world.islands.values()} == {1}


def test_one_island_is_enough() -> None:
    crash = IslandCrash(at_s=20.5, island="b", down_s=15.0)
    world = played(crash, DiskLost(at_s=21.0, restart=RESTART))
    assert versions(world)[0].term == 2
    assert versions(world)[0].number > 3


def test_a_process_of_the_same_name_that_is_first_in_the_new_term_has_it() -> None:
    """An incarnation from before is turned away, and the next one comes back. Until it
    hears so, it trains on positions that the term before had granted it."""
    crash = Restart(down_s=0.2, clock_s=6.4, noticed_s=4.0)
    world = played(
        DiskLost(at_s=2.39, restart=Restart(down_s=7.62, clock_s=0.9, noticed_s=0.0)),
        TornWrite(at_s=9.46, restart=crash, appends=1, written_share=0.17),
        Impostor(at_s=15.83, island="b"),
        **UNALIKE,
    )
    assert {version.term for version in versions(world)} == {2}
    assert world.islands["b"].incarnation == 2


UNALIKE: dict[str, Any] = {
    "islands": {
        "a": DrawnIsland(step_s=1.5, batch_size=2, join_s=1.2),
        "b": DrawnIsland(step_s=2.5, batch_size=3, join_s=1.4),
    },
    "total_tokens": 129,
    "fragment_sizes": (3,),
    "overlap_steps": 1,
    "outage_s": 110.0,
}
DEAF = Partition(at_s=5.6, island="b", for_s=3.0, ways=("down",))
"""b does not hear that its first delta is merged, and a has adopted that merge."""
THEN_LOST = DiskLost(at_s=7.2, restart=RESTART)


def test_a_take_without_a_verdict_is_not_merged_again() -> None:
    world = played(DEAF, THEN_LOST, quorum=2)
    assert {version.term for version in versions(world)} == {2}


def test_what_a_term_granted_that_nobody_heard_of_is_lost_with_it() -> None:
    """b joins the first term 2 alone, and its welcome gets lost with the disk. So the
    next one is term 2 again, grants the same data, and b begins anew in it."""
    world = played(
        DiskLost(at_s=4.47, restart=Restart(down_s=0.12, noticed_s=4.0)),
        DiskGone(at_s=6.4, restart=Restart(down_s=1.59, noticed_s=4.0), gone_s=4.51),
        TornWrite(at_s=8.67, restart=Restart(down_s=7.18), appends=2),
        DiskFailure(at_s=21.67, restart=Restart(down_s=2.78), appends=2, written=True),
        Leave(at_s=22.86, island="b", away_s=1.58, notice_s=3.0),
        Replacement(at_s=26.18, island="c"),
        DiskLost(at_s=31.9, restart=Restart(down_s=2.65)),
        islands={
            "a": DrawnIsland(step_s=1.5, batch_size=2, join_s=1.5, lookahead=2),
            "b": DrawnIsland(join_s=0.7),
            "c": DrawnIsland(step_s=1.5, batch_size=2, join_s=1.6),
        },
        total_tokens=192,
        fragment_sizes=(7,),
        steps_per_cycle=5,
        overlap_steps=1,
        outage_s=125.0,
        transfer_s=1.2,
    )
    assert world.struck["disk_lost"] == 2
    assert {version.term for version in versions(world)} == {2}


def test_one_of_the_same_name_in_a_lost_term_takes_no_data_from_the_other() -> None:
    """The second process that calls itself b is let into term 2, which is lost. In the
    third the first b is back, with what the first term had granted it."""
    world = played(
        DiskLost(at_s=1.19, restart=Restart(down_s=0.13, clock_s=1985.4)),
        TornWrite(
            at_s=2.64, restart=Restart(down_s=6.08), appends=1, written_share=0.6
        ),
        Impostor(at_s=7.01, island="b"),
        CoordinatorCrash(at_s=7.42, restart=Restart(down_s=4.85), effects=1),
        DiskLost(at_s=10.69, restart=Restart(down_s=1.89)),
        islands={
            "a": DrawnIsland(step_s=1.0, batch_size=2, join_s=1.5),
            "b": DrawnIsland(step_s=1.0, batch_size=2, join_s=1.3),
        },
        total_tokens=1,
        fragment_sizes=(5,),
        steps_per_cycle=3,
        overlap_steps=1,
        outage_s=110.0,
    )
    assert {version.term for version in versions(world)} == {3}
    assert world.islands["b"].incarnation == 1


def test_one_of_the_same_name_in_a_later_term_begins_anew() -> None:
    """Seed 204319: the second process that calls itself b is let into term 3, of whose
    beginning a torn record knows nothing, and its steps are others than the first's."""
    world = played(
        DiskLost(at_s=6.83, restart=Restart(down_s=2.72, clock_s=5.2, noticed_s=4.0)),
        DiskLost(at_s=35.73, restart=Restart(down_s=2.78, clock_s=2.5, noticed_s=4.0)),
        TornWrite(
            at_s=36.74,
            restart=Restart(down_s=1.63, clock_s=5.6, noticed_s=4.0),
            written_share=0.41,
        ),
        Impostor(at_s=42.47, island="b"),
        islands={
            "b": DrawnIsland(batch_size=2, join_s=0.7),
            "c": DrawnIsland(batch_size=2, join_s=0.1),
        },
        total_tokens=776,
        fragment_sizes=(2,),
        room=2,
        steps_per_cycle=6,
        max_staleness=2,
        adopt="overwrite",
        outage_s=110.0,
    )
    assert {version.term for version in versions(world)} == {3}
