"""A run whose first parameters one island gives: who waits, for what, and how long."""

from __future__ import annotations

from typing import TypeVar

import pytest
from kit import make_config

from diloco_jax.protocol.coordinator import giving
from diloco_jax.protocol.coordinator.events import Disconnected, Said, Tell, Timer
from diloco_jax.protocol.coordinator.gathering import (
    AnchorArrived,
    Discard,
    Effect,
    Event,
    GiveUp,
    Offered,
    Open,
    Postpone,
)
from diloco_jax.protocol.messages import AnchorRequest, Hello, Refused, Report, Welcome
from diloco_jax.protocol.values import FIRST_VERSION

CONFIG = make_config(run_id="run-1", compile_budget_s=600.0, outage_budget_s=30.0)
E = TypeVar("E", bound=Effect)


class Giving:
    """Island a gives two fragments."""

    def __init__(self) -> None:
        self.now = 50.0
        self.state = giving.begin(CONFIG, frozenset("a"), self.now)

    def feed(self, event: Event) -> list[Effect]:
        self.state, effects = giving.step(CONFIG, self.state, event, self.now)
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.feed(Timer())

    def hello(self, name="a", incarnation=1, session="", differences=(), run_id=""):
        return self.feed(
            Offered(
                hello=Hello(
                    run_id=run_id,
                    fingerprint=CONFIG.fingerprint,
                    island=name,
                    incarnation=incarnation,
                    session=session or f"{name}-{incarnation}",
                    tokens_per_step=8,
                    sequences_per_step=1,
                ),
                differences=differences,
            )
        )

    def lives(self, incarnation=1):
        """It reports."""
        report = Report(phase="compiling", steps=0, step_seconds=0.0)
        session = f"a-{incarnation}"
        return self.feed(Said(island="a", session=session, message=report))

    def arrive(self, fragment, incarnation=1, version=FIRST_VERSION):
        return self.feed(
            AnchorArrived(
                island="a", incarnation=incarnation, fragment=fragment, version=version
            )
        )


def told(effects, kind):
    return [
        e.message for e in effects if isinstance(e, Tell) if isinstance(e.message, kind)
    ]


def only(effects, kind: type[E]) -> E:
    (found,) = (effect for effect in effects if isinstance(effect, kind))
    return found


@pytest.fixture
def run():
    return Giving()


def test_each_fragment_is_asked_for_and_the_run_begins_with_all(run):
    begun = run.hello()
    (welcome,) = told(begun, Welcome)
    assert (welcome.run_id, welcome.term, welcome.versions) == ("run-1", 0, ())
    assert [r.fragment for r in told(begun, AnchorRequest)] == [0]
    assert [r.fragment for r in told(run.arrive(0), AnchorRequest)] == [1]
    opened = only(run.arrive(1), Open)
    assert opened.run_id == "run-1"
    assert opened.versions == (FIRST_VERSION,) * 2
    assert opened.sources == ("a", "a")
    assert (opened.tokens, opened.next_position) == (0, 0)


def test_others_are_told_for_whom_they_wait(run):
    assert "island 'a', of which 0 of 2" in only(run.hello("b"), Postpone).message
    run.hello()
    run.arrive(0)
    effects = run.hello("b")
    assert "1 of 2 fragments" in only(effects, Postpone).message
    assert len(effects) == 1


def test_another_attempt_gives_all_of_them_anew(run):
    run.hello()
    run.arrive(0)
    effects = run.hello(incarnation=2)
    assert only(effects, Discard).fragment == 1
    (fenced,) = told(effects, Refused)
    assert fenced.code == "fenced"
    assert [r.fragment for r in told(effects, AnchorRequest)] == [0]
    assert run.arrive(0) == [], "of the attempt before"
    assert not run.state.got
    run.arrive(0, incarnation=2)
    only(run.arrive(1, incarnation=2), Open)


def test_a_connection_that_broke_loses_nothing(run):
    run.hello()
    run.arrive(0)
    run.feed(Disconnected(island="a", session="a-1"))
    again = run.hello(run_id="run-1")
    assert [r.fragment for r in told(again, AnchorRequest)] == [1]
    only(run.arrive(1), Open)


def test_what_was_not_asked_for_does_not_count(run):
    run.hello()
    assert run.arrive(1) == []
    assert run.arrive(0, version=FIRST_VERSION.next()) == []
    assert not run.state.got


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"differences": ("seed: 1 here, 2 there",)}, "config"),
        ({"run_id": "other"}, "run_id"),
        ({"incarnation": 1}, "fenced"),
        ({"incarnation": 2, "session": "other"}, "name_in_use"),
    ],
)
def test_who_cannot_give_is_refused(run, changes, code):
    run.hello(incarnation=2)
    (refused,) = told(run.hello(**({"incarnation": 3} | changes)), Refused)
    assert refused.code == code


def test_it_is_waited_for_until_a_deadline_that_it_can_meet_by_compiling(run):
    assert run.wait(CONFIG.compile_budget_s - 1) == []
    run.hello()
    for _ in range(12):
        assert not run.wait(CONFIG.lease_s / 2)
        run.lives()
    assert [r.fragment for r in told(run.arrive(0), AnchorRequest)] == [1]


def test_where_it_does_not_come_the_coordinator_gives_up(run):
    gone = only(run.wait(CONFIG.compile_budget_s), GiveUp).message
    assert "island 'a'" in gone
    assert "compile_budget_s = 600" in gone
    assert run.wait(1) == []


def test_where_it_falls_silent_another_attempt_is_waited_for(run):
    run.hello()
    run.arrive(0)
    assert only(run.wait(CONFIG.lease_s), Discard).fragment == 1
    assert not run.state.got
    run.hello(incarnation=2)
    run.arrive(0, incarnation=2)
    only(run.arrive(1, incarnation=2), Open)


def test_where_it_lives_and_sends_nothing_the_coordinator_gives_up(run):
    run.hello()
    for _ in range(int(630 / (CONFIG.lease_s / 2))):
        run.now += CONFIG.lease_s / 2
        effects = run.lives()
    message = only(effects + run.wait(CONFIG.lease_s / 2), GiveUp).message
    assert "fragment 0" in message


def test_the_next_deadline_is_that_of_what_is_awaited(run):
    assert giving.next_deadline(run.state, run.now) == run.now + 600.0
    run.hello()
    assert giving.next_deadline(run.state, run.now) == run.now + CONFIG.lease_s
