"""The flush, while links blink or hang: nobody's last steps are lost by it."""

from typing import Any

import pytest
from ending_support import pending, stop, stopping, whose
from kit import Driver, asked, joined, kinds, notes, of, only, persisted
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import decide, takes
from diloco_jax.protocol.coordinator.ending import OPEN_BY
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import ResendRequest, Welcome


def back(d: Driver, name: str, fragment: int, steps: int) -> None:
    """The island is back with a delta whose bytes have not come."""
    held = d.held(name, fragment, 0, steps)
    effects = d.hello(name, steps=steps, phase="stopped", outstanding=(held,))
    assert only(effects, ResendRequest).tick == held.tick


def test_a_blink_of_all_links_costs_nobody_its_last_steps() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    stop(d, "a", "b")
    for name in "ab":
        d.take(name, 0, 10, arrive=False)
    for name in "ab":
        d.disconnect(name)
    assert d.state.phase == "flushing"
    d.now += 1
    for name in "ab":
        back(d, name, 0, 10)
    # The first that was back opened it again, for itself.
    assert whose(only(d.arrive("a", 0), Merge)) == [("a", 0, 10)]
    d.computed(0)
    assert whose(only(d.arrive("b", 0), Merge)) == [("b", 0, 10)]
    assert persisted(d.computed(0), "finished")
    assert d.totals("a").lost == d.totals("b").lost == {}


def test_a_blink_of_one_link_costs_a_second_merge() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    stop(d, "a", "b")
    d.take("b", 0, 10, arrive=False)
    d.take("a", 0, 10)
    assert whose(only(d.disconnect("b"), Merge)) == [("a", 0, 10)]
    assert not persisted(d.computed(0), "finished")
    d.now += 1
    back(d, "b", 0, 10)
    assert whose(only(d.arrive("b", 0), Merge)) == [("b", 0, 10)]
    assert persisted(d.computed(0), "finished")
    assert d.totals("b").lost == {}


def test_one_whose_steps_are_all_merged_is_not_awaited_as_its_link_breaks() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    stop(d, "a", "b")
    d.takes(0, a=10, b=10)
    d.disconnect("b")
    assert persisted(d.computed(0), "finished")


def test_what_hangs_keeps_nobody_elses_last_steps_out() -> None:
    """b's delta of before the stop does not come."""
    d = pending(quorum=1)
    d.arrive("a", 0)
    hopes_s = OPEN_BY * d.config.flush_s
    assert of(d.wait(hopes_s - 1), Merge) == []
    first = only(d.wait(1), Merge)
    assert (first.final, whose(first)) == (False, [("a", 0, 4)])
    assert asked(d.computed(0)) == {0: ["a", "c"]}
    d.take("a", 0, 5)
    last = only(d.take("c", 0, 5), Merge)
    assert (last.final, whose(last)) == (True, [("a", 4, 5), ("c", 4, 5)])
    d.computed(0)
    assert persisted(d.wait(d.config.flush_s), "finished")
    assert d.totals("a").lost == d.totals("c").lost == {}
    assert d.totals("b").lost == {"finished": 30}


def test_nor_if_the_coordinator_slept_meanwhile() -> None:
    """It first listens for a lease; what does not come by then hangs, and the others
    have as much time after that as ever."""
    d = pending(quorum=1)
    d.arrive("a", 0)
    lease_s, flush_s = d.config.lease_s, d.config.flush_s
    assert kinds(d.wait(3 * lease_s + flush_s)) == []
    d.now += lease_s - 1
    assert [of(d.report(name, 5), Merge) for name in "abc"] == [[], [], []]
    assert whose(only(d.wait(1), Merge)) == [("a", 0, 4)]
    d.now += (1 - OPEN_BY) * flush_s - 1
    assert asked(d.computed(0)) == {0: ["a", "c"]}
    d.take("a", 0, 5)
    last = only(d.take("c", 0, 5), Merge)
    assert whose(last) == [("a", 4, 5), ("c", 4, 5)]
    d.computed(0)
    assert d.totals("a").lost == d.totals("c").lost == {}


def hanging(**changes: Any) -> Driver:
    """a and b were asked before the stop, after 4 steps. The bytes of b, which is
    needed for a quorum, do not come; all have stopped after 5."""
    d = Driver(
        fragment_sizes=(4,), steps_per_cycle=4, total_tokens=140, quorum=2, **changes
    )
    d.join("a", "b")
    d.reports(a=4, b=4)
    d.join("c")
    d.take("a", 0, 4)
    d.take("b", 0, 4, arrive=False)
    for name, steps in (("a", 5), ("b", 5), ("c", 4)):
        d.report(name, steps)
    stop(d, "a", "b", "c")
    assert (d.state.phase, d.fragment(0).phase) == ("flushing", "open")
    return d


def test_a_tick_of_before_the_stop_does_not_wait_for_what_hangs() -> None:
    """Nor for the deadline: a's later step, and c, which was not asked, need a merge
    after it."""
    d = hanging()
    hopes_s = OPEN_BY * d.config.flush_s
    assert of(d.wait(hopes_s - 1), Merge) == []
    opened_all = replace(d.state, opens_at=0.0)
    assert decide.next_deadline(opened_all, d.now) == d.now + 1
    effects = d.wait(1)
    assert asked(effects) == {}, "c would send what this merge does not wait for"
    first = only(effects, Merge)
    assert (first.final, whose(first)) == (True, [("a", 0, 4)])
    assert asked(d.computed(0)) == {0: ["a", "c"]}
    d.takes(0, a=5, c=4)
    last = only(d.wait(d.config.flush_s), Merge)
    assert (last.final, whose(last)) == (True, [("a", 4, 5), ("c", 0, 4)])
    assert persisted(d.computed(0), "finished")
    assert d.totals("a").lost == d.totals("c").lost == {}


