"""A run that is over goes on to more tokens, among faults."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from diloco_jax.config import ConfigError
from diloco_jax.simulation.faults import draw, liveness
from diloco_jax.simulation.faults.faults import CoordinatorCrash, Restart
from diloco_jax.simulation.faults.play import play, play_seed
from diloco_jax.simulation.faults.schedule import (
    MOST_STEPS,
    RESTART_S,
    DrawnIsland,
    Schedule,
    from_json,
)
from diloco_jax.simulation.faults.world import FaultyWorld

FIRST, MORE = 800, 2000
SCHEDULE = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=FIRST,
    extended_to=(MORE,),
    outage_s=110.0,
)
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "workers": {"workers": 2, "fragment_sizes": (2, 1, 1, 2)},
}


def played(schedule: Schedule) -> FaultyWorld:
    world = FaultyWorld(schedule)
    world.play()
    assert world.coordinator is not None
    assert world.coordinator.state.phase == "done"
    return world


def tokens(world: FaultyWorld) -> int:
    assert world.coordinator is not None
    return world.coordinator.state.progress_tokens


@pytest.mark.parametrize("beside", BESIDE)
def test_a_run_that_is_over_goes_on(beside: str) -> None:
    once = played(replace(SCHEDULE, extended_to=(), **BESIDE[beside]))
    assert FIRST <= tokens(once) < MORE
    world = played(replace(SCHEDULE, **BESIDE[beside]))
    assert tokens(world) >= MORE
    assert world.extensions == 1
    assert all(n > of for n, of in zip(world.merges, once.merges, strict=True))
    assert [island.incarnation for island in world.islands.values()] == [2, 2]


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("effects", [0, 1, 2, 5])
def test_a_kill_as_it_is_extended_costs_nothing(beside: str, effects: int) -> None:
    schedule = replace(SCHEDULE, **BESIDE[beside])
    over_s = played(replace(schedule, extended_to=())).clock.now
    crash = CoordinatorCrash(
        at_s=over_s + RESTART_S / 2, effects=effects, restart=Restart(down_s=1.0)
    )
    world = played(replace(schedule, faults=(crash,)))
    assert world.struck == {"coordinator_crash": 1}
    assert tokens(world) >= MORE


def test_what_a_run_has_already_extends_nothing() -> None:
    world = played(replace(SCHEDULE, extended_to=(FIRST,)))
    assert world.extensions == 0
    again = played(replace(SCHEDULE, extended_to=(MORE, FIRST, 2 * MORE)))
    assert again.extensions == 2


def test_a_run_that_was_over_too_soon_is_extended_until_enough_happened() -> None:
    """Its schedule then plays the same."""
    losing = (seed for seed in range(100) if draw.draw(seed).rule.loses_steps)
    with mock.patch.object(draw, "LOSING_SHARE", 0.05):
        one = play_seed(next(losing))
    assert one.wrong is None
    assert one.is_full
    assert one.world.extensions == len(one.world.schedule.extended_to) > 0
    again = play(from_json(one.world.schedule.json()))
    assert again.world.clock.now == one.world.clock.now
    assert again.world.merges == one.world.merges


def test_a_run_that_is_not_over_after_its_extension_is_a_violation() -> None:
    once_s = played(replace(SCHEDULE, extended_to=())).clock.now
    then_s = played(SCHEDULE).clock.now - once_s
    assert then_s > once_s, "a bound between them is one for the extension alone"
    for within_s, found in ((then_s + 1.0, False), (then_s - 2.0, True)):
        with mock.patch.object(liveness, "over_within_s", return_value=within_s):
            wrong = play(SCHEDULE).wrong
        assert (wrong is not None) == found
        assert wrong is None or "is not over" in wrong.what


def test_an_extension_that_takes_too_long_is_refused() -> None:
    longest = int(MOST_STEPS * SCHEDULE.tokens_per_s)
    text = json.loads(replace(SCHEDULE, extended_to=(longest,)).json())
    with pytest.raises(ConfigError, match="lower total_tokens or extended_to"):
        from_json(json.dumps(text))
