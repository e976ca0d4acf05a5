"""Bounds of a delta where learning rates differ: newcomers, a run that begins or ends,
an island that has missed merges."""

import math
from typing import Any

import pytest
from bounds_support import SETTLED, patient, together
from kit import merged_islands, notes, only
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.bounds import Usual
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import Take, with_account, with_island
from diloco_jax.protocol.holding import Merge


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


HALVED = {"rates": (0.0, 1.0, 1.0, 0.5, 0.0), "total_tokens": 400, "steps_per_cycle": 4}
"""A run of 400 tokens whose rates rise in its first quarter and fall in the other half.
"""


@pytest.mark.parametrize(
    ("then", "now", "fall"),
    [
        (0, 50, 1.0),  # They rise.
        (0, 110, 1.0),
        (0, 200, 1.0),
        (0, 300, 1 / 0.6),  # The usual rate is that of half a cycle ago, at 280.
        (200, 300, 1 / 0.6),
        (250, 300, 0.75 / 0.6),
        (300, 400, 0.5 / 0.1),
        (390, 400, 1.0),
        (0, 500, 1 / 0.1),
    ],
)
def test_the_fall_of_the_rates_is_from_the_highest_one_since(
    then: int, now: int, fall: float
):
    d = patient("a", **HALVED)
    for carried in (0, 7):
        state = replace(d.state, carried_progress=carried, progress_tokens=now)
        assert Fleet(d.config, state).fall(then - carried) == pytest.approx(fall)


def test_only_islands_that_train_make_a_cycle():
    d = patient("a", "b", "c", **HALVED)
    d.disconnect("b")
    d.hello("d")
    state = replace(d.state, progress_tokens=300)
    assert Fleet(d.config, state).fall(300) == 1.0
    assert Fleet(d.config, state).fall(0) == pytest.approx(1 / 0.7)


@pytest.mark.parametrize("rates", [(), (0.0, 0.0)])
def test_unknown_rates_do_not_fall(rates: tuple[float, ...]):
    d = patient("a", rates=rates)
    state = replace(d.state, progress_tokens=300)
    assert Fleet(d.config, state).fall(0) == 1.0


@pytest.mark.parametrize(("norm", "refused"), [(89.0, []), (91.0, [90.0])])
def test_a_delta_that_reaches_back_may_have_the_rates_of_then(
    norm: float, refused: list[float]
):
    """The others' deltas are of the last cycle, whose rates are a tenth as high."""
    d = patient("a", "b", "c", rates=(1.0, 1.0, 0.1, 0.1), total_tokens=600)
    for name in "abc":
        d.report(name, 18)
    for name in "ab":
        d.take(name, 0, 18, start=16, norm=0.2)
    effects = d.take("c", 0, 18, norm=norm)
    assert [n["most"] for n in notes(effects, "refused")] == pytest.approx(refused)


@pytest.mark.parametrize(("later", "refused"), [(8, ["c"]), (9, [])])
def test_a_delta_of_the_tick_is_a_measure_until_progress_has_doubled(
    later: int, refused: list[str]
):
    """A fragment may be open for long while many islands come."""
    d = patient("a", "b", "c")
    for name in "abc":
        d.report(name, 4)
    for name in "ab":
        d.take(name, 0, 4, norm=1.0)
    for name, steps in {"a": 8, "b": 8, "c": later}.items():
        d.report(name, steps)
    effects = d.take("c", 0, later, norm=99.0)
    assert [n["island"] for n in notes(effects, "refused")] == refused


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


@pytest.mark.parametrize(("base", "most"), [(0, 40.0), (200, 20.0)])
def test_rates_before_the_base_of_the_last_merge_do_not_count(base: int, most: float):
    d = patient("a", "b", "c", rates=(1.0, 0.5, 0.5), total_tokens=400)
    for _ in range(SETTLED):
        together(d, a=4.0, b=4.0, c=4.0)
    account = replace(d.account("b", 0), base_tokens=base)
    fragment = with_account(d.fragment(0), "b", account)
    assert account.last is not None
    usual = Usual(d.config, fragment, Fleet(d.config, d.state))
    assert usual.most("b", account.last) == pytest.approx(most)


def test_a_refused_delta_is_no_measure():
    d = patient("a", "b", "c")
    for _ in range(SETTLED + 1):
        together(d, a=1.0, b=2.0, c=1.0)
    take = Take(tick=d.state.tick + 1, end=4, arrived=True, norm=1.0, progress=480)
    delta = d.account("b", 0).last
    assert delta is not None
    for refused, most in (("", 5.0), ("out_of_bounds", 10.0)):
        account = replace(d.account("c", 0), last=None)
        account = replace(account, take=replace(take, refused=refused))
        fragment = with_account(d.fragment(0), "c", account)
        usual = Usual(d.config, fragment, Fleet(d.config, d.state))
        assert usual.most("b", delta) == most


def test_a_take_knows_the_progress_that_comes_with_it():
    d = patient("a", "b")
    for name in "ab":
        d.report(name, 4)
    d.take("a", 0, 8)
    take = d.account("a", 0).take
    assert take is not None
    assert take.progress == d.state.progress_tokens == 120


def test_a_take_of_before_a_crash_has_the_progress_of_its_hello():
    d = patient("a", "b")
    for name in "ab":
        d.report(name, 4)
    d.take("a", 0, 4, arrive=False)
    held = d.held("a", 0, 0, 4)
    d.crash(snapshot=d.state)
    d.hello("a", steps=4, outstanding=(held,))
    take = d.account("a", 0).take
    assert take is not None
    assert take.progress == 80


def test_half_a_cycle_ago_may_be_before_the_run():
    d = patient("a", **{**HALVED, "steps_per_cycle": 400})
    state = replace(d.state, progress_tokens=50)
    assert Fleet(d.config, state).fall(0) == 1.0
