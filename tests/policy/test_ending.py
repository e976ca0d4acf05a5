"""The end of a run: stopping, flushing, done."""

from typing import Any

from kit import Driver, asked, of, only, persisted

from diloco_jax.policy import policy
from diloco_jax.policy.events import (
    AskTake,
    Effect,
    Finish,
    Grant,
    Merge,
    Persist,
    Progress,
    Refuse,
    StopStepping,
)


def stopping(*names: str, steps: int = 10, **changes: Any) -> Driver:
    """Islands that have done `steps` steps; the last report ended the run."""
    total = len(names) * steps * 10
    d = Driver(steps_per_cycle=10**6, total_tokens=total, **changes)
    d.join(*names)
    for name in names:
        d.report(name, steps)
    assert d.state.phase == "stopping"
    return d


def stop(d: Driver, *names: str) -> list[Effect]:
    effects: list[Effect] = []
    for name in names:
        effects += d.report(name, phase="stopped")
    return effects


def test_the_run_stops_when_it_has_its_tokens() -> None:
    d = Driver(total_tokens=100)
    d.join("a", "b")
    d.report("a", 5)
    assert d.state.phase == "running"
    effects = d.report("b", 5)
    assert only(effects, Progress).tokens == 100
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Persist) < kinds.index(StopStepping)
    assert [e.island for e in of(effects, StopStepping)] == ["a", "b"]
    assert persisted(effects, "stopping") == [{"kind": "stopping", "tokens": 100}]


def test_silent_and_compiling_islands_are_told_to_stop_too() -> None:
    d = Driver(total_tokens=100)
    d.join("a", "b")
    d.hello("c")
    d.now += 60
    d.report("a", 4)
    d.wait(50)
    assert d.state.islands["b"].status == "absent"
    told = {e.island for e in of(d.report("a", 10), StopStepping)}
    assert told == {"a", "b", "c"}


def test_nothing_new_begins_once_the_run_stops() -> None:
    d = stopping("a")
    assert of(d.report("a", 500), Grant) == []
    assert only(d.hello("b"), Refuse).code == "finished"
    assert only(d.hello("a", 2), Refuse).code == "finished"
    assert of(d.report("a", 10**7), AskTake) == []


def test_the_flush_begins_when_all_have_stopped() -> None:
    d = stopping("a", "b")
    assert asked(stop(d, "a")) == {}
    assert asked(stop(d, "b")) == {0: ["a", "b"], 1: ["a", "b"]}
    assert d.state.phase == "flushing"


def test_the_flush_does_not_wait_for_ever_for_islands_to_stop() -> None:
    d = stopping("a", "b")
    stop(d, "a")
    assert policy.next_deadline(d.state, d.now) == d.now + d.config.lease_s
    d.now += 60
    d.report("a")
    d.report("b")
    assert asked(d.wait(40)) == {0: ["a", "b"], 1: ["a", "b"]}


def test_the_flush_merges_everything_and_finishes() -> None:
    d = stopping("a", "b", quorum=2)
    stop(d, "a", "b")
    for index in (0, 1):
        d.take("a", index, 10)
        merge = only(d.take("b", index, 10), Merge)
        assert merge.final
        assert [c.tokens for c in merge.contributions] == [100, 100]
        effects = d.computed(index)
        assert persisted(effects, "merged")[0]["final"]
    assert isinstance(effects[-1], Finish)
    assert persisted(effects, "finished")
    assert d.state.phase == "done"
    for name in "ab":
        totals = d.totals(name)
        assert (totals.merged, totals.lost, totals.in_flight) == (100, {}, 0)


def test_the_flush_is_exempt_from_quorum() -> None:
    d = stopping("a", "b", quorum=2, fragment_sizes=(4,))
    stop(d, "a")
    d.goodbye("b")
    merge = only(d.take("a", 0, 10), Merge)
    assert merge.final
    assert [c.island for c in merge.contributions] == ["a"]
    assert of(d.computed(0), Finish)


