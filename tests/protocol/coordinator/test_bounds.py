"""Bounds of a delta: what is too long is refused, what is honest is not."""

from typing import Any

import pytest
from bounds_support import give_up, patient, together
from kit import merged_islands, notes, of, only, persisted
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.quarantine import Usual
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import Take, with_account, with_island
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
    d.reports(a=4, b=4, c=4)
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
    d.reports(a=4, b=4, c=4)
    for name in "ab":
        d.take(name, 0, 4, norm=1.0)
    d.report("c", 4)
    d.disconnect("a")
    effects = d.take("c", 0, 4, norm=10.0)
    assert [(r["island"], r["most"]) for r in notes(effects, "refused")] == [("c", 5.0)]


def test_a_delta_left_behind_is_judged_too():
    d = patient("a", "b", "c", quorum=2)
    d.reports(a=4, b=4, c=4)
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


def _rates(start: int, end: int) -> float:
    """Sum of the rates of an island's steps, the first ten of which rise to 1."""
    return sum(min(1.0, (step + 1) / 10) for step in range(start, end))


def test_an_island_that_began_earlier_is_not_held_to_the_rates_of_newcomers():
    """Two first steps are worth 0.3, but 25 are worth 20.5."""
    d = patient("a", "b", "c")
    effects = d.report("c", 25) + d.report("a", 2) + d.report("b", 2)
    for name, steps in {"a": 2, "b": 2, "c": 25}.items():
        rates = _rates(0, steps)
        effects += d.take(name, 0, steps, norm=rates, rate_sum=rates)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


@pytest.mark.parametrize("times", [4.9, 5.1])
def test_it_is_held_to_what_its_rates_are_worth(times: float):
    d = patient("a", "b", "c")
    for name, steps in {"a": 2, "b": 2, "c": 25}.items():
        d.report(name, steps)
    for name in "ab":
        d.take(name, 0, 2, norm=_rates(0, 2), rate_sum=_rates(0, 2))
    norm = times * _rates(0, 25)
    effects = d.take("c", 0, 25, norm=norm, rate_sum=_rates(0, 25))
    refused = notes(effects, "refused")
    assert [n["most"] for n in refused] == pytest.approx([102.5] * (times > 5))


def test_rates_may_rise_from_nothing_as_a_run_begins():
    d = patient("a", "b", "c", grace=0.0)
    together(d, a=0.01, b=0.01, c=0.01, rate_sum=0.04)
    assert d.fragment(0).merges == 1
    steps = d.state.islands["a"].steps + 4
    d.reports(a=steps, b=steps, c=steps)
    effects = d.take("a", 0, steps, norm=1.0, rate_sum=4.0)
    assert merged_islands(only(effects, Merge))[0] == "a"


COURSE = {"rates": (0.0, 1.0, 1.0, 0.5, 0.0), "total_tokens": 400}
"""A run of 400 tokens whose rates rise in its first quarter and fall in the other half.
"""


@pytest.mark.parametrize(
    ("then", "now", "rate"),
    [
        (0, 0, 1.0),
        (0, 50, 1.0),
        (0, 300, 1.0),
        (250, 300, 1.0),  # It may be that of 200.
        (299, 300, 1.0),
        (300, 300, 0.5),
        (301, 400, 0.5),
        (400, 400, 0.0),
        (0, 500, 1.0),
        (300, 200, 0.5),  # More merged than known to be computed: after a crash.
        (500, 500, 0.0),
        (-5, 0, 1.0),
    ],
)
def test_the_highest_rate_is_that_of_the_points_of_the_schedule_around(
    then: int, now: int, rate: float
):
    d = patient("a", **COURSE)
    for carried in (0, 7):
        state = replace(d.state, carried_progress=carried, progress_tokens=now)
        assert Fleet(d.config, state).highest_rate(then - carried) == rate


@pytest.mark.parametrize("rate_sum", [0.4, 8.0, 1e9])
def test_no_higher_rates_are_believed_than_the_schedule_had(rate_sum: float):
    d = patient("a", "b", "c", rates=(0.1, 0.1), total_tokens=600)
    d.reports(a=4, b=4, c=4)
    for name in "ab":
        d.take(name, 0, 4, norm=0.2, rate_sum=0.4)
    effects = d.take("c", 0, 4, norm=3.0, rate_sum=rate_sum)
    assert [n["most"] for n in notes(effects, "refused")] == pytest.approx([1.0])


