"""The grace window: how long a quorum waits for those that were asked, too."""

from typing import Any

import pytest
from kit import (
    Driver,
    asked,
    begun,
    joined,
    merged_islands,
    of,
    only,
    pair,
    scene,
    scenes,
)

from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.holding import Merge


def grace_driver() -> Driver:
    """a, b and c are asked at time 1000; K = 1, and the slack is 10 s."""
    d = joined("a", "b", "c", grace=1.0, overlap_steps=10)
    d.report("a", 2)
    return d


def sent(d: Driver, name: str, *, seconds: float) -> None:
    """A delta of fragment 0 that is so long on its way."""
    d.take(name, 0, d.state.islands[name].steps, arrive=False)
    d.now += seconds
    d.arrive(name, 0)


def test_the_grace_window_closes_by_time() -> None:
    d = grace_driver()
    sent(d, "a", seconds=1)
    # 10 steps of 1 s, of which quorum took 1 s; the way down takes as long as that up.
    assert decide.next_deadline(d.state, d.now) == pytest.approx(d.now + 8)
    assert of(d.wait(7.9), Merge) == []
    assert merged_islands(only(d.wait(0.2), Merge)) == ["a"]


def test_the_overlap_begins_with_the_first_take_and_not_as_it_is_asked_for() -> None:
    """Islands of several hosts act two boundaries later: that is no part of tau."""
    d = grace_driver()
    d.now += 4
    d.take("b", 0, 2, arrive=False)
    d.now += 1
    d.take("a", 0, 2, arrive=False)
    d.now += 2
    d.arrive("a", 0)
    # Quorum came 3 s after the first take; of 10, the transfer of a's takes 2 more.
    assert d.fragment(0).closes_at == pytest.approx(d.now + 10 - 3 - 2)


def test_an_older_take_that_counts_does_not_begin_the_overlap() -> None:
    d = pair("a", "b", "c", quorum=2)
    d.reports(a=2, b=2, c=2)
    d.takes(0, a=2, b=2)
    d.take("c", 0, 2)  # It is late, and counts when too few can be asked.
    d.computed(0)
    d.goodbye("b")
    d.now += 50
    d.report("c", 4)
    assert asked(d.report("a", 4)) == {0: ["a"]}
    d.take("a", 0, 4, arrive=False)
    d.now += 1
    assert merged_islands(only(d.arrive("a", 0), Merge)) == ["a", "c"]
    assert d.fragment(0).quorum_seconds == pytest.approx(1)


@scenes(
    """
the grace window closes early when all have answered
    joined a b c grace=1.0 overlap_steps=10
    a=2 a/0=2 b/0=2 -> ask 0:abc
    c/0=2 -> merge 0: a 0-2, b 0-2, c 0-2
the grace window does not wait for those who left
    joined a b c grace=1.0 overlap_steps=10
    a=2 a/0=2 b.away -> ask 0:abc
    c.leaves -> drop 0:c; merge 0: a 0-2
"""
)
def test_a_scene_of_grace(first: str, text: str) -> None:
    scene(begun(first, joined=joined), text)


def test_the_grace_window_is_what_quorum_and_merge_leave_of_the_overlap() -> None:
    d = grace_driver()
    sent(d, "a", seconds=2)
    closes_at = d.fragment(0).closes_at
    assert closes_at == pytest.approx(d.now + 10 - 2 - 2)
    d.wait(6)
    d.now += 3
    d.play("/0 a=4")
    assert asked(d.report("a", 6)) == {0: ["a"]}
    d.take("a", 0, 6)
    # Averages: 80 % of what was, 20 % of what is; the merge took 3 s.
    assert d.fragment(0).closes_at == pytest.approx(d.now + 10 - 1.6 - 1.6 - 3)


def test_a_quorum_that_took_minutes_does_not_cost_the_next_merges_their_grace() -> None:
    d = Driver(
        quorum=2,
        grace=1.0,
        overlap_steps=10,
        lease_s=1e4,
        fragment_sizes=(5,),
        steps_per_cycle=2,
    )
    d.join("a", "b")
    d.play("a=2 b=2 a/0=2")
    d.now += 600
    d.play("b/0=2 /0 a=4")
    assert asked(d.report("b", 4)) == {0: ["a", "b"]}
    d.takes(0, a=4, b=4)
    assert d.fragment(0).quorum_seconds == pytest.approx(0.8 * 10)


def late_driver(
    step_seconds: float = 1.0, lookahead: int = 0, **changes: Any
) -> Driver:
    """a and b are asked, a took at once and its delta was 5 s on its way: nothing is
    left of the overlap. Steps of a take 1 s."""
    d = joined("a", **{"grace": 1.0, "overlap_steps": 1, **changes})
    d.hello("b", lookahead=lookahead)
    d.report("b", 0, step_seconds=step_seconds)
    d.play("a=2 a/0~2")
    d.now += 5
    return d


@pytest.mark.parametrize(("step_seconds", "lookahead"), [(1.0, 0), (1.5, 0), (1.2, 2)])
def test_those_of_about_the_pacing_ones_speed_are_waited_for_without_slack(
    step_seconds, lookahead
) -> None:
    """They take within a step and a quarter, several hosts some steps later, and their
    delta comes as long after that as others' do."""
    d = late_driver(step_seconds, lookahead)
    assert of(d.arrive("a", 0), Merge) == []
    waits_s = (1.25 + lookahead) * step_seconds
    assert d.fragment(0).closes_at == pytest.approx(d.now + waits_s)
    assert merged_islands(only(d.take("b", 0, 2), Merge)) == ["a", "b"]


@pytest.mark.parametrize(
    ("step_seconds", "changes"),
    [(1.6, {}), (1.0, {"grace": 0.0}), (1.0, {"grace_window": "overlap"})],
)
def test_slower_ones_are_not_and_nobody_is_where_that_was_not_asked_for(
    step_seconds, changes
) -> None:
    d = late_driver(step_seconds, **changes)
    assert merged_islands(only(d.arrive("a", 0), Merge)) == ["a"]


def took_late(step_seconds: float) -> Driver:
    """b took 2.25 s after it was asked, and a's delta has been on its way for 5 s."""
    d = late_driver(overlap_steps=0)
    d.now -= 5 - 2.25
    d.take("b", 0, 2, arrive=False)
    d.report("b", step_seconds=step_seconds)
    d.now += 5 - 2.25
    return d


def test_one_that_took_late_is_waited_for_while_its_delta_may_be_on_its_way() -> None:
    """It took a second later than after a step and a quarter, as the coordinator
    knows. Without it in this merge, its first would be one of the next fragment."""
    d = took_late(step_seconds=1.0)
    assert of(d.arrive("a", 0), Merge) == []
    # Of 5 s usual for a transfer, and a quarter more, 2.75 s are over.
    assert d.fragment(0).closes_at == pytest.approx(d.now + 1.25 * 5 - 2.75)
    d.now += 2.25
    assert merged_islands(only(d.arrive("b", 0), Merge)) == ["a", "b"]


def test_a_delta_that_is_stuck_is_not_waited_for_beyond_a_slow_transfer() -> None:
    d = late_driver()
    d.play("b/0~2 a/0")
    assert of(d.wait(1.25 * 5 - 0.1), Merge) == []
    assert merged_islands(only(d.wait(0.2), Merge)) == ["a"]
