"""One fragment: quorum, grace, what is late, and what a merge publishes."""

from collections.abc import Sequence

import pytest
from kit import (
    TOKENS_PER_STEP,
    Driver,
    asked,
    joined,
    kinds,
    merged_islands,
    notes,
    of,
    only,
    persisted,
    verdicts,
)

from diloco_jax.protocol.coordinator.state import MISSED_MERGES, Alert, Effect, Persist
from diloco_jax.protocol.holding import Commit, Drop, Merge
from diloco_jax.protocol.messages import Published, TakeRequest, Version


def test_nothing_merges_below_quorum() -> None:
    d = joined("a", "b", "c", quorum=2)
    d.report("a", 2)
    assert asked(d.report("b", 2)) == {0: ["a", "b", "c"]}
    assert of(d.take("b", 0, 2), Merge) == []
    assert of(d.wait(50), Merge) == []
    merge = only(d.take("a", 0, 2), Merge)
    assert merged_islands(merge) == ["a", "b"]
    assert merge.version == Version(1, 1)


def test_contributions_are_sorted_by_name_whatever_the_order_of_arrival() -> None:
    d = joined("c", "a", "b", quorum=3)
    d.reports(c=2, a=2, b=2)
    d.takes(0, c=2, b=3)
    merge = only(d.take("a", 0, 4), Merge)
    assert merged_islands(merge) == ["a", "b", "c"]
    assert [(c.start, c.end, c.tokens) for c in merge.contributions] == [
        (0, 4, 40),
        (0, 3, 30),
        (0, 2, 20),
    ]


def unheard_driver(**changes: object) -> Driver:
    """One fragment, open for b's delta, which b says is taken and never comes."""
    d = joined("a", "b", "c", fragment_sizes=(5,), steps_per_cycle=2, **changes)
    d.disconnect("c")
    return d


def test_a_cycle_later_what_is_pending_counts_beside_who_does_not_deliver() -> None:
    d = unheard_driver()
    d.report("a", 2)
    d.take("b", 0, 2)  # It alone is merged; a's delta is late.
    d.take("a", 0, 2)
    d.computed(0)
    assert asked(d.report("a", 4)) == {0: ["b"]}
    assert of(d.take("b", 0, 4, arrive=False), Merge) == []
    assert of(d.wait(50), Merge) == []
    d.now += 10
    merge = only(d.report("a", 6), Merge)
    assert [(c.island, c.start, c.end) for c in merge.contributions] == [("a", 0, 2)]
    d.computed(0)
    assert d.account("b", 0).take is not None


def test_a_cycle_later_who_came_back_is_asked_too() -> None:
    d = unheard_driver(quorum=2)
    d.report("a", 2)
    assert asked(d.report("b", 2)) == {0: ["a", "b"]}
    d.take("a", 0, 2)
    d.take("b", 0, 2, arrive=False)
    d.hello("c")
    d.report("c", 2)
    assert asked(d.report("a", 4)) == {0: ["c"]}
    merge = only(d.take("c", 0, 2), Merge)
    assert merged_islands(merge) == ["a", "c"]


def test_a_late_delta_is_pending_and_enters_the_next_merge() -> None:
    d = joined("a", "b", "c", quorum=2, fragment_sizes=(5,), steps_per_cycle=2)
    d.reports(a=2, b=2)
    d.takes(0, a=2, b=2)
    d.take("c", 0, 1, base=Version(1, 0))
    assert verdicts(d.computed(0)) == {
        "a": (1, "merged", ""),
        "b": (1, "merged", ""),
        "c": (1, "pending", ""),
    }
    d.report("a", 4)
    assert asked(d.report("b", 4)) == {0: ["a", "b"]}, "c's take is outstanding"
    assert of(d.take("a", 0, 4), Merge) == [], "a pending delta is not part of quorum"
    merge = only(d.take("b", 0, 4), Merge)
    assert [(c.island, c.tick, c.base) for c in merge.contributions] == [
        ("a", 2, Version(1, 1)),
        ("b", 2, Version(1, 1)),
        ("c", 1, Version(1, 0)),
    ]


def test_pending_deltas_count_where_fewer_than_quorum_can_be_asked() -> None:
    d = joined("a", "b", quorum=2, fragment_sizes=(5,), steps_per_cycle=2)
    d.reports(a=2, b=2)
    d.take("a", 0, 2)
    d.disconnect("b")
    assert d.fragment(0).phase == "idle", "quorum is out of reach: given up"
    d.hello("b", steps=2, phase="training")
    d.take("b", 0, 3)
    assert of(d.effects, Merge) == []
    d.report("a", 4)
    merge = only(d.report("b", 5), Merge)
    assert merged_islands(merge) == ["a", "b"]


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


def test_everyone_gone_before_quorum_gives_the_tick_up() -> None:
    d = joined("a", "b", quorum=2)
    d.reports(a=2, b=2)
    effects = d.goodbye("b")
    assert notes(effects, "skipped")[0]["why"] == "quorum is out of reach"
    assert d.fragment(0).phase == "idle"


