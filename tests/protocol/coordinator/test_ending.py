"""The end of a run, or of an island that has notice: stopping, flushing, done; and how
many fragments are open at once.
"""

from typing import Any

import pytest
from ending_support import pending, stop, stopping, whose
from kit import Driver, asked, joined, kinds, notes, of, only, persisted

from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.ending import OPEN_BY
from diloco_jax.protocol.coordinator.state import Alert, Persist
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import (
    Finished,
    Granted,
    MayLeave,
    Progress,
    Refused,
    Stop,
    TakeRequest,
)


def test_the_run_stops_when_it_has_its_tokens() -> None:
    d = joined("a", "b", total_tokens=100)
    d.report("a", 5)
    assert d.state.phase == "running"
    effects = d.report("b", 5)
    assert only(effects, Progress).tokens == 100
    order = kinds(effects)
    assert order.index(Persist) < order.index(Stop)
    assert [e.island for e in of(effects, Stop)] == ["a", "b"]
    assert persisted(effects, "stopping") == [{"kind": "stopping", "tokens": 100}]


def test_silent_and_compiling_islands_are_told_to_stop_too() -> None:
    d = joined("a", "b", total_tokens=100)
    d.hello("c")
    d.now += 60
    d.report("a", 4)
    d.wait(50)
    assert d.state.islands["b"].status == "absent"
    told = {e.island for e in of(d.report("a", 10), Stop)}
    assert told == {"a", "b", "c"}


def test_nothing_new_begins_once_the_run_stops() -> None:
    d = stopping("a")
    assert of(d.report("a", 500), Granted) == []
    assert only(d.hello("b"), Refused).code == "finished"
    assert only(d.hello("a", 2), Refused).code == "finished"
    assert of(d.report("a", 10**7), TakeRequest) == []


def test_who_slept_for_hardly_longer_than_a_lease_still_hears_the_last_steps() -> None:
    d = stopping("a", "b")
    assert asked(d.wait(1.02 * d.config.lease_s)) == {}
    assert d.state.phase == "flushing", "it is not over"
    assert asked(d.report("a", 11)) == {0: ["a"], 1: ["a"]}
    d.report("b", 11)
    stop(d, "a", "b")
    for index in (0, 1):
        assert whose(only(d.take("a", index, 11), Merge)) == [("a", 0, 11)]
        assert asked(d.computed(index)) == {index: ["b"]}
        assert whose(only(d.take("b", index, 11), Merge)) == [("b", 0, 11)]
        d.computed(index)
    assert d.state.phase == "done"
    assert [d.totals(name).lost for name in "ab"] == [{}, {}]


def test_who_is_silent_for_a_tenth_more_than_a_lease_is_not_awaited() -> None:
    d = stopping("a", "b")
    d.wait(1.02 * d.config.lease_s)
    effects = d.wait(0.1 * d.config.lease_s)
    assert kinds(effects)[-1] is Finished
    assert d.state.phase == "done"


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
    assert kinds(effects)[-1] is Finished
    assert persisted(effects, "finished")
    left = persisted(effects, "left")
    assert [(r["island"], r["reason"]) for r in left] == [
        ("a", "finished"),
        ("b", "finished"),
    ]
    assert d.state.phase == "done"
    for name in "ab":
        totals = d.totals(name)
        assert (totals.merged, totals.lost, totals.in_flight) == (100, {}, 0)


def test_the_flush_waits_for_all_live_islands_whatever_the_grace() -> None:
    d = stopping("a", "b", fragment_sizes=(4,), grace=0.0)
    stop(d, "a", "b")
    assert of(d.take("a", 0, 10), Merge) == []
    d.wait(30)
    assert [c.island for c in only(d.take("b", 0, 10), Merge).contributions] == [
        "a",
        "b",
    ]


