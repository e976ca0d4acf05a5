"""An island that has notice is asked for what is open of it, and let go."""

from kit import Driver, asked, notes, of, only, persisted

from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import MayLeave, TakeRequest


def noticed(**changes: int) -> Driver:
    """Stop island a after 2 steps; a and b together make a quorum."""
    d = Driver(**{"quorum": 2, **changes})
    d.join("a", "b")
    d.report("a", 2)
    d.report("a", phase="stopped")
    return d


def test_who_stops_before_the_run_is_asked_for_all_that_is_open() -> None:
    d = noticed()
    asks = of(d.effects, TakeRequest)
    assert [(ask.island, ask.fragment) for ask in asks] == [("a", 0), ("a", 1)]
    (note,) = notes(d.effects, "leaving")
    assert (note["island"], note["incarnation"]) == ("a", 1)
    assert note["asked"] == [
        {"fragment": ask.fragment, "tick": ask.tick} for ask in asks
    ]
    assert d.fragment(0).phase == d.fragment(1).phase == "idle"
    assert asked(d.report("a")) == {}, "once"


def test_its_ticks_are_no_ones_else() -> None:
    d = noticed()
    theirs = {ask.tick for ask in of(d.effects, TakeRequest)}
    d.hello("c")
    d.report("c", 0)
    for steps in (2, 4, 6):
        for name in "bc":
            d.report(name, steps)
    regular = {ask.tick for ask in of(d.effects, TakeRequest) if ask.island != "a"}
    assert len(theirs) == 2
    assert regular
    assert not theirs & regular
    reserved = persisted(d.effects, "ticks")[0]["through"]
    assert max(theirs) <= reserved


def test_their_pacing_goes_on_as_if_nothing_had_been() -> None:
    d = Driver()
    d.join("a", "b")
    d.report("b", 2)
    assert d.fragment(0).phase == "open"
    before = d.state.islands["b"].steps_at_tick
    d.report("a", 1, phase="stopped")
    assert d.state.islands["b"].steps_at_tick == before
    d.report("b", 3)
    assert d.fragment(1).phase == "idle"
    d.report("b", 4)
    assert d.fragment(1).phase == "open"


def test_it_is_let_go_when_all_is_here() -> None:
    d = noticed()
    assert of(d.take("a", 0, 2), MayLeave) == []
    assert of(d.take("a", 1, 2, arrive=False), MayLeave) == []
    assert only(d.arrive("a", 1), MayLeave).island == "a"
    assert only(d.report("a"), MayLeave).island == "a", "the first answer may be lost"
    effects = d.goodbye("a", "preempted")
    assert [kept["fragment"] for kept in persisted(effects, "left")[0]["left_behind"]]
    totals = d.totals("a")
    assert (totals.in_flight, totals.lost) == (20, {})
    d.hello("c")
    d.report("c", 0)
    for name in "bc":
        d.report(name, 2)
    for name in "bc":
        last = d.take(name, 0, 2)
    assert [c.island for c in only(last, Merge).contributions] == ["a", "b", "c"]


def test_what_is_open_after_an_earlier_take_is_not_waited_for() -> None:
    d = Driver(quorum=2)
    d.join("a", "b")
    for name in "ab":
        d.report(name, 2)
    d.take("a", 0, 2)
    d.report("a", 3)
    assert asked(d.report("a", phase="stopped")) == {1: ["a"]}
    assert of(d.take("a", 1, 3), MayLeave)
    d.goodbye("a", "preempted")
    assert d.account("a", 0).lost_tokens == {"preempted": 10}
    assert d.account("a", 1).lost_tokens == {}


def test_a_merge_about_to_end_is_waited_for_if_more_is_open_behind_it() -> None:
    d = Driver(quorum=2)
    d.join("a", "b")
    for name in "ab":
        d.report(name, 2)
    d.take("b", 0, 2)
    merge = only(d.take("a", 0, 2), Merge)
    assert {c.island for c in merge.contributions} == {"a", "b"}
    d.report("a", 3)
    d.report("a", phase="stopped")
    assert of(d.take("a", 1, 3), MayLeave) == [], "the merge may end at any time"
    d.computed(0)
    assert asked(d.report("a")) == {0: ["a"]}
    assert only(d.take("a", 0, 3), MayLeave)
    d.goodbye("a", "preempted")
    assert d.totals("a").lost == {}


def test_every_island_may_leave_at_once() -> None:
    d = Driver(quorum=2)
    d.join("a", "b")
    for name in "ab":
        d.report(name, 3, phase="stopped")
    ticks = [ask.tick for ask in of(d.effects, TakeRequest) if ask.island == "b"]
    assert len(ticks) == 2
    for name in "ab":
        d.take(name, 0, 3)
        assert only(d.take(name, 1, 3), MayLeave).island == name
        d.goodbye(name, "preempted")
    for name in "ab":
        d.hello(name, incarnation=2)
        d.report(name, 0)
    for name in "ab":
        d.report(name, 2)
    for name in "ab":
        last = d.take(name, 0, 2)
    parts = [(c.island, c.incarnation) for c in only(last, Merge).contributions]
    assert parts == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_a_refused_take_is_asked_for_once_more() -> None:
    d = noticed()
    d.take("a", 0, 2)
    d.take("a", 1, 2, arrive=False)
    assert of(d.arrive("a", 1, refusal="non_finite"), MayLeave) == []
    reopened = d.record("a", "reopened", 2, fragment=1, tick=d.tick_of("a", 1))
    assert asked(d.report("a", 2, reopened)) == {1: ["a"]}
    assert only(d.take("a", 1, 2), MayLeave)


def test_who_has_nothing_open_may_go_at_once() -> None:
    d = Driver()
    d.join("a", "b")
    assert only(d.report("a", 0, phase="stopped"), MayLeave).island == "a"


def test_at_the_end_of_the_run_nobody_leaves_early() -> None:
    d = Driver(steps_per_cycle=10**6, total_tokens=40)
    d.join("a", "b")
    d.report("b", 2)
    d.report("a", 2, phase="stopped")
    assert d.state.phase == "stopping"
    assert of(d.effects, MayLeave) == []
    assert of(d.effects, TakeRequest) == []