def test_without_a_schedule_any_rates_are_believed():
    d = patient("a", "b", "c")
    d.reports(a=4, b=4, c=4)
    for name in "ab":
        d.take(name, 0, 4, norm=1.0)
    effects = d.take("c", 0, 4, norm=99.0, rate_sum=80.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


@pytest.mark.parametrize(("norm", "refused"), [(39.0, []), (41.0, [40.0])])
def test_a_delta_that_reaches_back_may_have_the_rates_of_then(
    norm: float, refused: list[float]
):
    """The others' deltas are of the last cycle, whose rates are a tenth as high."""
    d = patient("a", "b", "c", rates=(1.0, 1.0, 0.1, 0.1), total_tokens=600)
    d.reports(a=18, b=18, c=18)
    for name in "ab":
        d.take(name, 0, 18, start=16, norm=0.2, rate_sum=0.2)
    effects = d.take("c", 0, 18, norm=norm, rate_sum=8.0)
    assert [n["most"] for n in notes(effects, "refused")] == pytest.approx(refused)


@pytest.mark.parametrize(("base", "most"), [(0, 20.0), (240, 10.0)])
def test_rates_before_the_base_of_the_last_merge_are_not_believed(
    base: int, most: float
):
    d = patient("a", "b", "c", rates=(1.0, 0.5, 0.5), total_tokens=480)
    for _ in range(3):
        together(d, a=2.0, b=2.0, c=2.0, rate_sum=2.0)
    account = replace(d.account("b", 0), base_tokens=base)
    fragment = with_account(d.fragment(0), "b", account)
    assert account.last is not None
    claimed = replace(account.last, rate_sum=99.0)
    state = replace(d.state, progress_tokens=480)
    usual = Usual(d.config, fragment, Fleet(d.config, state))
    # Four steps at rate 1, or 0.5, times the usual length of 1 per unit, times 5.
    assert usual.most("b", claimed) == pytest.approx(most)


def test_a_minority_that_says_its_rates_are_low_lets_nobody_in():
    d = patient("a", "b", "c", "d", "e")
    d.reports(a=4, b=4, c=4, d=4, e=4)
    for name, rate_sum in {"a": 4.0, "b": 4.0, "c": 4.0, "d": 1e-9}.items():
        d.take(name, 0, 4, norm=4.0, rate_sum=rate_sum)
    effects = d.take("e", 0, 4, norm=30.0)
    assert [n["most"] for n in notes(effects, "refused")] == [20.0]


def test_a_delta_without_known_rates_is_no_measure_and_may_be_as_long_as_others():
    d = patient("a", "b", "c")
    d.reports(a=4, b=4, c=4)
    d.take("a", 0, 4, norm=1e6, rate_sum=0.0)
    d.take("b", 0, 4, norm=1.0)
    effects = d.take("c", 0, 4, norm=1e6)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]
    give = together(d, a=5.1, b=1.0, c=1e6)
    assert notes(give, "refused") == []


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


def test_unknown_lengths_of_before_are_no_measure():
    d = patient("a", "b", "c")
    together(d, a=0.0, b=0.0, c=0.0)
    effects = together(d, a=0.0, b=0.0, c=1e6)
    assert merged_islands(only(effects, Merge)) == ["a", "b", "c"]


def test_a_length_is_a_measure_once_the_steps_are_known():
    d = patient("a", "b", grace=0.0)
    d.reports(a=4, b=4)
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
    together(d, a=1.0, b=2.0, c=1.0)
    island = replace(d.state.islands["c"], **change)
    fleet = Fleet(d.config, with_island(d.state, island))
    delta = d.account("b", 0).last
    assert delta is not None
    assert Usual(d.config, d.fragment(0), fleet).most("b", delta) == most


def test_the_tokens_of_a_base_are_those_before_the_merges_since():
    d = patient("a", "b", "c", quorum=2, grace=0.0)
    d.reports(a=4, b=4, c=4)
    for name in "abc":
        d.take(name, 0, 4, norm=1.0)
    d.computed(0)
    assert d.account("a", 0).base_tokens == 0
    d.reports(a=8, b=8)
    for name in "ab":
        d.take(name, 0, 8, norm=1.0)
    d.computed(0)
    late, fresh = d.account("c", 0), d.account("a", 0)
    assert late.last is not None
    assert late.last.end == 4
    assert (late.base_tokens, fresh.base_tokens) == (0, 80)
    d.crash()
    assert (d.account("c", 0).base_tokens, d.account("a", 0).base_tokens) == (0, 80)


def test_a_refused_delta_is_no_measure():
    d = patient("a", "b", "c")
    together(d, a=1.0, b=2.0, c=1.0)
    take = Take(tick=d.state.tick + 1, end=4, arrived=True, norm=1.0, rate_sum=4.0)
    delta = d.account("b", 0).last
    assert delta is not None
    for refused, most in (("", 5.0), ("out_of_bounds", 10.0)):
        account = replace(d.account("c", 0), last=None)
        account = replace(account, take=replace(take, refused=refused))
        fragment = with_account(d.fragment(0), "c", account)
        usual = Usual(d.config, fragment, Fleet(d.config, d.state))
        assert usual.most("b", delta) == most


def test_the_rates_of_a_take_of_before_a_crash_come_with_the_hello():
    d = patient("a", "b")
    d.reports(a=4, b=4)
    d.take("a", 0, 4, arrive=False, rate_sum=0.7)
    held = replace(d.held("a", 0, 0, 4), rate_sum=0.7)
    d.crash()
    d.hello("a", steps=4, outstanding=(held,))
    take = d.account("a", 0).take
    assert take is not None
    assert take.rate_sum == 0.7