def test_an_island_that_dies_in_the_flush_is_not_waited_for_beyond_its_lease() -> None:
    d = stopping("a", "b", fragment_sizes=(4,), flush_s=200.0)
    stop(d, "a", "b")
    d.take("a", 0, 10)
    merge = only(d.disconnect("b"), Merge)
    assert [c.island for c in merge.contributions] == ["a"]
    assert not persisted(d.computed(0), "finished")
    d.wait(d.config.lease_s - 1)
    d.report("a", 10)
    until = d.state.islands["b"].lease_until
    assert decide.next_deadline(d.state, d.now) == until
    assert persisted(d.wait(until - d.now), "finished")
    assert d.totals("b").lost == {"absent": 100}


def test_an_absent_island_may_come_back_until_the_flush_begins() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    d.disconnect("b")
    assert asked(stop(d, "a")) == {}
    effects = d.hello("b", steps=10, phase="stopped")
    assert only(effects, Stop).island == "b"
    assert asked(effects) == {0: ["a", "b"]}


def test_at_the_deadline_the_flush_merges_what_is_here() -> None:
    d = stopping("a", "b", fragment_sizes=(4, 4))
    stop(d, "a", "b")
    d.take("a", 0, 10)
    assert decide.next_deadline(d.state, d.now) == d.now + OPEN_BY * d.config.flush_s
    effects = d.wait(d.config.flush_s)
    assert only(effects, Merge).fragment == 0
    assert d.fragment(1).phase == "done", "nobody answered there"
    assert decide.next_deadline(d.state, d.now) == d.now + 50, "a lease, not this again"
    effects = d.computed(0)
    assert persisted(effects, "finished")
    assert d.totals("b").lost == {"finished": 100}


def test_the_flush_goes_on_while_deltas_come() -> None:
    """A link that carries the model in a cycle need not carry it in a fixed time."""
    sizes = (4,) * 4
    d = stopping("a", fragment_sizes=sizes)
    stop(d, "a")
    for fragment in range(len(sizes)):
        assert d.state.phase == "flushing"
        d.wait(d.config.flush_s - 1)
        assert only(d.take("a", fragment, 10), Merge).fragment == fragment
        effects = d.computed(fragment)
    assert persisted(effects, "finished")
    assert of(effects, Alert) == []
    assert d.totals("a").lost == {}


def test_bytes_that_come_again_do_not_lengthen_the_flush() -> None:
    d = stopping("a", "b", fragment_sizes=(4, 4))
    stop(d, "a", "b")
    d.take("a", 0, 10)
    deadline = d.state.deadline
    d.wait(1)
    d.arrive("a", 0)
    assert d.state.deadline == deadline


def test_what_the_flush_did_not_wait_for_is_told() -> None:
    d = stopping("a", "b", fragment_sizes=(4, 4))
    stop(d, "a", "b")
    d.take("a", 0, 10)
    d.takes(1, a=10, b=10)
    d.computed(1)
    d.wait(d.config.flush_s)
    told = only(d.computed(0), Alert)
    assert "all that b computed" in told.text
    assert f"{d.config.flush_s:g} s" in told.text


def test_a_tick_of_before_the_stop_is_no_flush() -> None:
    d = joined("a", "b", fragment_sizes=(4,), steps_per_cycle=4, total_tokens=130)
    d.reports(b=1, a=4)
    d.take("b", 0, 1, arrive=False)
    d.merge(0, a=4)
    d.reports(b=4, a=8)
    d.take("a", 0, 8, arrive=False)
    assert d.fragment(0).phase == "open"
    d.report("b", 5)
    assert d.state.phase == "stopping"
    stop(d, "a", "b")
    d.arrive("b", 0)
    first = only(d.arrive("a", 0), Merge)
    assert (first.final, whose(first)) == (False, [("a", 4, 8), ("b", 0, 1)])
    assert asked(d.computed(0)) == {0: ["b"]}
    second = only(d.take("b", 0, 5), Merge)
    assert (second.final, whose(second)) == (True, [("b", 1, 5)])
    assert persisted(d.computed(0), "finished")
    assert d.totals("b").merged == 50


