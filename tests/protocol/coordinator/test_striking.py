"""An operator strikes processes of a run that lets it."""

from __future__ import annotations

import pytest
from kit import Driver, make_config
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import striking
from diloco_jax.protocol.messages import Refused, StrikeOrder

KILL = StrikeOrder(who="a", kind="kill")


def refusal(order: StrikeOrder, *, chaos: bool = True) -> Refused:
    d = Driver(make_config())
    d.join("a", "b")
    d.disconnect("b")
    d.wait(60.0)
    refused = striking.refusal(replace(d.config, chaos=chaos), d.state, order)
    assert refused is not None
    return refused


def test_a_run_that_lets_nobody_strike_it_says_how() -> None:
    refused = refusal(KILL, chaos=False)
    assert "set placement.chaos = True" in refused.message
    assert refused.code == striking.NEVER
    assert refusal(StrikeOrder(who=None, kind="kill"), chaos=False) == refused


def test_live_islands_and_the_coordinator_are_struck() -> None:
    d = Driver(make_config())
    d.join("a")
    config = replace(d.config, chaos=True)
    assert striking.refusal(config, d.state, KILL) is None
    stop = StrikeOrder(who=None, kind="stop", seconds=2.0)
    assert striking.refusal(config, d.state, stop) is None


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (StrikeOrder(who="x", kind="kill"), "'x' is not in the run; live are"),
        (StrikeOrder(who="b", kind="kill"), "'b' is absent"),
        (StrikeOrder(who=None, kind="kill", seconds=3.0), "a kill has no seconds"),
        (StrikeOrder(who=None, kind="stop"), "a stop has some"),
    ],
)
def test_what_cannot_be_struck_is_told(order: StrikeOrder, why: str) -> None:
    refused = refusal(order)
    assert why in refused.message
    # An island may be back before the next strike.
    assert (refused.code == striking.NEVER) == (order.who is None)
