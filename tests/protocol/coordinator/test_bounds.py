"""Bounds of a delta: what is too long is refused, what is honest is not; and who is put
in quarantine, for how long, and who never is.
"""

from __future__ import annotations

from typing import Any

import pytest
from bounds_support import give_up, patient, together
from kit import Driver, merged_islands, notes, of, only, persisted
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    Alert,
    Effect,
    with_account,
    with_fragment,
    with_island,
)
from diloco_jax.protocol.coordinator.takes import Usual
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


def lengths(*norms: float) -> dict[str, float]:
    """Return the length of each island's delta, from a on."""
    return dict(zip("abcde", norms, strict=False))


@pytest.mark.parametrize(
    ("cycles", "merged", "changes"),
    [
        pytest.param([(1, 1, 1), (3, 3, 3)], "abc", {}, id="all grow in warm-up"),
        pytest.param([(1, 1, 1), (100, 100, 100)], "abc", {}, id="all grow by a lot"),
        pytest.param([(1, 4, 1e3)], "ab", {}, id="a liar is no measure"),
        pytest.param([(1e-9, 1, 1)], "abc", {}, id="tiny ones of a minority"),
        pytest.param([(1, 1, 5)], "abc", {}, id="just allowed"),
        pytest.param([(1, 1, 3, 10)], "abc", {}, id="no measure of itself"),
        pytest.param([(1, 1), (1, 10)], "a", {}, id="held to its own with one other"),
        pytest.param([(1,)] * 4 + [(1e3,)], "a", {}, id="alone"),
        pytest.param([(1, 10)], "ab", {}, id="before the first merges"),
        pytest.param([(1, 1, 1e6)], "abc", {"delta_bound": 0.0}, id="no bound"),
        pytest.param([(0, 0, 1e6)], "abc", {}, id="no lengths"),
        pytest.param([(0, 0, 0), (0, 0, 1e6)], "abc", {}, id="none before"),
    ],
)
def test_who_is_merged_by_the_lengths(
    cycles: list[tuple[float, ...]], merged: str, changes: dict[str, Any]
):
    d = patient(*lengths(*cycles[0]), **changes)
    for norms in cycles:
        effects = together(d, **lengths(*norms))
    assert merged_islands(only(effects, Merge)) == list(merged)


def test_a_refused_delta_does_not_count_to_the_quorum():
    d = patient("a", "b", "c", quorum=3)
    assert not of(together(d, a=1.0, b=1.0, c=10.0), Merge)
    assert d.fragment(0).phase == "idle"


def test_an_absent_island_s_delta_that_is_ready_is_a_measure():
    d = patient("a", "b", "c")
    d.reports(a=4, b=4, c=4)
    for name in "ab":
        d.take(name, 0, 4, norm=1.0)
    d.play("c=4 a.away")
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


def _rates(start: int, end: int) -> float:
    """Sum of the rates of an island's steps, the first ten of which rise to 1."""
    return sum(min(1.0, (step + 1) / 10) for step in range(start, end))


NEW, OLD = _rates(0, 2), _rates(0, 25)
"""Two first steps are worth 0.3, but 25 are worth 20.5."""
LOW = {"rates": (0.1, 0.1), "total_tokens": 600}


@pytest.mark.parametrize(
    ("takes", "most", "changes"),
    [
        ([(25, OLD, OLD), (2, NEW, NEW), (2, NEW, NEW)], [], {}),
        ([(2, NEW, NEW), (2, NEW, NEW), (25, 4.9 * OLD, OLD)], [], {}),
        ([(2, NEW, NEW), (2, NEW, NEW), (25, 5.1 * OLD, OLD)], [102.5], {}),
        # No higher rates are believed than the schedule had.
        ([(4, 0.2, 0.4), (4, 0.2, 0.4), (4, 3.0, 0.4)], [1.0], LOW),
        ([(4, 0.2, 0.4), (4, 0.2, 0.4), (4, 3.0, 8.0)], [1.0], LOW),
        ([(4, 0.2, 0.4), (4, 0.2, 0.4), (4, 3.0, 1e9)], [1.0], LOW),
        ([(4, 1.0, None), (4, 1.0, None), (4, 99.0, 80.0)], [], {}),
        # A minority that says its rates are low lets nobody in.
        ([*[(4, 4.0, 4.0)] * 3, (4, 4.0, 1e-9), (4, 30.0, None)], [20.0], {}),
        # A delta of few steps may be as long as the others.
        ([(4, 4.0, None), (4, 4.0, None), (1, 19.0, None)], [], {}),
        # One without known rates is no measure, and may be as long as others.
        ([(4, 1e6, 0.0), (4, 1.0, None), (4, 1e6, None)], [], {}),
    ],
)
def test_an_island_is_held_to_what_its_rates_are_worth(
    takes: list[tuple[int, float, float | None]],
    most: list[float],
    changes: dict[str, Any],
):
    of_name = dict(zip("abcde", takes, strict=False))
    d = patient(*of_name, **changes)
    for name, (steps, _, _) in of_name.items():
        d.report(name, steps)
    for name, (steps, norm, rate_sum) in of_name.items():
        d.take(name, 0, steps, norm=norm, rate_sum=rate_sum)
    refused = notes(d.effects, "refused")
    assert [n["most"] for n in refused] == pytest.approx(most)


