"""An island's report of its steps is checked against the data leased to it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kit import TOKENS_PER_STEP, Driver, make_config, of, only, persisted, took
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import takes
from diloco_jax.protocol.coordinator.islands import FIRST_LEASE_STEPS
from diloco_jax.protocol.coordinator.state import Effect
from diloco_jax.protocol.messages import (
    Granted,
    Outstanding,
    Record,
    Refused,
    Version,
    Welcome,
)

LEASED = 2 * FIRST_LEASE_STEPS
"""Steps, of one sequence each, for which a join is leased data at once."""


def put_out(d: Driver, effects: list[Effect], *shown: str) -> None:
    """`a` is refused, its incarnation over, and its books say what they said before."""
    refuse = only(effects, Refused)
    assert (refuse.island, refuse.session, refuse.code) == ("a", "a1", "claims")
    for text in (*shown, "'a'", "start it again with incarnation 2"):
        assert text in refuse.message
    (left,) = persisted(effects, "left")
    assert (left["reason"], left["said"]) == ("refused", refuse.message)
    assert d.state.islands["a"].status == "gone"
    d.hello("a", 2)
    d.report("a", LEASED)
    assert d.state.islands["a"].status == "live"


def test_an_island_may_make_every_step_that_was_leased_to_it() -> None:
    d = Driver(outage_budget_s=1e6)
    d.join("a")
    d.report("a", LEASED)
    assert d.state.islands["a"].steps == LEASED
    sequences = d.state.islands["a"].sequences_granted
    d.now += sequences
    d.report("a", sequences)
    assert d.state.islands["a"].steps == sequences


@pytest.mark.parametrize("believed", [0, 7])
def test_more_steps_than_were_leased_are_not_believed(believed: int) -> None:
    d = Driver(total_tokens=10**4)
    d.hello("a")
    d.report("a", believed, step_seconds=0)
    effects = d.report("a", LEASED + 1, step_seconds=0)
    assert d.state.phase == "running"
    assert d.state.progress_tokens == believed * TOKENS_PER_STEP
    assert d.totals("a").lost == ({"refused": 10 * believed} if believed else {})
    put_out(d, effects, f"{LEASED + 1} steps of 1", f"{LEASED} were leased to it")


def record(**fields: Any) -> Record:
    return Record(**{"seq": 1, "kind": "took", "fragment": 0, "step": 0, **fields})


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (
            record(step=5, tick=1),
            r"1 \(took\) names steps \[0, 5\), but it has made 4",
        ),
        (record(step=2, start=3, tick=1), r"\[3, 2\)"),
        (record(step=5, kind="adopted"), "adopted"),
        (record(step=0, start=5, kind="carried"), "carried"),
    ],
)
def test_a_record_of_steps_that_were_not_made_is_not_believed(
    wrong: Record, shown: str
) -> None:
    d = Driver()
    d.join("a")
    effects = d.report("a", 4, wrong)
    message = only(effects, Refused).message
    assert re.search(shown, message), message
    put_out(d, effects)


def test_a_hello_with_a_take_of_steps_to_come_is_put_out() -> None:
    d = Driver()
    d.join("a")
    held = Outstanding(fragment=0, tick=1, start=0, end=6, base=Version(), seq=1)
    effects = d.hello("a", steps=5, phase="training", outstanding=(held,))
    assert of(effects, Welcome) == []
    put_out(d, effects, "tick 1, holds steps [0, 6), but it has made 5")


def test_a_coordinator_that_came_back_knows_what_it_leased() -> None:
    d = Driver()
    d.hello("a")
    d.crash()
    d.hello("a", steps=LEASED, phase="training")
    assert d.state.islands["a"].steps == LEASED
    d.crash()
    put_out(d, d.hello("a", steps=LEASED + 1, phase="training"))


@pytest.mark.parametrize(
    ("steps", "granted", "counted", "shown"),
    [
        (10, 10, 10, ""),
        (11, 10, 0, "11 steps of 1"),
        (90, 101, 0, "granted at most 100"),
        (10, 10, 11, "has 110 tokens of its steps, but its 10 steps have 100"),
    ],
)
def test_what_an_earlier_term_leased_is_bounded_too(
    steps: int, granted: int, counted: int, shown: str
) -> None:
    d = Driver()
    d.state = replace(
        d.state,
        next_position=100,
        term=2,
        books=2,
        fragments=tuple(replace(f, version=Version(2, 0)) for f in d.state.fragments),
    )
    own = counted * TOKENS_PER_STEP
    effects = d.hello(
        "a", steps=steps, sequences_granted=granted, own_tokens=own, term=1
    )
    if not shown:
        only(effects, Welcome)
        assert of(effects, Granted)
        return
    refuse = only(effects, Refused)
    assert refuse.code == "claims"
    assert shown in refuse.message
    assert d.state.islands == {}


# ---- who is let in ----------------------------------------------------------------


def only_named(**admitted: int | None) -> Driver:
    return Driver(make_config(admitted=admitted, sequence_length=TOKENS_PER_STEP))


def test_a_name_that_nobody_knows_is_refused() -> None:
    d = only_named(a=1, b=2)
    d.hello("a")
    refuse = only(d.hello("c"), Refused)
    assert refuse.code == "unknown_island"
    for text in ("no island 'c'", "'a', 'b'", "placement.admit", "the run goes on"):
        assert text in refuse.message
    assert list(d.state.islands) == ["a"]


def test_an_island_of_another_batch_is_refused() -> None:
    d = only_named(b=2, c=None)
    refuse = only(d.hello("b", tokens_per_step=10, sequences_per_step=1), Refused)
    assert refuse.code == "config"
    for text in ("1 sequences and 10 tokens", "2 and 20", "islands.b.batch_size"):
        assert text in refuse.message
    only(d.hello("b", tokens_per_step=2**30, sequences_per_step=2), Refused)
    only(d.hello("b", tokens_per_step=20, sequences_per_step=2), Welcome)
    only(d.hello("c", tokens_per_step=31, sequences_per_step=3), Refused)
    only(d.hello("c", tokens_per_step=30, sequences_per_step=3), Welcome)


# ---- whose bytes are wanted -------------------------------------------------------


def awaited(d: Driver, name: str, tick: int, incarnation: int = 1) -> bool:
    return takes.is_awaited(d.fragment(0), name, incarnation, tick)


def test_bytes_are_wanted_from_the_request_to_the_merge() -> None:
    d = Driver(quorum=2)
    d.join("a", "b")
    assert not awaited(d, "a", 1)
    d.play("a=2 b=2")
    assert awaited(d, "a", 1), "also before its record, which may come later"
    assert not awaited(d, "a", 2)
    assert not awaited(d, "a", 1, incarnation=2)
    assert not awaited(d, "stranger", 1)
    d.take("a", 0, 2)
    assert awaited(d, "a", 1), "repeated"
    d.play("b/0=2 /0")
    assert not awaited(d, "a", 1)


def test_after_a_crash_bytes_are_wanted_once_their_record_is_here() -> None:
    d = Driver()
    d.play("a.joins a=2 crash")
    held = Outstanding(fragment=0, tick=1, start=0, end=2, base=Version(), seq=1)
    d.hello("a", steps=2, phase="training", outstanding=(held,))
    assert not awaited(d, "a", 1)
    d.report("a", 2, took(1, 0, 1, 0, 2))
    assert awaited(d, "a", 1)
