"""An operator exports a run that goes on, stops it, and resumes it; and the
coordinator's machine sleeps while islands go on."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from msgspec.structs import replace

from diloco_jax.coordinator.lead import AnyEffect
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.faults import (
    LEASE_S,
    AnyFault,
    CoordinatorCrash,
    DiskFailure,
    DiskLost,
    Export,
    MachineSleep,
    Restart,
    RunStop,
)
from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule
from diloco_jax.simulation.faults.world import FaultyWorld

AT_S, FOR_S = 9.0, 6.0
ASLEEP_S = 3 * LEASE_S
SCHEDULE = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=800,
    outage_s=110.0,
)
STOP = RunStop(at_s=AT_S, for_s=FOR_S)
Done = list[tuple[float, AnyEffect]]


def played(*faults: AnyFault) -> FaultyWorld:
    world, wrong = play(replace(SCHEDULE, faults=faults))
    assert wrong is None
    assert world.struck.total() == len(faults)
    assert world.coordinator is not None
    return world


@pytest.fixture
def done() -> Iterator[Done]:
    """The effects that are carried out, with their times."""
    effects: Done = []
    carry_out = FaultyCoordinator.carry_out

    def noting(coordinator: FaultyCoordinator, effect: AnyEffect) -> None:
        effects.append((coordinator.clock.now, effect))
        carry_out(coordinator, effect)

    with mock.patch.object(FaultyCoordinator, "carry_out", noting):
        yield effects


def test_an_export_keeps_every_fragment_once(done: Done) -> None:
    def kept() -> list[tuple[int, int]]:
        found = [effect for _, effect in done if isinstance(effect, KeepFragment)]
        done.clear()
        return [(keep.cycle, keep.fragment) for keep in found]

    before = played()
    usual = kept()
    played(Export(at_s=11.5))  # In a cycle that is not kept anyway.
    now = kept()
    assert len(now) == len(set(now)) > len(set(usual))
    assert {f for _, f in now} == set(range(before.config.fragments))


def test_a_run_that_is_stopped_and_resumed_ends_with_its_tokens() -> None:
    world = played(STOP)
    assert [island.incarnation for island in world.islands.values()] == [2, 2]
    assert world.coordinator is not None
    state = world.coordinator.state
    for name in state.islands:
        lost = [fragment.accounts[name].lost_tokens for fragment in state.fragments]
        assert any("stopped" in reasons for reasons in lost)
    assert world.clock.now > played().clock.now + FOR_S


@pytest.mark.parametrize(
    "fault",
    [
        *(
            CoordinatorCrash(
                at_s=AT_S + FOR_S / 2, effects=effects, restart=Restart(down_s=1.0)
            )
            for effects in range(5)
        ),
        DiskFailure(at_s=AT_S + FOR_S / 2, appends=1, restart=Restart(down_s=1.0)),
    ],
)
def test_it_survives_a_fault_as_it_is_resumed(fault: AnyFault) -> None:
    played(STOP, fault)


# ---- a machine that sleeps -----------------------------------------------------------


def assert_all_stayed(world: FaultyWorld) -> None:
    """No island began again or lost a token."""
    assert world.coordinator is not None
    state = world.coordinator.state
    assert {island.incarnation for island in state.islands.values()} == {1}
    lost = [a.lost_tokens for f in state.fragments for a in f.accounts.values()]
    assert not any(lost)


@pytest.mark.parametrize("for_s", [LEASE_S / 2, ASLEEP_S])
def test_nothing_is_done_or_lost_meanwhile(for_s: float, done: Done) -> None:
    world = played(MachineSleep(at_s=AT_S, for_s=for_s))
    assert not [at_s for at_s, _ in done if AT_S < at_s < AT_S + for_s]
    assert_all_stayed(world)


def test_it_sleeps_at_the_end_of_the_run() -> None:
    world = played(MachineSleep(at_s=0.0, for_s=ASLEEP_S, at_end=True))
    assert world.clock.now > played().clock.now + ASLEEP_S / 2
    assert_all_stayed(world)


def test_its_power_fails_while_it_sleeps() -> None:
    lost = DiskLost(at_s=AT_S + 1, restart=Restart(down_s=1.0))
    world = played(MachineSleep(at_s=AT_S, for_s=ASLEEP_S), lost)
    assert world.coordinator is not None
    assert world.coordinator.state.term == 2
