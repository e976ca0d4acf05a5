"""Strikes on a run elsewhere: orders at their times, and costs from its status."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_jax.chaos.options import ChaosOptions
from diloco_jax.chaos.remote import CostWatch, _scheduled, carry_out
from diloco_jax.chaos.schedule import parse_strikes
from diloco_jax.config import ConfigError
from diloco_jax.protocol.coordinator import striking
from diloco_jax.protocol.messages import StrikeOrder
from diloco_jax.wire.errors import Busy, ConnectionLost, Refused, WireError

ISLANDS = ("a", "b")


class Run:
    """A run in virtual time: an island that is killed is back 3 s later, and merged 2 s
    after that; the coordinator answers nothing for 1.5 s."""

    def __init__(self) -> None:
        self.now, self.killed_at, self.down_at = 0.0, float("inf"), float("inf")
        self.orders: list[tuple[float, StrikeOrder]] = []
        self.refuses: WireError | None = None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def strike(self, order: StrikeOrder, timeout_s: float) -> dict[str, Any]:
        self._require_up()
        if self.refuses is not None:
            raise self.refuses
        if order.who is not None and 0.4 < self.now - self.killed_at < 3.0:
            raise Refused("absent", f"island {order.who!r} is absent")
        self.orders.append((self.now, order))
        if order.who is None:
            self.down_at = self.now
        elif order.kind == "kill":
            self.killed_at = self.now
        return {"who": order.who}

    def status(self, timeout_s: float) -> dict[str, Any]:
        self._require_up()
        since = self.now - self.killed_at
        away, again = 0.4 < since < 3.0, since >= 3.0
        merged = 100 * int(self.now) if since < 0 or since >= 5.0 else 0
        islands = {
            "a": {
                "state": "absent" if away else "training",
                "incarnation": 2 if again else 1,
                "tokens_merged": 1000 + merged,
                "tokens_lost": {"died": 40} if again else {},
            },
            "b": {
                "state": "training",
                "incarnation": 1,
                "tokens_merged": int(100 * self.now),
            },
        }
        total = sum(island["tokens_merged"] for island in islands.values())
        return {"islands": islands, "tokens_merged": total, "goodput": 0.9}

    def _require_up(self) -> None:
        if self.down_at < self.now < self.down_at + 1.5:
            raise ConnectionLost("it is away")


def struck(*texts: str) -> tuple[Run, CostWatch, list[str]]:
    run, said = Run(), list[str]()
    watch = CostWatch(run, 1.0)
    carry_out(
        parse_strikes(texts, ISLANDS),
        run,
        1.0,
        watch,
        said.append,
        look_s=0.25,
        clock=run.clock,
        sleep=run.sleep,
    )
    return run, watch, said


def test_an_island_that_is_killed() -> None:
    run, watch, said = struck("a@2s:kill")
    assert run.orders == [(2.0, StrikeOrder(who="a", kind="kill"))]
    (found,) = watch.outcomes()
    assert (found.detected_s, found.back_s, found.merged_s) == (0.5, 3.0, 5.0)
    assert found.tokens_lost == 40
    assert watch.done
    assert said == ["a@2s:kill"]


def test_an_island_that_is_not_back_is_left_out() -> None:
    run, watch, said = struck("a@2s:kill", "a@3s:kill", "b@6s:stop1")
    assert [at for at, _ in run.orders] == [2.0, 6.0]
    assert "a@3s:kill: a is not struck (island 'a' is absent)" in said
    assert [found.who for found in watch.outcomes()] == ["a", "b"]


@pytest.mark.parametrize(
    "refused", [Refused(striking.NEVER, "placement.chaos is off"), Busy("24 calls")]
)
def test_only_a_run_that_lets_nobody_strike_it_ends_the_schedule(
    refused: WireError,
) -> None:
    run, said = Run(), list[str]()
    run.refuses = refused
    strikes = parse_strikes(("a@2s:kill",), ISLANDS)
    watch = CostWatch(run, 1.0)

    def strike() -> None:
        carry_out(
            strikes, run, 1.0, watch, said.append, clock=run.clock, sleep=run.sleep
        )

    if isinstance(refused, Busy):
        strike()
        assert said == ["a@2s:kill: a is not struck (24 calls)"]
    else:
        with pytest.raises(Refused, match="is off"):
            strike()


def test_a_stop_that_nobody_notices_is_no_return() -> None:
    run, watch, _ = struck("b@1s:stop2")
    assert run.orders == [(1.0, StrikeOrder(who="b", kind="stop", seconds=2.0))]
    (found,) = watch.outcomes()
    assert (found.detected_s, found.back_s, found.merged_s) == (None, None, 2.25)


def test_a_coordinator_that_is_killed_answers_again() -> None:
    run, watch, said = struck("coordinator@1s:kill", "b@2s:stop1")
    assert run.orders == [(1.0, StrikeOrder(who=None, kind="kill"))]
    assert "b@2s:stop1: the coordinator is not reached (it is away)" in said
    (found,) = watch.outcomes()
    assert (found.detected_s, found.back_s, found.merged_s) == (0.25, 1.5, 1.75)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (ChaosOptions(strikes=("a@5s:partition3",)), "a@5s:partition3"),
        (ChaosOptions(strikes=("a@40:kill",)), "a@40:kill"),
        (ChaosOptions(twin=True), "--twin"),
        (ChaosOptions(link_bytes_per_s=5.0), "--link-bytes-per-s"),
    ],
)
def test_what_a_run_elsewhere_cannot_do_is_refused(
    options: ChaosOptions, what: str
) -> None:
    with pytest.raises(ConfigError, match="strikes itself, by kill and stop") as error:
        _scheduled(ISLANDS, options)
    assert what in str(error.value)


def test_a_random_schedule_has_its_islands_and_the_coordinator() -> None:
    found = _scheduled(ISLANDS, ChaosOptions(every_s=2.0, for_s=100.0))
    assert {strike.who for strike in found} == {("a",), ("b",), ("coordinator",)}
