"""One fragment: quorum, what is late, what a merge publishes, and how long a quorum
waits for those that were asked, too (grace).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from kit import (
    TOKENS_PER_STEP,
    Driver,
    asked,
    begun,
    joined,
    kinds,
    merged_islands,
    of,
    only,
    pair,
    persisted,
    scene,
    scenes,
    verdicts,
    whose,
)

from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.state import MISSED_MERGES, Alert, Effect, Persist
from diloco_jax.protocol.holding import Commit, Drop, Merge
from diloco_jax.protocol.messages import Published, TakeRequest, Version


@scenes(
    """
nothing merges below quorum
    joined a b c quorum=2
    a=2 ->
    b=2 -> ask 0:abc
    b/0=2 +50 ->
    a/0=2 -> merge 0: a 0-2, b 0-2
a cycle later what is pending counts beside who does not deliver
    # b alone is merged first, and a's delta is late.
    pair a b c
    c.away a=2 b/0=2 a/0=2 /0 -> ask 0:ab; merge 0: b 0-2; publish pending:a
    a=4 -> ask 0:b
    b/0~4 +50 +10 ->
    a=6 -> skip 0: open; merge 0: a 0-2
a cycle later who came back is asked too
    pair a b c quorum=2
    c.away a=2 b=2 a/0=2 b/0~2 -> ask 0:ab
    c.joins c=2 ->
    a=4 -> skip 0: open; ask 0:c
    c/0=2 -> merge 0: a 0-2, c 0-2
a late delta is pending, counts to no quorum, and enters the next merge
    # Who has it outstanding is asked for no other.
    pair a b c quorum=2
    a=2 b=2 a/0=2 b/0=2 c/0=1 /0 -> ask 0:abc; merge 0: a 0-2, b 0-2; publish pending:c
    a=4 b=4 -> ask 0:ab
    a/0=4 ->
    b/0=4 -> merge 0: a 2-4, b 2-4, c 0-1
pending deltas count where fewer than a quorum can be asked
    pair a b quorum=2
    a=2 b=2 a/0=2 -> ask 0:ab
    b.away -> skip 0: quorum is out of reach
    b.back b/0=3 a=4 -> ask 0:b
    b=5 -> merge 0: a 0-2, b 0-3
everyone gone before quorum gives the tick up
    joined a b quorum=2
    a=2 b=2 -> ask 0:ab
    b.leaves -> drop 0:b; skip 0: quorum is out of reach
    phases -> running idle idle
a newcomer is asked when quorum is out of reach
    joined a b quorum=2
    a=2 b=2 c.joins -> ask 0:ab
    b.leaves -> drop 0:b; ask 0:c
    c/0=1 ->
    a/0=2 -> merge 0: a 0-2, c 0-1
a newcomer is not asked while more than a quorum is in sight
    joined a b c quorum=2
    a=2 b=2 d.joins -> ask 0:abc
    a/0=2 ->
