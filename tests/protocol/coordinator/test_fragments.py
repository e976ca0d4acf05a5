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
)

from diloco_jax.protocol.coordinator.state import MISSED_MERGES, Alert, Effect, Persist
from diloco_jax.protocol.holding import Commit, Merge
from diloco_jax.protocol.messages import Published, Version


def turns(*_: str, **changes: object) -> Driver:
    """One fragment; b computes three times as many tokens per second as a, and c as
    many as both. Nobody is waited for."""
    d = Driver(fragment_sizes=(5,), steps_per_cycle=2, **changes)
    for name, factor in (("a", 1), ("b", 3), ("c", 4)):
        d.hello(name, tokens_per_step=factor * TOKENS_PER_STEP)
    d.reports(a=0, b=0, c=0)
    return d


def late(*, step: float = 1.0, lookahead: int = 0, **changes: Any) -> Driver:
    """a and b are asked, a took at once and its delta was 5 s on its way: nothing is
    left of the overlap. Steps of a take 1 s."""
    d = joined("a", **{"grace": 1.0, "overlap_steps": 1, **changes})
    d.hello("b", lookahead=lookahead)
    d.report("b", 0, step_seconds=step)
    d.play("a=2 a/0~2 +5")
    return d


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
pending deltas count once too few of those that were asked can answer
    pair a b c quorum=2
    a=2 b=2 a/0=2 b/0=2 c/0=1 /0 -> ask 0:abc; merge 0: a 0-2, b 0-2; publish pending:c
    a=4 b=4 a/0=4 -> ask 0:ab
    b.leaves -> drop 0:b; merge 0: a 2-4, c 0-1
pending deltas count where only one in quarantine can be asked
    pair a b c
    a=2 a/0=2 b/0=1 c/0=1 /0 -> ask 0:abc; merge 0: a 0-2; publish pending:bc
    a.quarantined ->
    a=4 -> ask 0:a; merge 0: b 0-1, c 0-1
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
deltas are summed by name, whatever the order of arrival
    joined c a b quorum=3
    c=2 a=2 b=2 c/0=2 b/0=3 a/0=4 -> ask 0:abc; merge 0: a 0-4, b 0-3, c 0-2
a publish tells what became of each take
    # That of b is too old for the next merge; b is not asked while a take is open.
    pair a b
    b=1 a=2 b/0~1 a/0=2 /0 -> ask 0:ab; merge 0: a 0-2; publish pending:b
    a=4 a/0=4 -> ask 0:a; merge 0: a 2-4
    /0 -> publish refused stale:b; drop 0:b
a merge counts as the share of all tokens per second that is in it
    turns
    a=2 a/0=2
    share -> 0.125
    b/0=2 c/0=2 /0 a=4 a/0=4
    share -> 1
who is away is no share of it
    turns
    a=2 b.away a/0=2
    share -> 0.2
nor who left
    turns
    a=2 b.leaves c.leaves a/0=2
    share -> 1
twice as slow is half as many tokens per second
    turns
    c=2:2 a/0=2
    share -> 0.1667
a merge is whole if the config says so
    turns partial_merges='full'
    a=2 a/0=2
    share -> 1
who left a delta and has no speed yet is in the share
    # a, c, and what b left, of these and e, which are equally fast.
    pair a b c e quorum=2
    a=2 b=2 c=2 e=2 b/0=2 b.leaves b.2 a/0=2 c/0=2
    share -> 0.75
the grace window closes early when all have answered
    joined a b c grace=1.0 overlap_steps=10
    a=2 a/0=2 b/0=2 -> ask 0:abc
    c/0=2 -> merge 0: a 0-2, b 0-2, c 0-2
the grace window does not wait for those who left
    joined a b c grace=1.0 overlap_steps=10
    a=2 a/0=2 b.away -> ask 0:abc
    c.leaves -> drop 0:c; merge 0: a 0-2
the grace window closes by time
    # 10 steps of 1 s, of which quorum took 1 s; the way down takes as long as that up.
    joined a b c grace=1.0 overlap_steps=10
    a=2 a/0~2 +1 a/0 -> ask 0:abc
    deadline -> 8
    +7.9 ->
    +0.2 -> merge 0: a 0-2
the overlap begins with the first take, and not as it is asked for
    # Quorum came 3 s after the first take; of 10, the transfer of a's takes 2 more.
    joined a b c grace=1.0 overlap_steps=10
    a=2 +4 b/0~2 +1 a/0~2 +2 a/0
    deadline -> 5
those of about the pacing one's speed are waited for without slack
    # They take within a step and a quarter, and their delta comes as long after that as
    # others' do.
    late step=1.5
    a/0 ->
    deadline -> 1.875
    b/0=2 -> merge 0: a 0-2, b 0-2
those of several hosts take some steps later
    late step=1.2 lookahead=2
    a/0 ->
    deadline -> 3.9
    b/0=2 -> merge 0: a 0-2, b 0-2
slower ones are not waited for
    late step=1.6
    a/0 -> merge 0: a 0-2
nobody is where that was not asked for
    late grace=0.0
    a/0 -> merge 0: a 0-2
nor where the window is the overlap
    late grace_window='overlap'
    a/0 -> merge 0: a 0-2
a delta that is stuck is not waited for beyond a slow transfer
    late
    b/0~2 a/0 +6.1 ->
    +0.2 -> merge 0: a 0-2
one that took late is waited for while its delta may be on its way
    # A second later than after a step and a quarter. Of 5 s for a transfer, and a
    # quarter more, 2.75 s are over.
    joined a b grace=1.0 overlap_steps=0
    a=2 a/0~2 +2.25 b/0~2 +2.75 a/0 -> ask 0:ab
    deadline -> 3.5
    +2.25 b/0 -> merge 0: a 0-2, b 0-2
"""
)
def test_a_scene_of_a_merge(first: str, text: str) -> None:
    scene(begun(first, joined=joined, pair=pair, turns=turns, late=late), text)


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


# ---- the size of a merge that some live islands are not in ----


def share_of(effects: Sequence[Effect]) -> float:
    return only(effects, Merge).share


def test_the_share_of_a_merge_is_durable() -> None:
    d = turns()
    d.play("a=2 a/0=2 b/0=2 c/0=2")
    assert persisted(d.computed(0), "merged")[0]["share"] == pytest.approx(1 / 8)


@pytest.mark.parametrize("then", ["", "c.away"])
def test_who_misses_many_merges_in_a_row_is_told_of_and_not_counted_on(
    then: str,
) -> None:
    """One alert names the island; none calls it alive once it is away."""
    d = turns()
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


def test_a_merge_of_islands_without_a_speed_is_whole() -> None:
    d = Driver(fragment_sizes=(5,), steps_per_cycle=2)
    d.hello("a")
    d.report("a", 2, step_seconds=0.0)
    fields = {"tick": d.tick_of("a", 0), "version": d.fragment(0).version, "start": 0}
    took = d.record("a", "took", 2, fragment=0, **fields)
    d.report("a", 2, took, step_seconds=0.0)
    assert share_of(d.arrive("a", 0)) == 1


def test_the_grace_window_is_what_quorum_and_merge_leave_of_the_overlap() -> None:
    d = joined("a", "b", "c", grace=1.0, overlap_steps=10)
    d.play("a=2 a/0~2 +2 a/0")
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
