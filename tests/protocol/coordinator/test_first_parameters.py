"""A run whose first parameters one island gives: who waits, for what, and how long."""

from __future__ import annotations

from typing import Any

import pytest
from kit import of
from msgspec.structs import replace
from search_support import CONFIG, Searching, asked, found

from diloco_jax.protocol.coordinator import anchors
from diloco_jax.protocol.coordinator.search import Effect, GiveUp, Postpone
from diloco_jax.protocol.messages import FIRST_VERSION, Refused, Welcome

COMPILE_S = 600.0


class Giving(Searching):
    """Island a gives two fragments."""

    def __init__(self) -> None:
        super().__init__("a", run_id="run-1", first=True)
        self.config = replace(self.config, compile_budget_s=COMPILE_S)
        self.state = anchors.begin(self.config, self.aim, self.now)

    def hello(self, name: str = "a", **fields: Any) -> list[Effect]:
        return self.offer(name, **{"run_id": "", "term": 0, **fields})

    def give(self, fragment: int, **fields: Any) -> list[Effect]:
        return self.arrive("a", fragment, 0, **fields)


@pytest.fixture
def run() -> Giving:
    return Giving()


def test_each_fragment_is_asked_for_and_the_run_begins_with_all(run: Giving) -> None:
    begun = run.hello()
    (welcome,) = of(begun, Welcome)
    assert (welcome.run_id, welcome.term, welcome.versions) == ("run-1", 0, ())
    assert asked(begun) == [("a", 0)]
    assert asked(run.give(0)) == [("a", 1)]
    opened = found(run.give(1))
    assert opened.run_id == "run-1"
    assert [a.version for a in opened.anchors] == [FIRST_VERSION] * 2
    assert [a.island for a in opened.anchors] == ["a", "a"]
    assert (opened.tokens, opened.next_position) == (0, 0)


def test_others_are_told_for_whom_they_wait(run: Giving) -> None:
    (postponed,) = of(run.hello("b"), Postpone)
    assert "island 'a', of which 0 of 2" in postponed.message
    run.hello()
    run.give(0)
    (postponed,) = run.hello("b")
    assert "1 of 2 fragments" in postponed.message


@pytest.mark.parametrize("silent", [False, True])
def test_another_attempt_gives_all_of_them_anew(run: Giving, silent: bool) -> None:
    run.hello()
    run.give(0)
    if silent:
        assert not of(run.wait(CONFIG.lease_s), GiveUp)
        assert not run.state.got
    assert asked(run.hello(incarnation=2)) == [("a", 0)]
    assert run.give(0) == [], "of the attempt before"
    assert not run.state.got
    run.give(0, incarnation=2)
    found(run.give(1, incarnation=2))


def test_a_connection_that_broke_loses_nothing(run: Giving) -> None:
    run.hello()
    run.give(0)
    run.lose("a")
    assert asked(run.hello(run_id="run-1")) == [("a", 1)]
    found(run.give(1))


def test_what_was_not_asked_for_or_is_not_finite_does_not_count(run: Giving) -> None:
    run.hello()
    assert run.give(1) == []
    assert not run.state.got
    (end,) = of(run.give(0, unfit=True), GiveUp)
    assert "fragment 0" in end.message
    assert "was not finite" in end.message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"differences": ("seed: 1 here, 2 there",)}, "config"),
        ({"run_id": "other"}, "run_id"),
        ({"incarnation": 2, "session": "other"}, "name_in_use"),
    ],
)
def test_who_cannot_give_is_refused(
    run: Giving, changes: dict[str, Any], code: str
) -> None:
    run.hello(incarnation=2)
    (refused,) = of(run.hello(**({"incarnation": 3} | changes)), Refused)
    assert refused.code == code
    (postponed,) = run.hello(incarnation=1)
    assert isinstance(postponed, Postpone)


def test_it_is_waited_for_until_a_deadline_that_it_can_meet_by_compiling(
    run: Giving,
) -> None:
    assert anchors.next_deadline(run.state, run.now) == run.now + COMPILE_S
    assert run.wait(COMPILE_S - 1) == []
    run.hello()
    assert anchors.next_deadline(run.state, run.now) == run.now + CONFIG.lease_s
    assert not of(run.pass_time(COMPILE_S, "a"), GiveUp)
    assert asked(run.give(0)) == [("a", 1)]


def test_where_it_does_not_come_the_coordinator_gives_up(run: Giving) -> None:
    (gone,) = of(run.wait(COMPILE_S), GiveUp)
    assert "island 'a'" in gone.message
    assert "compile_budget_s = 600" in gone.message
    assert run.wait(1) == []


def test_where_it_lives_and_sends_nothing_the_coordinator_gives_up(run: Giving) -> None:
    run.hello()
    (end,) = of(run.pass_time(COMPILE_S + CONFIG.outage_budget_s, "a"), GiveUp)
    assert "fragment 0" in end.message