def test_a_merge_that_takes_long_leaves_time_for_the_next() -> None:
    d = hanging()
    only(d.wait(OPEN_BY * d.config.flush_s), Merge)
    d.now = d.state.deadline - 1
    assert asked(d.computed(0)) == {0: ["a", "c"]}
    assert not persisted(d.wait(2), "finished")
    d.takes(0, a=5, c=4)
    d.wait(d.config.flush_s)
    assert persisted(d.computed(0), "finished")
    assert d.totals("a").lost == d.totals("c").lost == {}


def test_what_hangs_is_waited_for_where_nobody_needs_another_merge() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    stop(d, "a", "b")
    d.take("a", 0, 10)
    d.take("b", 0, 10, arrive=False)
    assert of(d.wait(d.config.flush_s - 1), Merge) == []
    assert whose(only(d.arrive("b", 0), Merge)) == [("a", 0, 10), ("b", 0, 10)]


def test_one_that_is_quarantined_opens_nothing_while_its_delta_is_awaited() -> None:
    d = stopping("a", "b", "c", fragment_sizes=(4,))
    d.state = takes.quarantine_moved(d.state, "c", quarantined=True)
    stop(d, "a", "b", "c")
    d.takes(0, a=10, b=10)
    d.computed(0)
    assert d.state.phase == "flushing"
    d.report("a", 10)
    assert notes(d.report("b", 10), "tick") == []
    tick = d.state.tick
    d.report("a", 10)
    assert d.state.tick == tick


def test_an_outage_is_no_transfer() -> None:
    """Later merges would wait for slow transfers of that length."""
    d = joined("a", fragment_sizes=(4,), steps_per_cycle=4)
    d.report("a", 4)
    d.take("a", 0, 4, arrive=False)
    d.disconnect("a")
    d.now += 600
    held = d.held("a", 0, 0, 4)
    d.hello("a", steps=4, phase="training", outstanding=(held,))
    d.now += 1
    d.arrive("a", 0)
    assert d.fragment(0).transfer_seconds == 0.0


def test_who_has_not_stopped_yet_has_last_steps_to_come() -> None:
    """A delta of before the stop has all of b's steps, and is merged while b makes
    more."""
    d = joined("a", "b", fragment_sizes=(4,), steps_per_cycle=4, total_tokens=80)
    d.reports(a=4, b=4)
    assert d.state.phase == "stopping"
    d.take("a", 0, 4)
    d.take("b", 0, 4, arrive=False)
    stop(d, "a")
    d.now = d.state.deadline - 1
    d.reports(a=4, b=4)
    d.wait(1)
    assert d.state.phase == "flushing"
    d.arrive("b", 0)
    assert whose(only(d.computed(0), Merge)) == [("b", 0, 4)]
    assert not persisted(d.computed(0), "finished")
    assert asked(d.report("b", 6, phase="stopped")) == {0: ["b"]}
    assert whose(only(d.take("b", 0, 6), Merge)) == [("b", 4, 6)]
    assert persisted(d.computed(0), "finished")
    assert d.totals("b").lost == {}


@pytest.mark.parametrize("stopped", ["a", "ab"])
def test_a_coordinator_that_was_stopped_itself_listens_first(stopped: str) -> None:
    """As it wakes, its timer may fire before it hears what has come meanwhile."""
    d = stopping("a", "b", fragment_sizes=(4,))
    stop(d, *stopped)
    effects = d.wait(5 * d.config.lease_s)
    assert not persisted(effects, "finished")
    assert notes(effects, "absent") == []
    listens_to = d.state.deadline if stopped == "a" else d.state.hangs_at
    assert listens_to == d.now + d.config.lease_s
    stop(d, "b")
    d.takes(0, b=10, a=10)
    assert persisted(d.computed(0), "finished")
    assert d.totals("a").lost == d.totals("b").lost == {}


def test_a_hello_that_comes_late_does_not_hide_that_an_island_trains() -> None:
    """The flush awaits the last step of who trains, not of who joins."""
    d = stopping("a", "b", fragment_sizes=(4,))
    stop(d, "a")
    assert of(d.hello("b"), Welcome), "b's first one, once more"
    assert d.state.islands["b"].phase == "training"
    d.now += d.config.lease_s - 40
    d.reports(a=10, b=10)
    assert asked(d.wait(40)) == {0: ["a", "b"]}
    d.takes(0, a=10, b=10)
    assert not persisted(d.computed(0), "finished")
    assert asked(d.report("b", 11, phase="stopped")) == {0: ["b"]}
    d.take("b", 0, 11)
    assert persisted(d.computed(0), "finished")
    assert d.totals("b").lost == {}


def test_silence_that_is_noticed_in_time_is_the_islands() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    d.now = d.state.islands["b"].lease_until - 1
    stop(d, "a")
    assert [e["island"] for e in notes(d.wait(2), "absent")] == ["b"]


def test_after_a_crash_the_end_awaits_islands_of_which_no_merge_tells() -> None:
    d = stopping("a", "b", fragment_sizes=(4,))
    d.crash()
    effects = d.hello("a", steps=10, phase="stopped")
    assert asked(effects) == {0: ["a"]}
    d.take("a", 0, 10)
    assert not persisted(d.computed(0), "finished")
    d.hello("b", steps=10, phase="stopped")
    d.take("b", 0, 10)
    assert persisted(d.computed(0), "finished")
    assert d.totals("a").lost == d.totals("b").lost == {}
