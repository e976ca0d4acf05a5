"""Quarantine: who is put apart, for how long, and who never is."""

from typing import Any

from bounds_support import give_up, patient, together
from kit import Driver, merged_islands, notes, of, only, persisted
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.state import (
    Alert,
    Effect,
    with_account,
    with_fragment,
)
from diloco_jax.protocol.holding import Merge


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
