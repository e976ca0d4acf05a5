"""A coordinator with a standby among faults: who leads, and what stays."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from plants import planted

from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.records import Ticks
from diloco_jax.simulation.faults.fault import Restart
from diloco_jax.simulation.faults.kinds import AnyFault, CoordinatorCrash
from diloco_jax.simulation.faults.lineage import Lineage
from diloco_jax.simulation.faults.observing import ViolationError
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    DrawnIsland,
    DrawnStandby,
    Schedule,
)
from diloco_jax.simulation.faults.standby_faults import (
    LoadCrash,
    MandateAway,
    MandateLate,
    NodeLoss,
    NodeStop,
    Part,
    StandbyCrash,
    StandbyFull,
    StandbyPartition,
)
from diloco_jax.simulation.faults.standby_world import StandbyWorld

AT_S = 9.0
LONG_S = 5 * LEASE_S
STANDBY = DrawnStandby(rates=(0.99, 1.01))
SCHEDULE = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=800,
    standby=STANDBY,
)


def played(*faults: AnyFault, load_s: float = 0.0) -> StandbyWorld:
    standby = replace(STANDBY, load_s=load_s)
    world = StandbyWorld(replace(SCHEDULE, standby=standby, faults=faults))
    world.play()
    assert world.struck.total() == len(faults)
    assert world.object.mandate is not None
    assert world.object.mandate.over
    return world


def loss(part: Part = "primary", *, down_s: float = 1.0, renamed: bool) -> NodeLoss:
    restart = Restart(down_s=down_s)
    return NodeLoss(at_s=AT_S, part=part, restart=restart, renamed=renamed)


def death(at_s: float = AT_S, down_s: float = LONG_S) -> CoordinatorCrash:
    return CoordinatorCrash(at_s=at_s, restart=Restart(down_s=down_s))


def leader(world: StandbyWorld) -> str:
    mandate = world.object.mandate
    assert mandate is not None
    return mandate.holder


def terms(world: StandbyWorld) -> set[int]:
    assert world.coordinator is not None
    return {fragment.version.term for fragment in world.coordinator.state.fragments}


def test_without_faults_the_first_leads_and_the_second_is_in_step() -> None:
    world = played()
    mandate = world.object.mandate
    assert mandate is not None
    assert (mandate.holder, mandate.in_step, mandate.reign) == ("first", "second", 1)
    assert not world.takeovers


@pytest.mark.parametrize(
    "fault",
    [
        death(),
        NodeStop(at_s=AT_S, part="primary", for_s=LONG_S),
        MandateAway(at_s=AT_S, to="primary", for_s=LONG_S),
    ],
)
def test_a_standby_in_step_goes_on_from_its_log(fault: AnyFault) -> None:
    world = played(fault)
    assert world.takeovers == {"log": 1}
    assert leader(world) == "second"
    assert terms(world) == {1}


@pytest.mark.parametrize(
    "fault",
    [
        death(down_s=1.0),
        NodeStop(at_s=AT_S, part="primary", for_s=1.0),
        StandbyPartition(at_s=AT_S, for_s=LONG_S),
        StandbyCrash(at_s=AT_S, down_s=LONG_S),
        NodeStop(at_s=AT_S, part="standby", for_s=LONG_S),
        MandateAway(at_s=AT_S, to="both", for_s=LONG_S),
        MandateAway(at_s=AT_S, to="standby", for_s=LONG_S),
        MandateLate(at_s=AT_S, to="standby", for_s=LONG_S, late_s=LONG_S),
        StandbyFull(at_s=AT_S, for_s=LONG_S),
        loss("standby", renamed=False),
        loss("standby", renamed=True),
    ],
)
def test_a_primary_that_can_lead_stays(fault: AnyFault) -> None:
    world = played(fault)
    assert not world.takeovers
    assert leader(world) == "first"


@pytest.mark.parametrize(
    "away",
    [
        StandbyPartition(at_s=AT_S - 3, for_s=LONG_S),
        StandbyCrash(at_s=AT_S - 3, down_s=3.5),
    ],
)
def test_a_standby_that_is_not_in_step_gathers(away: AnyFault) -> None:
    world = played(away, death(down_s=2 * LONG_S))
    assert world.takeovers == {"gathering": 1}
    assert leader(world) == "second"
    assert terms(world) == {2}


@pytest.mark.parametrize("renamed", [False, True])
def test_a_primary_that_lost_its_disk_follows_who_was_in_step(renamed: bool) -> None:
    world = played(loss(renamed=renamed))
    assert world.takeovers == {"log": 1}
    assert leader(world) == "second"
    assert terms(world) == {1}
    mandate = world.object.mandate
    assert mandate is not None
    assert mandate.in_step == ("first.1" if renamed else "first")


@pytest.mark.parametrize("renamed", [False, True])
def test_a_primary_that_lost_its_disk_gathers_without_a_standby(renamed: bool) -> None:
    away = StandbyCrash(at_s=AT_S - 3, down_s=2 * LONG_S)
    world = played(away, loss(renamed=renamed))
    assert world.takeovers == {"gathering": 1}
    assert leader(world) == ("first.1" if renamed else "first")
    assert terms(world) == {2}


def test_it_would_lead_from_nothing_if_what_the_mandate_says_of_it_counted() -> None:
    away = StandbyCrash(at_s=AT_S - 3, down_s=2 * LONG_S)
    with planted("a_lost_disk_counts"), pytest.raises(ViolationError, match="seen"):
        played(away, loss(renamed=False))


def test_a_primary_that_dies_while_it_loads_is_followed_from_the_log() -> None:
    again = LoadCrash(
        at_s=AT_S, down_s=1.0, loading_s=1.0, restart=Restart(down_s=2 * LONG_S)
    )
    world = played(again, load_s=2.0)
    assert world.takeovers == {"log": 1}
    assert leader(world) == "second"
    assert terms(world) == {1}
    # With its state loaded it has let something be seen.
    assert played(again, load_s=0.1).takeovers == {"gathering": 1}


def test_a_standby_whose_disk_is_full_is_not_in_step() -> None:
    world = played(StandbyFull(at_s=AT_S - 3, for_s=2 * LONG_S), death())
    assert world.takeovers == {"gathering": 1}


LATE = (
    NodeStop(at_s=AT_S, part="primary", for_s=1.5 * LEASE_S),
    MandateLate(
        at_s=AT_S + 0.95 * LEASE_S, to="standby", for_s=LEASE_S / 2, late_s=LONG_S
    ),
)
"""The standby claims the mandate, and its request comes once the primary is back."""


def test_a_request_that_comes_late_changes_nothing() -> None:
    world = played(*LATE)
    assert not world.takeovers
    assert leader(world) == "first"


def test_it_would_if_no_generation_counted() -> None:
    with planted("late_writes_count"), pytest.raises(ViolationError, match="mandate"):
        played(*LATE)


def test_both_end_once_the_run_is_over() -> None:
    world = played()
    assert all(node.retired for node in world.nodes.values())
    with planted("a_standby_does_not_end"), pytest.raises(ViolationError, match="over"):
        played()


def test_who_was_followed_follows_then_and_takes_over_again() -> None:
    world = played(death(down_s=2 * LEASE_S), death(at_s=3 * AT_S))
    assert world.takeovers == {"log": 2}
    assert leader(world) == "first"


def test_records_that_never_were_are_taken_back() -> None:
    _, config = SCHEDULE.configs()
    lineage = Lineage(config)
    lineage.recovered(initial(config))
    for through in (4, 8):
        lineage.persisted(Ticks(through=through))
    lineage.take_back(0)
    assert lineage.last == 0
    lineage.persisted(Ticks(through=6))
    assert lineage.last == 1


def test_what_was_seen_of_a_record_that_never_was_is_a_violation() -> None:
    world = StandbyWorld(SCHEDULE)
    world.play()
    with pytest.raises(ViolationError):
        world.lineage.take_back(2)
