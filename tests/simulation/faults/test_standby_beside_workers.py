"""A coordinator with a standby and workers among faults, and disks that are damaged."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from diloco_jax.protocol.records import Durable, TermBegun
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.fault import Restart
from diloco_jax.simulation.faults.kinds import AnyFault, CoordinatorCrash
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    DrawnIsland,
    DrawnStandby,
    Schedule,
)
from diloco_jax.simulation.faults.standby_disk import FollowedDisk
from diloco_jax.simulation.faults.standby_faults import (
    DiskDamage,
    NodeStop,
    StandbyCrash,
)
from diloco_jax.simulation.faults.standby_world import StandbyWorld
from diloco_jax.simulation.faults.worker_crashes import WorkerCrash, WorkerPartition

AT_S = 9.0
LONG_S = 5 * LEASE_S
SCHEDULE = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=1200,
    fragment_sizes=(2, 1, 1, 2),
    workers=2,
    standby=DrawnStandby(rates=(0.99, 1.01)),
)


class Watched(StandbyWorld):
    """Keeps when whoever led then began, and how often a fragment began a term."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.terms_begun: list[int] = []
        self.led: list[tuple[float, str]] = []

    def persisted(self, by: FaultyCoordinator, record: Durable) -> None:
        super().persisted(by, record)
        if isinstance(record, TermBegun):
            self.terms_begun.append(record.fragment)

    def _made(self, *arguments: Any) -> FaultyCoordinator:
        self.led.append((self.clock.now, self._leading.name))
        return super()._made(*arguments)


def played(*faults: AnyFault, **fields: Any) -> Watched:
    world = Watched(replace(SCHEDULE, faults=faults, **fields))
    world.play()
    assert world.struck.total() == len(faults)
    assert all(merges > 3 for merges in world.merges)
    return world


def death(at_s: float, down_s: float = LONG_S, **restart: Any) -> CoordinatorCrash:
    return CoordinatorCrash(at_s=at_s, restart=Restart(down_s=down_s, **restart))


def terms(world: StandbyWorld) -> list[int]:
    assert world.coordinator is not None
    return [f.version.term for f in world.coordinator.state.fragments]


@pytest.mark.parametrize("lost", [False, True])
def test_a_worker_that_dies_costs_no_standby(lost: bool) -> None:
    world = played(WorkerCrash(at_s=AT_S, worker=0, down_s=1.0, disk_lost=lost))
    assert not world.takeovers
    mandate = world.object.mandate
    assert mandate is not None
    assert mandate.in_step == "second"
    assert len(set(terms(world))) == 1 + lost


def test_what_was_gathered_for_a_worker_is_at_the_standby() -> None:
    """Its disk has the anchor, so nothing is gathered a second time."""
    lost = WorkerCrash(at_s=AT_S, worker=0, down_s=1.0, disk_lost=True)
    faults = (lost, death(AT_S + 3))
    world = played(*faults)
    assert world.takeovers == {"log": 1}
    assert world.terms_begun == [0, 1]
    with mock.patch.object(FollowedDisk, "begin_fragment", Disk.begin_fragment):
        assert played(*faults).terms_begun == [0, 1, 0, 1], "it would lack the anchors"


def test_a_standby_takes_over_while_a_worker_is_away() -> None:
    for disk_lost in (False, True):
        away = WorkerCrash(at_s=AT_S, worker=1, down_s=LONG_S, disk_lost=disk_lost)
        world = played(away, death(AT_S + 1))
        assert world.takeovers == {"log": 1}
        assert world.terms_begun == [], "the disk of the standby has it all"


def test_it_takes_over_while_the_lead_does_not_reach_a_worker() -> None:
    world = played(WorkerPartition(at_s=AT_S, worker=1, for_s=LONG_S), death(AT_S + 1))
    assert world.takeovers == {"log": 1}
    assert world.terms_begun == []


def test_a_worker_that_dies_while_the_lead_is_stopped_is_missed_later() -> None:
    stop = NodeStop(at_s=AT_S, part="primary", for_s=0.5 * LEASE_S)
    world = played(stop, WorkerCrash(at_s=AT_S - 0.5, worker=0, down_s=1.0, effects=9))
    assert not world.takeovers
    assert set(terms(world)) == {1}


def test_workers_that_outlive_a_lead_are_heard_on_their_machine_alone() -> None:
    """A lead that is back in time finds their deltas; a standby has workers of its
    own."""
    find, found = FaultyCoordinator.find, []

    def counted(self: FaultyCoordinator, *arguments: Any) -> None:
        found.append(arguments)
        find(self, *arguments)

    with mock.patch.object(FaultyCoordinator, "find", counted):
        played(death(AT_S, down_s=0.5, workers_live=True))
        in_time = len(found)
        world = played(death(AT_S, down_s=LONG_S, workers_live=True))
    assert in_time > 0
    assert len(found) == in_time
    assert world.takeovers == {"log": 1}


def test_a_primary_whose_disk_is_damaged_cedes_to_who_is_in_step() -> None:
    damage = DiskDamage(at_s=AT_S, restart=Restart(down_s=0.5))
    world = played(damage)
    assert world.takeovers == {"log": 1}
    assert [name for _, name in world.led] == ["first", "second"]
    began = world.led[1][0]
    dead = played(death(AT_S))
    assert began < dead.led[1][0], "nobody waits for the end of the mandate"
    mandate = world.object.mandate
    assert mandate is not None
    assert (mandate.holder, mandate.in_step, mandate.ceded) == (
        "second",
        "first",
        False,
    )
    assert set(terms(world)) == {1}


def test_it_cedes_nothing_without_one() -> None:
    away = StandbyCrash(at_s=AT_S - 3, down_s=LONG_S)
    world = played(away, DiskDamage(at_s=AT_S, restart=Restart(down_s=0.5)))
    assert not world.takeovers
    assert {name for _, name in world.led} == {"first"}
