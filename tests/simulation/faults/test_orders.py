"""An operator exports a run that goes on, stops it, and resumes it."""

from unittest import mock

import pytest
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.faults import (
    AnyFault,
    CoordinatorCrash,
    DiskFailure,
    Export,
    Restart,
    RunStop,
)
from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule
from diloco_jax.simulation.faults.world import FaultyWorld

AT_S, FOR_S = 9.0, 6.0
SCHEDULE = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=800,
    outage_s=110.0,
)


def played(*faults: AnyFault) -> FaultyWorld:
    result = play(replace(SCHEDULE, faults=faults))
    assert result.wrong is None
    assert result.world.struck.total() == len(faults)
    return result.world


def lost(world: FaultyWorld) -> dict[str, set[str]]:
    """Reasons for which tokens were lost, by island."""
    assert world.coordinator is not None
    state: State = world.coordinator.state
    return {
        name: {r for f in state.fragments for r in f.accounts[name].lost_tokens}
        for name in state.islands
    }


def test_an_export_keeps_every_fragment_once() -> None:
    kept: list[KeepFragment] = []
    carry_out = FaultyCoordinator.carry_out

    def noting(coordinator: FaultyCoordinator, effect: object) -> None:
        if isinstance(effect, KeepFragment):
            kept.append(effect)
        carry_out(coordinator, effect)  # type: ignore[arg-type]

    with mock.patch.object(FaultyCoordinator, "carry_out", noting):
        before = played()
        usual = {(k.cycle, k.fragment) for k in kept}
        kept.clear()
        played(Export(at_s=11.5))  # In a cycle that is not kept anyway.
    now = [(k.cycle, k.fragment) for k in kept]
    assert len(now) == len(set(now)) > len(usual)
    assert {f for _, f in now} == set(range(before.config.fragments))


def test_a_run_that_is_stopped_and_resumed_ends_with_its_tokens() -> None:
    world = played(RunStop(at_s=AT_S, for_s=FOR_S))
    assert [island.incarnation for island in world.islands.values()] == [2, 2]
    assert all("stopped" in reasons for reasons in lost(world).values())
    assert world.clock.now > played().clock.now + FOR_S


@pytest.mark.parametrize("effects", range(5))
def test_it_survives_a_kill_as_it_is_resumed(effects: int) -> None:
    crash = CoordinatorCrash(
        at_s=AT_S + FOR_S / 2, effects=effects, restart=Restart(down_s=1.0)
    )
    played(RunStop(at_s=AT_S, for_s=FOR_S), crash)


def test_it_survives_a_disk_that_fails_as_it_is_resumed() -> None:
    failure = DiskFailure(
        at_s=AT_S + FOR_S / 2, appends=1, written=False, restart=Restart(down_s=1.0)
    )
    played(RunStop(at_s=AT_S, for_s=FOR_S), failure)
