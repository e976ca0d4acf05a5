"""The coordinator's machine sleeps while islands go on."""

from unittest import mock

import pytest
from msgspec.structs import replace

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.faults import (
    LEASE_S,
    AnyFault,
    DiskLost,
    MachineSleep,
    Restart,
)
from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule
from diloco_jax.simulation.faults.world import FaultyWorld

AT_S, FOR_S = 9.0, 3 * LEASE_S
SCHEDULE = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=800,
    outage_s=110.0,
)


def played(schedule: Schedule, *faults: AnyFault) -> FaultyWorld:
    result = play(replace(schedule, faults=faults))
    assert result.wrong is None
    assert result.world.struck.total() == len(faults)
    return result.world


def assert_all_stayed(world: FaultyWorld) -> None:
    """No island began again or lost a token."""
    assert world.coordinator is not None
    state = world.coordinator.state
    assert {island.incarnation for island in state.islands.values()} == {1}
    lost = [a.lost_tokens for f in state.fragments for a in f.accounts.values()]
    assert not any(lost)


@pytest.mark.parametrize("for_s", [LEASE_S / 2, FOR_S])
def test_nothing_is_done_or_lost_meanwhile(for_s: float) -> None:
    times: list[float] = []
    carry_out = FaultyCoordinator.carry_out

    def noting(coordinator: FaultyCoordinator, effect: AnyEffect) -> None:
        times.append(coordinator.clock.now)
        carry_out(coordinator, effect)

    with mock.patch.object(FaultyCoordinator, "carry_out", noting):
        world = played(SCHEDULE, MachineSleep(at_s=AT_S, for_s=for_s))
    assert not [time for time in times if AT_S < time < AT_S + for_s]
    assert_all_stayed(world)


def test_its_clock_stands_still() -> None:
    before, after = played(SCHEDULE), played(SCHEDULE, MachineSleep(at_s=AT_S, for_s=5))
    assert before.coordinator is not None
    assert after.coordinator is not None
    assert after.coordinator.clock_offset == before.coordinator.clock_offset - 5


def test_it_sleeps_at_the_end_of_the_run() -> None:
    sleep = MachineSleep(at_s=0.0, for_s=FOR_S, at_end=True)
    world = played(SCHEDULE, sleep)
    assert world.clock.now > played(SCHEDULE).clock.now + FOR_S / 2
    assert_all_stayed(world)


def test_its_power_fails_while_it_sleeps() -> None:
    lost = DiskLost(at_s=AT_S + 1, restart=Restart(down_s=1.0))
    world = played(SCHEDULE, MachineSleep(at_s=AT_S, for_s=FOR_S), lost)
    assert world.coordinator is not None
    assert world.coordinator.state.term == 2