def test_the_flush_merges_a_fragment_once() -> None:
    d = pending(quorum=1)
    assert of(d.effects, Merge)[1:] == [], "what is pending is on its way"
    assert of(d.arrive("b", 0), Merge) == []
    first = only(d.arrive("a", 0), Merge)
    assert (first.final, whose(first)) == (False, [("a", 0, 4), ("b", 0, 1)])
    assert asked(d.computed(0)) == {0: ["a", "b", "c"]}
    for name, step in (("a", 5), ("b", 3)):
        assert of(d.take(name, 0, step), Merge) == []
    last = only(d.take("c", 0, 5), Merge)
    assert last.final
    assert whose(last) == [("a", 4, 5), ("b", 1, 3), ("c", 4, 5)]
    assert persisted(d.computed(0), "finished")


def test_who_has_not_answered_a_refusal_keeps_nobody_waiting() -> None:
    d = joined("a", "b", fragment_sizes=(4,), steps_per_cycle=4, total_tokens=110)
    d.reports(b=1, a=4)
    d.take("b", 0, 1, arrive=False)
    d.merge(0, a=4)
    d.arrive("b", 0, refusal="non_finite")
    d.reports(b=5, a=6)
    stop(d, "a")
    assert asked(stop(d, "b")) == {0: ["a"]}


def test_below_quorum_what_is_pending_enters_the_flush_and_the_rest_follows() -> None:
    d = pending(quorum=2)
    d.takes(0, a=5, c=5)
    first = only(d.arrive("b", 0), Merge)
    assert first.final
    assert whose(first) == [("a", 4, 5), ("b", 0, 1), ("c", 4, 5)]
    assert asked(d.computed(0)) == {0: ["b"]}
    second = only(d.take("b", 0, 3), Merge)
    assert (second.final, whose(second)) == (True, [("b", 1, 3)])
    assert persisted(d.computed(0), "finished")


def test_a_tick_that_is_given_up_in_the_flush_leaves_its_deltas_to_it() -> None:
    d = joined(
        "a", "b", fragment_sizes=(4,), steps_per_cycle=4, quorum=2, total_tokens=90
    )
    d.reports(a=4, b=4)
    d.take("a", 0, 4)
    d.report("b", 5)
    stop(d, "a", "b")
    assert d.state.phase == "flushing"
    merge = only(d.disconnect("b"), Merge)
    assert (merge.final, whose(merge)) == (True, [("a", 0, 4)])
    d.computed(0)
    assert persisted(d.wait(d.config.flush_s), "finished")


def test_a_take_refused_in_the_flush_is_taken_once_more() -> None:
    d = stopping("a", fragment_sizes=(4,))
    stop(d, "a")
    d.take("a", 0, 10, arrive=False)
    effects = d.arrive("a", 0, refusal="non_finite")
    assert not of(effects, Merge)
    assert not of(effects, TakeRequest)
    assert d.state.phase == "flushing", "a has not answered its refusal yet"
    reopened = d.record("a", "reopened", 10, fragment=0, tick=d.tick_of("a", 0))
    assert asked(d.report("a", 10, reopened)) == {0: ["a"]}
    assert of(d.take("a", 0, 10), Merge)
    assert persisted(d.computed(0), "finished")


def test_a_run_without_live_islands_ends_at_its_deadlines() -> None:
    d = stopping("a", fragment_sizes=(4,))
    d.disconnect("a")
    for _ in range(3):
        deadline = decide.next_deadline(d.state, d.now)
        if deadline is None:
            break
        d.wait(deadline - d.now)
    assert d.state.phase == "done"
    assert len(persisted(d.effects, "finished")) == 1


def test_a_finished_run_says_so() -> None:
    d = stopping("a", fragment_sizes=(4,))
    stop(d, "a")
    d.take("a", 0, 10)
    d.computed(0)
    assert d.report("a") == []
    assert d.wait(1000) == []
    assert decide.next_deadline(d.state, d.now) is None
    for incarnation in (1, 2):
        assert only(d.hello("a", incarnation), Refused).code == "finished"


