"""An operator has steps traced of an island that makes some."""

from __future__ import annotations

import pytest
from kit import Driver, make_config
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import steering
from diloco_jax.protocol.coordinator.state import State, with_island
from diloco_jax.protocol.messages import ProfileOrder

ORDER = ProfileOrder(island="a", steps=8)


def state_of(**changes: object) -> State:
    d = Driver(make_config())
    d.join("a")
    d.report("a", 2)
    island = replace(d.state.islands["a"], **changes)
    return with_island(d.state, island)


def test_an_island_that_trains_is_asked() -> None:
    assert steering.trace_refusal(state_of(), ORDER) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"status": "absent"}, "'a' is absent, and makes no steps"),
        ({"status": "gone"}, "'a' is gone"),
        ({"phase": "compiling"}, "'a' is compiling, not training"),
        ({"phase": "stopped"}, "'a' is stopped, not training"),
    ],
)
def test_one_that_makes_no_steps_is_not(changes: dict[str, str], why: str) -> None:
    assert why in steering.trace_refusal(state_of(**changes), ORDER)


def test_the_known_ones_are_named() -> None:
    wrong = steering.trace_refusal(state_of(), ProfileOrder(island="x"))
    assert "no island 'x'" in wrong
    assert "'a'" in wrong


def test_slower_islands_have_more_time() -> None:
    assert steering.trace_within_s(state_of(step_seconds=2.0), ORDER, 10.0) == 210.0