COURSE = (0.0, 1.0, 1.0, 0.5, 0.0)
"""Rates of a run of 400 tokens that rise in its first quarter and fall in the other
half."""
RISING = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize(
    ("rates", "then", "now", "rate"),
    [
        (COURSE, 0, 0, 1.0),
        (COURSE, 0, 50, 1.0),
        (COURSE, 0, 300, 1.0),
        (COURSE, 250, 300, 1.0),  # It may be that of 200.
        (COURSE, 299, 300, 1.0),
        (COURSE, 300, 300, 0.5),
        (COURSE, 301, 400, 0.5),
        (COURSE, 400, 400, 0.0),
        (COURSE, 0, 500, 1.0),
        # More merged than known to be computed: after a crash.
        (COURSE, 300, 200, 0.5),
        (COURSE, 500, 500, 0.0),
        (COURSE, -5, 0, 1.0),
        # One that rises is believed up to the next point.
        (RISING, 0, 0, 0.25),
        (RISING, 0, 100, 0.5),
        (RISING, 0, 399, 1.0),
    ],
)
def test_the_highest_rate_is_that_of_the_points_of_the_schedule_around(
    rates: tuple[float, ...], then: int, now: int, rate: float
):
    d = patient("a", rates=rates, total_tokens=400)
    for carried in (0, 7):
        state = replace(d.state, carried_progress=carried, progress_tokens=now)
        assert Fleet(d.config, state).highest_rate(then - carried) == rate


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


def wary(**changes: Any) -> Driver:
    """Three islands and one fragment; two unfit deltas in a row are too many."""
    return patient("a", "b", "c", **{"quarantine_after": 2, **changes})


def cycle(driver: Driver, c: float, **norms: float) -> list[Effect]:
    """One cycle, in which c's delta has that length; it hears of a refusal at once."""
    effects = together(driver, **{"a": 1.0, "b": 1.0, **norms, "c": c})
    if (take := driver.account("c", 0).take) is not None and take.refused:
        give_up(driver, "c")
    return effects


def quarantined(**changes: Any) -> Driver:
    driver = wary(**changes)
    for _ in range(2):
        cycle(driver, c=10.0)
    assert driver.state.islands["c"].quarantined
    return driver


def forget_lengths(driver: Driver) -> None:
    """As before the first merge."""
    fragment = driver.fragment(0)
    for name, account in fragment.accounts.items():
        fragment = with_account(fragment, name, replace(account, last=None))
    driver.state = with_fragment(driver.state, fragment)


def reasons(effects: list[Effect]) -> list[str]:
    return [note["reason"] for note in notes(effects, "refused")]


def test_unfit_deltas_in_a_row_quarantine_an_island():
    d = wary()
    assert not persisted(cycle(d, c=10.0), "quarantined")
    effects = cycle(d, c=10.0)
    (record,) = persisted(effects, "quarantined")
    assert (record["island"], record["refused"]) == ("c", 2)
    (alert,) = of(effects, Alert)
    assert "'c' is quarantined" in alert.text
    assert "a length of 10, but 5 is allowed" in alert.text


def test_a_fit_delta_begins_the_row_anew():
    d = wary()
    for norm in (10.0, 1.0, 10.0, 1.0, 10.0):
        assert not persisted(cycle(d, c=norm), "quarantined")


def not_finite(**changes: Any) -> Driver:
    """c is quarantined for two deltas that are not finite."""
    d = wary(**changes)
    for _ in range(2):
        for name in "abc":
            d.report(name, d.state.islands[name].steps + 4)
        steps = d.state.islands["c"].steps
        d.take("c", 0, steps, arrive=False)
        d.arrive("c", 0, refusal="non_finite")
        give_up(d, "c")
        for name in "ab":
            d.take(name, 0, steps, norm=1.0)
        d.computed(0)
    return d


def test_without_a_bound_any_finite_delta_is_fit():
    d = not_finite(delta_bound=0.0, release_cycles=1)
    assert d.state.islands["c"].quarantined
    effects = cycle(d, c=1e6)
    assert reasons(effects) == ["quarantined"]
    assert persisted(effects, "released")