def noticed(**changes: int) -> Driver:
    """Stop island a after 2 steps; a and b together make a quorum."""
    d = joined("a", "b", **{"quorum": 2, **changes})
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
        d.reports(b=steps, c=steps)
    regular = {ask.tick for ask in of(d.effects, TakeRequest) if ask.island != "a"}
    assert len(theirs) == 2
    assert regular
    assert not theirs & regular
    reserved = persisted(d.effects, "ticks")[0]["through"]
    assert max(theirs) <= reserved


def test_their_pacing_goes_on_as_if_nothing_had_been() -> None:
    d = joined("a", "b")
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
    d.reports(b=2, c=2)
    for name in "bc":
        last = d.take(name, 0, 2)
    assert [c.island for c in only(last, Merge).contributions] == ["a", "b", "c"]


def test_what_is_open_after_an_earlier_take_is_not_waited_for() -> None:
    d = joined("a", "b", quorum=2)
    d.reports(a=2, b=2)
    d.take("a", 0, 2)
    d.report("a", 3)
    assert asked(d.report("a", phase="stopped")) == {1: ["a"]}
    assert of(d.take("a", 1, 3), MayLeave)
    d.goodbye("a", "preempted")
    assert d.account("a", 0).lost_tokens == {"preempted": 10}
    assert d.account("a", 1).lost_tokens == {}


def test_a_merge_about_to_end_is_waited_for_if_more_is_open_behind_it() -> None:
    d = joined("a", "b", quorum=2)
    d.reports(a=2, b=2)
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


def test_who_has_nothing_open_may_go_at_once() -> None:
    d = joined("a", "b")
    assert only(d.report("a", 0, phase="stopped"), MayLeave).island == "a"


def test_at_the_end_of_the_run_nobody_leaves_early() -> None:
    d = joined("a", "b", steps_per_cycle=10**6, total_tokens=40)
    d.report("b", 2)
    d.report("a", 2, phase="stopped")
    assert d.state.phase == "stopping"
    assert of(d.effects, MayLeave) == []
    assert of(d.effects, TakeRequest) == []


def crowded(at_once: int, fragments: int = 4, **changes: Any) -> Driver:
    """A flush of two islands; memory has room for the deltas of few fragments."""
    d = stopping(
        "a",
        "b",
        fragment_sizes=(4,) * fragments,
        room_each=10,
        merge_buffer_bytes=20 * at_once + 19,
        **changes,
    )
    stop(d, "a", "b")
    return d


def opened(d: Driver) -> list[int]:
    return [f.index for f in d.state.fragments if f.phase != "idle"]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 9])
def test_the_flush_opens_what_memory_has_room_for(at_once: int) -> None:
    assert opened(crowded(at_once)) == [0, 1, 2, 3][:at_once]


def test_the_next_fragment_is_opened_once_one_is_merged() -> None:
    d = crowded(1)
    for index in range(4):
        assert opened(d) == list(range(index + 1))
        d.take("a", index, 10)
        only(d.take("b", index, 10), Merge)
        assert opened(d) == list(range(index + 1)), "its deltas are still there"
        effects = d.computed(index)
    assert persisted(effects, "finished")
    assert d.totals("a").lost == d.totals("b").lost == {}


def test_every_worker_has_its_own_room() -> None:
    d = crowded(1, workers=2)
    assert opened(d) == [0, 1]
    d.takes(0, a=10, b=10)
    d.computed(0)
    assert opened(d) == [0, 1, 2]


def test_an_island_that_hangs_keeps_no_fragment_from_the_others() -> None:
    """Half of the flush's 50 s, for four fragments."""
    d = crowded(1)
    for index in range(4):
        d.take("a", index, 10)
        assert opened(d) == list(range(index + 1))
        if index < 3:
            due = decide.next_deadline(d.state, d.now)
            assert due == d.now + 50 / 2 / 4
            d.wait(due - d.now - 0.001)
            assert opened(d) == list(range(index + 1))
            d.wait(0.001)
    assert [m.fragment for m in of(d.wait(d.config.flush_s), Merge)] == [0, 1, 2, 3]