"""
)
def test_a_scene_of_a_merge(first: str, text: str) -> None:
    scene(begun(first, joined=joined, pair=pair), text)


def test_contributions_are_sorted_by_name_whatever_the_order_of_arrival() -> None:
    d = joined("c", "a", "b", quorum=3)
    d.play("c=2 a=2 b=2 c/0=2 b/0=3")
    merge = only(d.take("a", 0, 4), Merge)
    assert merge.version == Version(1, 1)
    assert whose(merge) == [("a", 0, 4), ("b", 0, 3), ("c", 0, 2)]
    assert [c.tokens for c in merge.contributions] == [40, 30, 20]


def test_a_slow_island_is_merged_by_its_tokens() -> None:
    """20 times slower: its every step ends up in a merge, some cycles late."""
    d = joined("fast", "slow", steps_per_cycle=4, fragment_sizes=(3, 3))
    slow = 0
    for fast in range(1, 201):
        d.report("fast", fast)
        if fast % 20 == 0:
            slow += 1
            for index in (0, 1):
                take = d.account("slow", index).take
                if take is not None and take.end is None:
                    d.take("slow", index, slow)
            d.report("slow", slow)
        for index in (0, 1):
            take = d.account("fast", index).take
            if take is not None and take.end is None:
                d.take("fast", index, fast)
            if d.fragment(index).phase == "merging":
                d.computed(index)
    for index in (0, 1):
        account = d.account("slow", index)
        assert account.lost_tokens == {}
        assert account.merged_tokens >= 10 * (slow - 2)
    assert d.fragment(0).merges > 20


def test_persist_comes_before_publish() -> None:
    d = joined("a")
    d.play("a=2 a/0=2")
    effects = d.computed(0)
    order = kinds(effects)
    assert order.index(Persist) < order.index(Commit) < order.index(Published)
    (record,) = persisted(effects, "merged")
    assert record["version"] == [1, 1]
    assert record["contributions"][0]["end"] == 2
    assert record["verdicts"] == {"a": [1, "merged", ""]}


@pytest.mark.parametrize(
    ("late_at", "alerts"), [(0, [0, 0, 1, 0, 0]), (2, [0, 0, 0, 0, 1])]
)
def test_merges_by_one_of_several_in_a_row_raise_an_alert(
    late_at: int, alerts: list[int]
) -> None:
    """A merge of several ends the row."""
    d, found = pair("a", "b"), []
    for step in (2, 4, 6, 8, 10):
        d.report("a", step)
        d.take("a", 0, step)
        if step == late_at:
            d.take("b", 0, 1, base=Version(1, 0))  # It is in the next merge.
        said = of(d.computed(0), Alert)
        found.append(len(said))
        assert all("'a' alone" in a.text and "sync.quorum" in a.text for a in said)
    assert found == alerts


def test_a_publish_tells_what_became_of_each_take() -> None:
    d = pair("a", "b")
    d.play("b=1 a=2 b/0~1 a/0=2")
    assert verdicts(d.computed(0)) == {"a": (1, "merged", ""), "b": (1, "pending", "")}
    d.play("a=4 a/0=4")
    effects = d.computed(0)
    assert verdicts(effects)["b"] == (1, "refused", "stale"), "too old for the next"
    assert only(effects, Drop).island == "b"
    assert len(of(d.effects, TakeRequest)) == 3, "b is not asked while a take is open"


# ---- the size of a merge that some live islands are not in ----


def turns_driver(**changes: object) -> Driver:
    """One fragment; b computes three times as many tokens per second as a, and c as
    many as both. Nobody is waited for."""
    d = Driver(fragment_sizes=(5,), steps_per_cycle=2, **changes)
    for name, factor in (("a", 1), ("b", 3), ("c", 4)):
        d.hello(name, tokens_per_step=factor * TOKENS_PER_STEP)
    d.reports(a=0, b=0, c=0)
    return d


def share_of(effects: Sequence[Effect]) -> float:
    return only(effects, Merge).share


def test_a_merge_counts_as_the_share_of_all_tokens_per_second_that_is_in_it() -> None:
    d = turns_driver()
    d.report("a", 2)
    assert share_of(d.take("a", 0, 2)) == pytest.approx(1 / 8)
    d.takes(0, b=2, c=2)
    (record,) = persisted(d.computed(0), "merged")
    assert record["share"] == pytest.approx(1 / 8)
    assert asked(d.report("a", 4)) == {0: ["a"]}
    assert share_of(d.take("a", 0, 4)) == 1
    assert persisted(d.computed(0), "merged")[0]["share"] == 1


@pytest.mark.parametrize(
    ("before", "share"),
    [
        ("", 1 / 8),
        ("b.leaves", 1 / 5),
        ("b.away", 1 / 5),
        ("b.leaves c.leaves", 1),
        ("b.away c.away", 1),
    ],
)
def test_who_is_not_there_is_no_share_of_it(before: str, share: float) -> None:
    d = turns_driver()
    d.play(f"a=2 {before}")
    assert share_of(d.take("a", 0, 2)) == pytest.approx(share)


def test_twice_as_slow_is_half_as_many_tokens_per_second() -> None:
    d = turns_driver()
    d.report("c", 2, step_seconds=2.0)
    assert share_of(d.take("a", 0, 2)) == pytest.approx(1 / 6)


@pytest.mark.parametrize("then", ["", "c.away"])
def test_who_misses_many_merges_in_a_row_is_told_of_and_not_counted_on(
    then: str,
) -> None:
    """One alert names the island; none calls it alive once it is away."""
    d = turns_driver()
    d.goodbye("b")
    shares = []
    for steps in range(2, 2 * MISSED_MERGES + 6, 2):
        if len(shares) == MISSED_MERGES:
            d.play(then)
        d.report("a", steps)
        shares.append(share_of(d.take("a", 0, steps)))
        d.computed(0)
    assert shares == [pytest.approx(1 / 5)] * MISSED_MERGES + [1.0] * 2
    told = [alert.text for alert in of(d.effects, Alert) if "alive" in alert.text]
    assert [text[:24] for text in told] == ["island 'c' is alive, but"], "not of b"
    assert "fragment 0" in told[0]


def test_a_merge_is_whole_if_the_config_says_so() -> None:
    d = turns_driver(partial_merges="full")
    d.report("a", 2)
    assert share_of(d.take("a", 0, 2)) == 1


def test_who_left_a_delta_and_has_no_speed_yet_is_in_the_share() -> None:
    d = pair("a", "b", "c", "e", quorum=2)
    d.play("a=2 b=2 c=2 e=2 b/0=2 b.leaves b.2 a/0=2")
    # a, c, and what b left, of these and e, which are equally fast.
    assert share_of(d.take("c", 0, 2)) == pytest.approx(3 / 4)


def test_a_merge_of_islands_without_a_speed_is_whole() -> None:
    d = Driver(fragment_sizes=(5,), steps_per_cycle=2)
    d.hello("a")
    d.report("a", 2, step_seconds=0.0)
    fields = {"tick": d.tick_of("a", 0), "version": d.fragment(0).version, "start": 0}
    took = d.record("a", "took", 2, fragment=0, **fields)
    d.report("a", 2, took, step_seconds=0.0)
    assert share_of(d.arrive("a", 0)) == 1


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
