"""A standby that is asked to end: while it follows, takes over, and leads."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from diloco_jax.cluster.commands import free_port
from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.coordinator.standby.node import StandbyNode, StandbyOutcome

ASKING = (signal.SIGTERM, signal.SIGINT)
ENDED = StandbyOutcome("")


@pytest.fixture
def standby(tmp_path: Path) -> StandbyNode:
    placement = Placement(
        mandate=str(tmp_path / "mandate"),
        bind=f"127.0.0.1:{free_port()}",
        time_budget_s=1.5,
    )
    workdir = tmp_path / "two"
    workdir.mkdir()
    config = Config(islands={"a": IslandConfig()}, placement=placement)
    return StandbyNode(config, workdir, "127.0.0.1:1", None)


@pytest.mark.parametrize("number", ASKING)
def test_one_that_follows_ends(standby: StandbyNode, number: signal.Signals) -> None:
    wait = standby._wait

    def asked_as_it_waits() -> None:
        signal.raise_signal(number)
        wait()

    standby._wait = asked_as_it_waits  # type: ignore[method-assign]
    assert standby.run() == ENDED


@pytest.mark.parametrize("by", ["log", "gathering"])
def test_one_that_takes_over_does_not_lead(standby: StandbyNode, by: str) -> None:
    """The signal was lost, and the coordinator led until it was killed."""
    close = standby._close

    def asked_while_it_closes() -> None:
        close()
        signal.raise_signal(signal.SIGTERM)

    standby._close = asked_while_it_closes  # type: ignore[method-assign]
    standby._outcome = StandbyOutcome(by, "r")  # type: ignore[arg-type]
    assert standby.run() == ENDED


def test_one_that_leads_has_left_the_signals_to_the_coordinator(
    standby: StandbyNode,
) -> None:
    """Until that heeds them, it ends at once, as one that is no standby."""
    before = [signal.getsignal(number) for number in ASKING]
    standby._outcome = StandbyOutcome("log", "r")
    assert standby.run() == StandbyOutcome("log", "r")
    assert [signal.getsignal(number) for number in ASKING] == before
