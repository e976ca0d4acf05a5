"""One fragment: quorum, grace, what is late, and what a merge publishes."""

from collections.abc import Sequence

import pytest
from kit import (
    TOKENS_PER_STEP,
    Driver,
    asked,
    begun,
    joined,
    kinds,
    of,
    only,
    pair,
    persisted,
    scene,
    scenes,
    verdicts,
    whose,
)

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
    c.away a=2 b/0=2 a/0=2 /0 -> ask 0:ab; merge 0: b 0-2
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
    a=2 b=2 a/0=2 b/0=2 c/0=1 /0 -> ask 0:abc; merge 0: a 0-2, b 0-2
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
