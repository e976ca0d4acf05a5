"""Turns at the merged model: one island at a time, told the versions of one cycle."""

from __future__ import annotations

from typing import Any

from kit import Driver, of

from diloco_jax.protocol.coordinator.events import Effect, KeepAsked, Said
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.protocol.messages import Report, Watch
from diloco_jax.protocol.values import Version


class Able(Driver):
    """Its islands can evaluate, but for those in `busy`. Two fragments with a tick
    every two steps."""

    busy: frozenset[str] = frozenset()

    def feed(self, event: Any) -> list[Effect]:
        if isinstance(event, Said) and isinstance(event.message, Report):
            able = event.island not in self.busy
            message = Report(**{**_fields(event.message), "watches": able})
            event = Said(island=event.island, session=event.session, message=message)
        return super().feed(event)


def _fields(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__struct_fields__}


def told(effects: list[Effect]) -> list[tuple[str, int, int, int]]:
    """Island, cycle, fragment and version number of what is to be watched."""
    return [
        (w.island, w.cycle, w.fragment, w.version.number) for w in of(effects, Watch)
    ]


def run(d: Driver, steps: int, name: str = "a") -> list[tuple[str, int, int, int]]:
    """Let one of the islands train alone up to that step."""
    before = len(d.effects)
    for step in range(d.state.islands[name].steps + 2, steps + 1, 2):
        d.report(name, step)
        d.merge((step // 2 - 1) % 2, **{name: step})
    return told(d.effects[before:])


def test_the_versions_of_a_due_cycle_are_told_and_no_others() -> None:
    d = Able(watch_every=2)
    d.join("a")
    assert run(d, 4) == [], "cycle 1"
    assert run(d, 8) == [("a", 2, 0, 2), ("a", 2, 1, 2)]
    assert run(d, 12) == []
    assert run(d, 16) == [("a", 4, 0, 4), ("a", 4, 1, 4)]


def test_they_are_the_versions_that_an_export_of_the_cycle_has() -> None:
    """Fragment 1 is slow: fragment 0 is merged in the next cycle before it is told."""
    d = Able(watch_every=1)
    d.join("a")
    d.report("a", 2)
    d.feed(KeepAsked())
    d.merge(0, a=2)
    d.report("a", 4)
    d.report("a", 6)
    d.take("a", 0, 6)
    d.computed(0)
    d.take("a", 1, 6)
    d.computed(1)
    kept = {e.fragment: (e.cycle, e.version) for e in of(d.effects, KeepFragment)}
    watched = {w.fragment: (w.cycle, w.version) for w in of(d.effects, Watch)}
    assert kept == watched == {0: (1, Version(1, 1)), 1: (1, Version(1, 1))}


def test_islands_take_turns_and_busy_or_slow_ones_are_passed_over() -> None:
    d = Able(watch_every=1)
    d.join("a", "b")
    d.join("slow", step_seconds=50.0)
    turns = []
    for cycle in range(1, 5):
        turns += run(d, 4 * cycle)
        if cycle == 3:
            d.busy = frozenset("b")
            d.report("b")
    assert [t[:2] for t in turns[::2]] == [("a", 1), ("b", 2), ("a", 3), ("a", 4)]
    d.busy = frozenset({"a", "b"})
    for name in "ab":
        d.report(name)
    assert run(d, 24) == []
    d.busy = frozenset("a")
    d.report("b")
    assert [t[:2] for t in run(d, 28)] == [("b", 7), ("b", 7)], (
        "no cycle is made up for"
    )


def test_an_island_that_is_away_ends_its_turn() -> None:
    d = Able(watch_every=1)
    d.join("a", "b")
    assert told(d.report("b", 2)) == []
    assert [t[0] for t in told(d.merge(0, b=2))] == ["a"]
    d.disconnect("a")
    later = run(d, 8, "b")
    assert {t for t in later if t[0] == "b"} == {("b", 2, 0, 2), ("b", 2, 1, 2)}


def test_a_crash_of_the_coordinator_gives_the_turn_up() -> None:
    d = Able(watch_every=1)
    d.join("a")
    d.report("a", 2)
    d.merge(0, a=2)
    assert d.state.unwatched == (1,)
    before = d.state
    d.crash(before)
    assert d.state.unwatched == ()


def test_without_the_setting_nobody_is_asked() -> None:
    d = Able()
    d.join("a")
    assert run(d, 16) == []


def test_a_turn_is_given_in_the_step_in_which_its_cycle_begins() -> None:
    d = Able(watch_every=1)
    d.join("a")
    given = []
    for step in range(2, 13, 2):
        d.report("a", step)
        given.append(d.state.watched_cycle)
        d.merge((step // 2 - 1) % 2, a=step)
        assert d.state.watched_cycle == given[-1], "no merge gives one"
    assert given == sorted(given)
    assert given[-1] > given[0]


def test_no_turn_begins_once_the_run_has_stopped() -> None:
    """The flush's ticks come out of turn; b is in a long step all the while."""
    d = Able(watch_every=1, total_tokens=50)
    d.join("a")
    run(d, 4)
    d.join("b")
    d.report("a", 5)
    assert d.state.phase == "stopping"
    d.now = d.state.deadline - 1.0
    d.report("a", phase="stopped")
    d.report("b", phase="training")
    assert (d.state.tick, d.state.watched_cycle) == (2, 1)
    d.wait(1.0)
    assert d.state.tick > 2, "of the next cycle"
    assert d.state.islands["b"].counted
    assert d.state.watched_cycle == 1
