"""The size of a merge that some live islands are not in."""

from collections.abc import Sequence

import pytest
from kit import TOKENS_PER_STEP, Driver, asked, joined, only, persisted

from diloco_jax.protocol.coordinator.events import Effect
from diloco_jax.protocol.coordinator.state import MISSED_MERGES
from diloco_jax.protocol.holding import Merge


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


def test_what_was_left_behind_is_in_the_share() -> None:
    d = turns_driver(quorum=2)
    d.reports(a=2, b=2, c=2)
    d.take("b", 0, 2)
    d.goodbye("b")
    d.take("a", 0, 2)
    assert share_of(d.take("c", 0, 2)) == 1


def test_one_merge_is_enough_to_be_counted_on_as_before() -> None:
    d = turns_driver()
    d.goodbye("c")
    d.report("a", 2)
    assert share_of(d.take("a", 0, 2)) == pytest.approx(1 / 4)
    d.take("b", 0, 2)
    d.computed(0)
    shares = []
    for steps in range(4, 2 * MISSED_MERGES + 6, 2):
        d.report("a", steps)
        shares.append(share_of(d.take("a", 0, steps)))
        d.computed(0)
    assert shares == [1.0] + [pytest.approx(1 / 4)] * MISSED_MERGES


def test_a_merge_of_islands_without_a_speed_is_whole() -> None:
    d = Driver(fragment_sizes=(5,), steps_per_cycle=2)
    d.hello("a")
    d.report("a", 2, step_seconds=0.0)
    fields = {"tick": d.tick_of("a", 0), "version": d.fragment(0).version, "start": 0}
    took = d.record("a", "took", 2, fragment=0, **fields)
    d.report("a", 2, took, step_seconds=0.0)
    assert share_of(d.arrive("a", 0)) == 1