def test_a_newcomer_is_asked_when_quorum_is_out_of_reach() -> None:
    d = joined("a", "b", quorum=2)
    d.report("a", 2)
    assert asked(d.report("b", 2)) == {0: ["a", "b"]}
    d.join("c")
    assert asked(d.goodbye("b")) == {0: ["c"]}
    d.take("c", 0, 1)
    assert merged_islands(only(d.take("a", 0, 2), Merge)) == ["a", "c"]


def test_a_newcomer_is_not_asked_while_more_than_a_quorum_is_in_sight() -> None:
    d = joined("a", "b", "c", quorum=2)
    assert asked(d.reports(a=2, b=2)) == {0: ["a", "b", "c"]}
    d.join("d")
    assert asked(d.take("a", 0, 2)) == {}


def test_persist_comes_before_publish() -> None:
    d = joined("a")
    d.report("a", 2)
    d.take("a", 0, 2)
    effects = d.computed(0)
    order = kinds(effects)
    assert order.index(Persist) < order.index(Commit) < order.index(Published)
    (record,) = persisted(effects, "merged")
    assert record["version"] == [1, 1]
    assert record["contributions"][0]["end"] == 2
    assert record["verdicts"] == {"a": [1, "merged", ""]}


def test_a_merge_by_one_of_several_raises_an_alert() -> None:
    d = joined("a", "b", fragment_sizes=(5,), steps_per_cycle=2)
    alerts = []
    for step in (2, 4, 6, 8):
        d.report("a", step)
        d.take("a", 0, step)
        alerts.append(len(of(d.computed(0), Alert)))
    assert alerts == [0, 0, 1, 0]


def test_a_merge_of_several_ends_the_row_of_those_of_one() -> None:
    d = joined("a", "b", fragment_sizes=(5,), steps_per_cycle=2)
    alerts = []
    for step in (2, 4, 6, 8, 10):
        d.report("a", step)
        d.take("a", 0, step)
        if step == 2:
            d.take("b", 0, 1, base=Version(1, 0))  # Late: it is in the next merge.
        alerts.append(len(of(d.computed(0), Alert)))
    assert alerts == [0, 0, 0, 0, 1]


def test_islands_that_are_merged_in_turns_raise_an_alert() -> None:
    d = joined("a", "b", fragment_sizes=(5,), steps_per_cycle=2)
    for step in range(2, 22, 2):
        d.reports(a=step, b=step)
        d.take("a", 0, step)
        d.computed(0)
    texts = [alert.text for alert in of(d.effects, Alert)]
    assert any("of 2 islands of about one speed, b were in 0%" in t for t in texts)


def test_a_delta_too_old_for_the_next_merge_is_refused_with_the_publish() -> None:
    d = joined("a", "b", fragment_sizes=(5,), steps_per_cycle=2)
    d.reports(b=1, a=2)
    d.take("b", 0, 1, arrive=False)
    for step in (2, 4):
        if step > 2:
            d.report("a", step)
        d.take("a", 0, step)
        effects = d.computed(0)
        verdict = verdicts(effects)["b"]
        if step == 2:
            assert verdict == (1, "pending", "")
    assert verdict == (1, "refused", "stale")
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


def test_twice_as_slow_is_half_as_many_tokens_per_second() -> None:
    d = turns_driver()
    d.report("c", 2, step_seconds=2.0)
    assert share_of(d.take("a", 0, 2)) == pytest.approx(1 / 6)


@pytest.mark.parametrize("away", ["goodbye", "disconnect"])
def test_who_is_not_there_is_no_share_of_it(away: str) -> None:
    d = turns_driver()
    d.report("a", 2)
    getattr(d, away)("b")
    assert share_of(d.take("a", 0, 2)) == pytest.approx(1 / 5)
    d.computed(0)
    getattr(d, away)("c")
    d.report("a", 4)
    assert share_of(d.take("a", 0, 4)) == 1


def test_who_misses_many_merges_in_a_row_is_not_counted_on() -> None:
    d = turns_driver()
    d.goodbye("b")
    shares = []
    for steps in range(2, 2 * MISSED_MERGES + 6, 2):
        d.report("a", steps)
        shares.append(share_of(d.take("a", 0, steps)))
        d.computed(0)
    assert shares == [pytest.approx(1 / 5)] * MISSED_MERGES + [1.0] * 2


def test_a_merge_is_whole_if_the_config_says_so() -> None:
    d = turns_driver(partial_merges="full")
    d.report("a", 2)
    assert share_of(d.take("a", 0, 2)) == 1


def test_who_left_a_delta_and_has_no_speed_yet_is_in_the_share() -> None:
    d = joined("a", "b", "c", "e", quorum=2, fragment_sizes=(5,), steps_per_cycle=2)
    d.reports(a=2, b=2, c=2, e=2)
    d.take("b", 0, 2)
    d.goodbye("b")
    d.hello("b", 2)
    d.take("a", 0, 2)
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