def test_nothing_of_a_quarantined_island_is_merged():
    d = quarantined()
    merged = d.totals("c").merged
    effects = cycle(d, c=1.0)
    assert merged_islands(only(effects, Merge)) == ["a", "b"]
    assert reasons(effects) == ["quarantined"]
    totals = d.totals("c")
    assert totals.merged == merged == 0
    assert totals.lost == {"out_of_bounds": 80, "quarantined": 40}


def test_it_is_released_after_whole_cycles_within_bounds():
    d = quarantined(release_cycles=2)
    cycle(d, c=1.0)
    assert not persisted(cycle(d, c=10.0), "released")
    cycle(d, c=1.0)
    assert d.state.islands["c"].quarantined
    effects = cycle(d, c=1.0)
    assert persisted(effects, "released")[0]["fit"] == 2
    assert not d.state.islands["c"].quarantined
    assert merged_islands(only(cycle(d, c=1.0), Merge)) == ["a", "b", "c"]


def test_it_stays_apart_after_a_crash_and_as_another_incarnation():
    d = quarantined()
    d.crash()
    assert d.state.islands["c"].quarantined
    for name in "abc":
        d.hello(name, 2)
        d.report(name, 0)
    assert d.state.islands["c"].quarantined
    assert merged_islands(only(cycle(d, c=1.0), Merge)) == ["a", "b"]
    cycle(d, c=1.0)
    assert not d.state.islands["c"].quarantined
    d.crash()
    assert not d.state.islands["c"].quarantined


def test_a_delta_that_came_before_any_of_the_others_releases_nobody():
    d = quarantined()
    for _ in range(3):
        forget_lengths(d)
        steps = d.state.islands["c"].steps + 4
        d.reports(a=steps, b=steps, c=steps)
        assert reasons(d.take("c", 0, steps, norm=1e3)) == ["quarantined"]
        give_up(d, "c")
        for name in "ab":
            d.take(name, 0, steps, norm=1.0)
        d.computed(0)
    assert d.state.islands["c"].quarantined


def test_most_islands_are_never_quarantined():
    d = quarantined()
    for _ in range(4):
        steps = d.state.islands["a"].steps + 4
        d.reports(a=steps, b=steps, c=steps)
        d.take("c", 0, steps, arrive=False)
        d.take("b", 0, steps, arrive=False)
        for name in "cb":
            d.arrive(name, 0, refusal="non_finite")
            give_up(d, name)
        d.take("a", 0, steps, norm=1.0)
        d.computed(0)
    assert d.state.islands["b"].streak == 4
    assert [n for n, i in d.state.islands.items() if i.quarantined] == ["c"]


def test_merges_are_not_shortened_by_its_absence_nor_wait_for_it():
    d = quarantined()
    steps = d.state.islands["a"].steps + 4
    d.reports(a=steps, b=steps, c=steps)
    d.take("a", 0, steps, norm=1.0)
    merge = only(d.take("b", 0, steps, norm=1.0), Merge)
    assert (merged_islands(merge), merge.share) == (["a", "b"], 1.0)


def test_it_is_judged_and_released_even_if_no_quorum_is_left():
    d = wary(quorum=3)
    for norm in (1.0, 1.0, 1.0, 10.0, 10.0):
        cycle(d, c=norm)
    assert d.state.islands["c"].quarantined
    for _ in range(4):
        cycle(d, c=1.0)
        if not d.state.islands["c"].quarantined:
            break
    assert not d.state.islands["c"].quarantined


def test_a_run_ends_with_an_island_in_quarantine():
    d = quarantined(total_tokens=600)
    steps = d.state.islands["a"].steps
    while d.state.phase == "running":
        steps += 4
        d.reports(a=steps, b=steps, c=steps)
    for name in "abc":
        d.report(name, steps, phase="stopped")
    for name in "abc":
        if (take := d.account(name, 0).take) is not None and take.end is None:
            d.take(name, 0, steps, norm=1.0)
    give_up(d, "c")
    while d.fragment(0).phase == "merging":
        d.computed(0)
    d.wait(d.config.flush_s + 1)
    assert d.state.phase == "done"
    assert d.totals("c").merged == 0


def test_with_one_other_island_it_is_judged_though_its_delta_comes_first():
    """That one alone is no measure, so nothing that is still to come would tell."""
    d = quarantined(release_cycles=1, quorum=1)
    d.goodbye("b")
    forget_lengths(d)
    steps = d.state.islands["c"].steps + 4
    d.reports(a=steps, c=steps)
    effects = d.take("c", 0, steps, norm=1e3)
    assert persisted(effects, "released")
