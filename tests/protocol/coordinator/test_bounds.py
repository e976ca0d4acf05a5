"""Bounds of a delta: what is too long is refused, what is honest is not."""

import pytest
from bounds_support import give_up, patient, together
from kit import merged_islands, notes, of, only, persisted

from diloco_jax.protocol.holding import Drop, Merge
from diloco_jax.protocol.messages import TakeVerdict


def test_a_delta_ten_times_as_long_is_refused_with_the_reason_and_the_lengths():
    d = patient("a", "b", "c")
    effects = together(d, a=1.0, b=1.2, c=10.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b"]
    told = only(effects, TakeVerdict)
    assert (told.island, told.verdict, told.reason) == ("c", "refused", "out_of_bounds")
    (note,) = notes(effects, "refused")
    assert (note["reason"], note["norm"], note["most"]) == ("out_of_bounds", 10.0, 6.0)
    assert of(effects, Drop)[0].island == "c"


def test_its_steps_are_lost_under_that_reason_and_it_is_merged_again():
    d = patient("a", "b", "c")
    together(d, a=1.0, b=1.0, c=10.0)
    give_up(d, "c")
    assert d.totals("c").lost == {"out_of_bounds": 40}
    effects = together(d, a=1.0, b=1.0, c=1.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_the_length_is_on_the_record_of_the_merge():
    d = patient("a", "b", "c")
    effects = together(d, a=1.0, b=1.5, c=2.0)
    (merged,) = persisted(effects, "merged")
    assert [c["norm"] for c in merged["contributions"]] == [1.0, 1.5, 2.0]


@pytest.mark.parametrize("grown", [3.0, 100.0])
def test_lengths_that_grow_on_all_islands_are_no_outliers(grown: float):
    """So it is while the learning rate warms up."""
    d = patient("a", "b", "c")
    together(d, a=1.0, b=1.0, c=1.0)
    effects = together(d, a=grown, b=grown, c=grown)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_a_liar_among_three_is_no_measure_for_the_others():
    d = patient("a", "b", "c")
    effects = together(d, a=1.0, b=4.0, c=1e3)
    assert merged_islands(only(effects, Merge)) == ["a", "b"]


def test_a_delta_of_many_steps_may_be_as_much_longer():
    d = patient("a", "b", "c")
    for name in "abc":
        d.report(name, 4)
    d.take("a", 0, 1, norm=1.0)
    d.take("b", 0, 1, norm=1.0)
    d.report("c", 100)
    effects = d.take("c", 0, 100, norm=100.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_tiny_deltas_of_a_minority_keep_no_honest_one_out():
    d = patient("a", "b", "c")
    effects = together(d, a=1e-9, b=1.0, c=1.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_an_island_is_held_to_its_own_last_length_where_there_is_one_other():
    d = patient("a", "b")
    together(d, a=1.0, b=1.0)
    assert merged_islands(only(together(d, a=1.0, b=10.0), Merge)) == ["a"]


def test_nobody_is_held_to_anything_alone_or_before_the_first_merges():
    alone = patient("a")
    for norm in (1.0, 1.0, 1.0, 1.0, 1000.0):
        assert of(together(alone, a=norm), Merge)
    early = patient("a", "b")
    assert merged_islands(only(together(early, a=1.0, b=10.0), Merge)) == ["a", "b"]


def test_without_a_bound_or_lengths_nothing_is_refused():
    d = patient("a", "b", "c", delta_bound=0.0)
    assert len(only(together(d, a=1.0, b=1.0, c=1e6), Merge).contributions) == 3
    d = patient("a", "b", "c")
    assert len(only(together(d, a=0.0, b=0.0, c=1e6), Merge).contributions) == 3


def test_a_refused_delta_does_not_count_to_the_quorum():
    d = patient("a", "b", "c", quorum=3)
    assert not of(together(d, a=1.0, b=1.0, c=10.0), Merge)
    assert d.fragment(0).phase == "idle"


def test_an_absent_island_s_delta_that_is_ready_is_a_measure():
    d = patient("a", "b", "c")
    for name in "abc":
        d.report(name, 4)
    for name in "ab":
        d.take(name, 0, 4, norm=1.0)
    d.report("c", 4)
    d.disconnect("a")
    effects = d.take("c", 0, 4, norm=10.0)
    assert [(r["island"], r["most"]) for r in notes(effects, "refused")] == [("c", 5.0)]


def test_a_delta_left_behind_is_judged_too():
    d = patient("a", "b", "c", quorum=2)
    for name in "abc":
        d.report(name, 4)
    d.take("c", 0, 4, norm=10.0)
    d.goodbye("c")
    d.take("a", 0, 4, norm=1.0)
    effects = d.take("b", 0, 4, norm=1.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b"]
    assert d.totals("c").lost == {"out_of_bounds": 40}


def test_the_lengths_survive_a_crash():
    d = patient("a", "b")
    for _ in range(3):
        together(d, a=1.0, b=1.0)
    before = d.account("a", 0)
    d.crash()
    after = d.account("a", 0)
    assert after.last is not None
    assert (after.last.norm, after.last.start, after.last.end) == (1.0, 8, 12)
    # Two islands' first two merges, of four steps each, are in its base.
    assert (after.last, after.base_tokens) == (before.last, 2 * 2 * 40)


def test_without_a_bound_no_delta_is_too_long():
    d = patient("a", "b", "c", delta_bound=0.0)
    effects = together(d, a=1.0, b=1.0, c=1e6)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_lengths_of_others_are_by_their_steps_since_their_last_delta():
    d = patient("a", "b", "c")
    together(d, a=1.0, b=1.0, c=1.0)
    steps = d.state.islands["a"].steps
    for name in "ab":
        d.report(name, steps + 4)
        d.take(name, 0, steps + 4, norm=1.0)
    d.report("c", steps + 100)
    effects = d.take("c", 0, steps + 100, norm=100.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]
