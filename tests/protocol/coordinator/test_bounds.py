"""Bounds of a delta: what is too long is refused, what is honest is not."""

import math
from typing import Any

import pytest
from bounds_support import SETTLED, give_up, patient, together
from kit import merged_islands, notes, of, only, persisted
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.bounds import Usual
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import with_island
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
    for _ in range(SETTLED + 1):
        together(d, a=1.0, b=1.0, c=1.0)
    effects = together(d, a=grown, b=grown, c=grown)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_the_lengths_of_the_first_merges_hold_nobody_to_anything():
    """They are those of a learning rate near 0, and the others' next ones come late."""
    d = patient("a", "b", "c", grace=0.0)
    together(d, a=0.01, b=0.01, c=0.01)
    steps = d.state.islands["a"].steps + 4
    for name in "abc":
        d.report(name, steps)
    assert merged_islands(only(d.take("a", 0, steps, norm=1.0), Merge))[0] == "a"


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
    for _ in range(SETTLED):
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
    for _ in range(SETTLED):
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
    for _ in range(SETTLED + 1):
        together(d, a=1.0, b=1.0, c=1.0)
    steps = d.state.islands["a"].steps
    for name in "ab":
        d.report(name, steps + 4)
        d.take(name, 0, steps + 4, norm=1.0)
    d.report("c", steps + 100)
    effects = d.take("c", 0, steps + 100, norm=100.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def _long(start: int, end: int, rewarm_steps: int = 10) -> float:
    """Length of a delta that goes straight on, at rates that rise over those steps."""
    return sum(min(1.0, (step + 1) / rewarm_steps) for step in range(start, end))


def test_an_island_that_began_earlier_is_not_held_to_the_rates_of_newcomers():
    """Ten steps' rates rise: two of them are worth 0.3, but 25 are worth 20.5."""
    d = patient("a", "b", "c", rewarm_steps=10)
    effects = d.report("c", 25) + d.report("a", 2) + d.report("b", 2)
    for name in "ab":
        effects += d.take(name, 0, 2, norm=_long(0, 2))
    effects += d.take("c", 0, 25, norm=_long(0, 25))
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


@pytest.mark.parametrize("times", [4.9, 5.1])
def test_it_is_held_to_what_its_rates_are_worth(times: float):
    d = patient("a", "b", "c", rewarm_steps=10)
    for name, steps in {"a": 2, "b": 2, "c": 25}.items():
        d.report(name, steps)
    for name in "ab":
        d.take(name, 0, 2, norm=_long(0, 2))
    effects = d.take("c", 0, 25, norm=times * _long(0, 25))
    refused = notes(effects, "refused")
    assert [n["most"] for n in refused] == pytest.approx([102.5] * (times > 5))


def test_later_steps_of_an_island_are_full_ones():
    d = patient("a", "b", "c", rewarm_steps=4)
    together(d, a=2.5, b=2.5, c=2.5)
    effects = together(d, a=4.0, b=4.0, c=21.0)
    assert [n["most"] for n in notes(effects, "refused")] == [20.0]


@pytest.mark.parametrize("warm", [False, True])
def test_an_island_that_brings_its_moments_has_no_small_rates(warm: bool):
    d = patient("a", "b", "c", rewarm_steps=10, steps_per_cycle=1)
    if warm:
        restored = d.record("c", "restored", 0, start=1, value=100)
        d.report("c", 0, restored, d.record("c", "progress", 0, value=20))
    for name in "cab":
        d.report(name, 1)
    for name in "ab":
        d.take(name, 0, 1, norm=0.1)
    effects = d.take("c", 0, 1, norm=1.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"][: 2 + warm]


def test_an_incarnation_with_fresh_moments_has_small_rates_again():
    d = patient("a", "b", "c", rewarm_steps=10)
    d.report("c", 0, d.record("c", "restored", 0, start=1, value=100))
    assert d.state.islands["c"].warm
    d.hello("c", 2)
    assert not d.state.islands["c"].warm


@pytest.mark.parametrize(("more", "refused"), [(0, ["a"]), (1, [])])
def test_lengths_of_before_are_measures_until_progress_has_doubled(
    more: int, refused: list[str]
):
    """Rates rise in proportion to it at most: a run of few islands may get many."""
    d = patient("a", "b", "c")
    for _ in range(SETTLED):
        together(d, a=4.0, b=4.0, c=4.0)
    # The bases of the last deltas have 240 tokens.
    for name in "abc":
        d.report(name, 16 + more * (name == "c"))
    assert d.state.progress_tokens == 480 + 10 * more
    for name in "bc":
        d.take(name, 0, d.state.islands[name].steps, norm=0.0)  # Not known.
    effects = d.take("a", 0, 16, norm=21.0)
    assert [n["island"] for n in notes(effects, "refused")] == refused


def test_a_delta_of_an_earlier_tick_is_a_measure_at_like_progress_alone():
    d = patient("a", "b", "c", "d", quorum=2, grace=0.0)
    for name in "abcd":
        d.report(name, 4)
    for name in "ab":
        d.take(name, 0, 4, norm=0.01)
    for name in "cd":
        d.take(name, 0, 4, norm=0.01)
    d.computed(0)
    for name in "ab":
        d.report(name, 8)
    d.take("a", 0, 8, norm=1.0)
    effects = d.take("b", 0, 8, norm=1.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c", "d"]


def test_late_deltas_of_newcomers_are_measures_in_a_settled_run():
    d = patient("a", "b", quorum=2, grace=0.0)
    for _ in range(2 * SETTLED):
        together(d, a=1.0, b=1.0)
    d.join("c", "d")
    steps = d.state.islands["a"].steps + 4
    for name, at in {"a": steps, "b": steps, "c": 1, "d": 1}.items():
        d.report(name, at)
    for name in "ab":
        d.take(name, 0, steps, norm=1.0)
    for name in "cd":
        d.take(name, 0, 1, norm=1.0)
    d.computed(0)
    effects = together(d, a=30.0, b=30.0)
    assert {n["island"] for n in notes(effects, "refused")} == {"a", "b"}


def test_a_delta_that_reaches_further_back_may_be_of_higher_rates():
    """Rates fall at the end: the others' last steps are shorter than those before."""
    d = patient("a", "b", "c")
    for _ in range(SETTLED + 1):
        together(d, a=4.0, b=4.0, c=4.0)
    steps = d.state.islands["a"].steps
    for name in "abc":
        d.report(name, steps + 4)
    for name in "ab":
        d.take(name, 0, steps + 4, norm=0.01)
    effects = d.take("c", 0, steps + 4, norm=4.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_of_an_island_s_two_rates_the_higher_one_counts():
    d = patient("a", "b", "c")
    for _ in range(SETTLED + 1):
        together(d, a=1.0, b=1.0, c=1.0)
    steps = d.state.islands["a"].steps
    for name, more in {"a": 4, "b": 4, "c": 8}.items():
        d.report(name, steps + more)
    for name in "ab":
        d.take(name, 0, steps + 4, norm=4.0)
    effects = d.take("c", 0, steps + 8, norm=41.0)
    assert [n["most"] for n in notes(effects, "refused")] == [40.0]


def test_a_delta_of_a_step_is_held_to_the_lengths_of_now():
    d = patient("a", "b", "c", steps_per_cycle=1)
    for _ in range(SETTLED + 1):
        together(d, a=4.0, b=4.0, c=4.0)
    steps = d.state.islands["a"].steps + 1
    for name in "abc":
        d.report(name, steps)
    for name in "ab":
        d.take(name, 0, steps, norm=0.5)
    effects = d.take("c", 0, steps, norm=5.5)
    assert [n["most"] for n in notes(effects, "refused")] == [5.0]


def test_a_delta_of_few_steps_may_be_as_long_as_the_others():
    d = patient("a", "b", "c")
    for name, steps in {"a": 4, "b": 4, "c": 1}.items():
        d.report(name, steps)
    for name in "ab":
        d.take(name, 0, 4, norm=4.0)
    effects = d.take("c", 0, 1, norm=19.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_a_length_that_is_just_allowed_is_merged():
    effects = together(patient("a", "b", "c"), a=1.0, b=1.0, c=5.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_a_delta_is_no_measure_of_itself():
    d = patient("a", "b", "c", "d")
    effects = together(d, a=1.0, b=1.0, c=3.0, d=10.0)
    assert [n["most"] for n in notes(effects, "refused")] == [5.0]


def test_last_deltas_of_rising_rates_are_in_full_steps_too():
    d = patient("a", "b", "c", rewarm_steps=100)
    for start in range(0, 4 * SETTLED, 4):
        together(d, **dict.fromkeys("abc", _long(start, start + 4, 100)))
    effects = together(d, a=0.0, b=0.0, c=2.5)  # Their lengths are not known.
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_unknown_lengths_of_before_are_no_measure():
    d = patient("a", "b", "c")
    for _ in range(SETTLED):
        together(d, a=0.0, b=0.0, c=0.0)
    effects = together(d, a=0.0, b=0.0, c=1e6)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_a_length_is_a_measure_once_the_steps_are_known():
    d = patient("a", "b", grace=0.0)
    for name in "ab":
        d.report(name, 4)
    d.arrive("a", 0, norm=1.0)
    assert merged_islands(only(d.take("b", 0, 4, norm=1.0), Merge)) == ["b"]


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({}, 5.0),
        ({"quarantined": True}, 10.0),
        ({"status": "absent"}, 10.0),
    ],
)
def test_lengths_of_live_islands_count_that_are_not_in_quarantine(
    change: dict[str, Any], most: float
):
    d = patient("a", "b", "c")
    for _ in range(SETTLED + 1):
        together(d, a=1.0, b=2.0, c=1.0)
    island = replace(d.state.islands["c"], **change)
    fleet = Fleet(d.config, with_island(d.state, island))
    delta = d.account("b", 0).last
    assert delta is not None
    assert Usual(d.config, d.fragment(0), fleet).most("b", delta) == most


def test_the_tokens_of_a_base_are_those_before_the_merges_since():
    d = patient("a", "b", "c", quorum=2, grace=0.0)
    for name in "abc":
        d.report(name, 4)
    for name in "abc":
        d.take(name, 0, 4, norm=1.0)
    d.computed(0)
    assert d.account("a", 0).base_tokens == 0
    for name in "ab":
        d.report(name, 8)
    for name in "ab":
        d.take(name, 0, 8, norm=1.0)
    d.computed(0)
    late, fresh = d.account("c", 0), d.account("a", 0)
    assert late.last is not None
    assert late.last.end == 4
    assert (late.base_tokens, fresh.base_tokens) == (0, 80)
    d.crash()
    assert (d.account("c", 0).base_tokens, d.account("a", 0).base_tokens) == (0, 80)


@pytest.mark.parametrize(
    ("carried", "tokens", "growth"),
    [(0, 150, 2.0), (100, 50, 2.0), (0, 0, math.inf), (-50, 50, math.inf)],
)
def test_growth_is_that_of_the_progress_of_all_terms(
    carried: int, tokens: int, growth: float
):
    d = patient("a")
    state = replace(d.state, carried_progress=carried, progress_tokens=300)
    assert Fleet(d.config, state).growth(tokens) == growth