def test_the_flush_waits_for_all_live_islands_whatever_the_grace() -> None:
    d = stopping("a", "b", fragment_sizes=(4,), grace=0.0)
    stop(d, "a", "b")
    assert of(d.take("a", 0, 10), Merge) == []
    d.wait(30)
    assert [c.island for c in only(d.take("b", 0, 10), Merge).contributions] == [
        "a",
        "b",
    ]


def test_an_island_that_dies_in_the_flush_is_not_waited_for() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    stop(d, "a", "b")
    d.take("a", 0, 10)
    merge = only(d.disconnect("b"), Merge)
    assert [c.island for c in merge.contributions] == ["a"]
    assert of(d.computed(0), Finish)
    assert d.totals("b").lost == {"absent": 100}


def test_an_absent_island_may_come_back_until_the_flush_begins() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    d.disconnect("b")
    assert asked(stop(d, "a")) == {}
    effects = d.hello("b", steps=10, phase="stopped")
    assert only(effects, StopStepping).island == "b"
    assert asked(effects) == {0: ["a", "b"]}


def test_at_the_deadline_the_flush_merges_what_is_here() -> None:
    d = stopping("a", "b", fragment_sizes=(4, 4))
    stop(d, "a", "b")
    d.take("a", 0, 10)
    assert policy.next_deadline(d.state, d.now) == d.now + d.config.flush_s
    effects = d.wait(d.config.flush_s)
    assert only(effects, Merge).fragment == 0
    assert d.fragment(1).phase == "done", "nobody answered there"
    effects = d.computed(0)
    assert of(effects, Finish)
    assert d.totals("b").lost == {"finished": 100}


def test_pending_deltas_are_merged_and_what_came_after_them_too() -> None:
    d = Driver(fragment_sizes=(4,), steps_per_cycle=4, total_tokens=130)
    d.join("a", "b")
    d.report("b", 1)
    d.report("a", 4)
    d.take("b", 0, 1, arrive=False)
    d.merge(0, a=4)
    d.report("b", 4)
    d.report("a", 8)
    d.take("a", 0, 8, arrive=False)
    assert d.fragment(0).phase == "open"
    d.report("b", 5)
    assert d.state.phase == "stopping"
    stop(d, "a", "b")
    d.arrive("b", 0)
    first = only(d.arrive("a", 0), Merge)
    assert [(c.island, c.start, c.end) for c in first.contributions] == [
        ("a", 4, 8),
        ("b", 0, 1),
    ]
    assert asked(d.computed(0)) == {0: ["b"]}
    second = only(d.take("b", 0, 5), Merge)
    assert [(c.island, c.start, c.end) for c in second.contributions] == [("b", 1, 5)]
    assert of(d.computed(0), Finish)
    assert d.totals("b").merged == 50


def test_a_take_refused_in_the_flush_is_taken_once_more() -> None:
    d = stopping("a", fragment_sizes=(4,))
    stop(d, "a")
    d.take("a", 0, 10, arrive=False)
    effects = d.arrive("a", 0, refusal="non_finite")
    assert not of(effects, Merge)
    assert not of(effects, AskTake)
    assert d.state.phase == "flushing", "a has not answered its refusal yet"
    reopened = d.record("a", "reopened", 10, fragment=0, tick=d.tick_of("a", 0))
    assert asked(d.report("a", 10, reopened)) == {0: ["a"]}
    assert of(d.take("a", 0, 10), Merge)
    assert of(d.computed(0), Finish)


def test_a_run_without_live_islands_ends_at_its_deadlines() -> None:
    d = stopping("a", fragment_sizes=(4,))
    d.disconnect("a")
    for _ in range(3):
        deadline = policy.next_deadline(d.state, d.now)
        if deadline is None:
            break
        d.wait(deadline - d.now)
    assert d.state.phase == "done"
    assert len(of(d.effects, Finish)) == 1


def test_a_finished_run_says_so() -> None:
    d = stopping("a", fragment_sizes=(4,))
    stop(d, "a")
    d.take("a", 0, 10)
    d.computed(0)
    assert d.report("a") == []
    assert d.wait(1000) == []
    assert policy.next_deadline(d.state, d.now) is None
    for incarnation in (1, 2):
        assert only(d.hello("a", incarnation), Refuse).code == "finished"
