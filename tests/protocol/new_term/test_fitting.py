"""Offers of another config or run: put off, named, and never the end of a gathering
that has others."""

from __future__ import annotations

from typing import Any

import pytest
from gatherer_support import CONFIG, PATIENCE_S, Gatherer, asked, of

from diloco_jax.protocol.coordinator import gathering
from diloco_jax.protocol.coordinator.events import Alert, Tell
from diloco_jax.protocol.coordinator.gathering import GiveUp, Open, Postpone


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"differences": ("seed: 0 here, 1 there",)}, "another config: seed: 0 here"),
        ({"run_id": "run-2"}, "'x' is in run run-2, and this coordinator gathers"),
    ],
)
@pytest.mark.parametrize("phase", ["waiting", "fetching"])
def test_an_offer_that_does_not_fit_is_put_off_and_ends_nothing(
    other: dict[str, Any], said: str, phase: str
) -> None:
    g = Gatherer("ab", run_id="run-1")
    g.offer("a", 5, 7)
    if phase == "fetching":
        assert asked(g.offer("b", 6, 7)) == [("b", 0), ("a", 1)]
    postponed, alert = g.offer("x", 9, 9, term=9, **other)
    assert isinstance(postponed, Postpone)
    assert postponed.session == "x1"
    assert said in postponed.message
    assert isinstance(alert, Alert)
    assert gathering.notices(g.state) == [alert.text]
    assert alert.text in postponed.message
    (again,) = g.offer("x", 9, 9, term=9, **other)
    assert again == postponed, "told the island again, and people once"
    if phase == "waiting":
        assert asked(g.offer("b", 6, 7)) == [("b", 0), ("a", 1)]
    g.arrive("b", 0, 6)
    (opened,) = of(g.arrive("a", 1, 7), Open)
    assert (opened.run_id, opened.term) == ("run-1", 2)
    assert opened.sources == ("b", "a")


def test_an_island_that_comes_to_fit_is_no_longer_told_of() -> None:
    g = Gatherer()
    g.offer("a", 1, 1, differences=("seed: 0 here, 1 there",))
    assert gathering.notices(g.state)
    g.offer("a", 1, 1, incarnation=2)
    assert gathering.notices(g.state) == []


def test_if_no_offer_fits_it_ends_at_the_deadline_with_both_values() -> None:
    g = Gatherer()
    g.offer("a", 1, 1, differences=("seed: 0 here, 1 there",))
    assert not of(g.wait(0.99 * PATIENCE_S), GiveUp)
    g.offer("b", 1, 1, differences=("seed: 0 here, 1 there",))
    (given_up,) = of(g.wait(0.01 * PATIENCE_S), GiveUp)
    assert "fit within 200 s: island 'a' is in run run-1 with" in given_up.message
    assert "'b' is in run run-1 with another config: seed: 0 here" in given_up.message
    assert "this coordinator that is wrong: start it with their" in given_up.message
    assert not of(g.effects, Tell), "refused, islands would end, and their anchors too"


def test_the_run_of_most_islands_goes_on() -> None:
    g = Gatherer("abc")
    g.offer("b", 9, 9, run_id="run-2", term=9)
    (alert,) = of(g.offer("a", 5, 7), Alert)
    assert "'a' in run run-1; 'b' in run run-2" in alert.text
    effects = g.offer("c", 6, 6)
    (postponed,) = of(effects, Postpone)
    assert postponed.session == "b1"
    assert "'b' is in run run-2, and this coordinator gathers" in postponed.message
    assert asked(effects) == [("c", 0), ("a", 1)]
    assert of(g.offer("b", 9, 9, run_id="run-2", term=9), Postpone)
    g.arrive("c", 0, 6)
    (opened,) = of(g.arrive("a", 1, 7), Open)
    assert (opened.run_id, opened.term) == ("run-1", 2), "no claim of run-2 counts"


def test_of_two_runs_with_as_many_islands_neither_is_chosen() -> None:
    g = Gatherer()
    g.offer("a", 1, 1)
    g.offer("b", 1, 1, run_id="run-2")
    leases = (PATIENCE_S + CONFIG.outage_budget_s) / CONFIG.lease_s
    for _ in range(int(2 * leases) - 1):
        assert not of(g.wait(0.5 * CONFIG.lease_s), GiveUp)
        g.hear("a")
        g.hear("b")
    assert gathering.next_deadline(g.state, g.now) <= g.now + 0.5 * CONFIG.lease_s
    (given_up,) = of(g.wait(0.5 * CONFIG.lease_s), GiveUp)
    assert "'a' in run run-1; 'b' in run run-2" in given_up.message
    assert "with --run-id and its own run, or end the islands" in given_up.message


def test_a_coordinator_that_is_told_its_run_waits_for_no_other_one() -> None:
    g = Gatherer("ab", run_id="run-1")
    g.offer("a", 1, 1)
    assert of(g.offer("b", 1, 1, run_id="run-2"), Postpone)
    for _ in range(3):
        assert asked(g.wait(0.25 * PATIENCE_S)) == []
        g.hear("a")
    assert asked(g.wait(0.25 * PATIENCE_S)) == [("a", 0)]


def test_a_tie_is_over_once_an_island_has_gone() -> None:
    g = Gatherer()
    g.offer("a", 1, 1)
    g.offer("b", 1, 1, run_id="run-2")
    for _ in range(4):
        g.wait(0.5 * CONFIG.lease_s)
        g.hear("a")
        g.hear("b")
    g.lose("b")
    g.wait(0.5 * CONFIG.lease_s)
    g.hear("a")
    assert gathering.next_deadline(g.state, g.now) == g.now + 0.5 * CONFIG.lease_s
    assert asked(g.wait(0.5 * CONFIG.lease_s)) == [("a", 0)]


def test_news_of_another_run_do_not_count() -> None:
    g = Gatherer("a")
    g.offer("b", versions=(), run_id="run-2", term=9, tokens=999)
    assert asked(g.offer("a", 1, 1, tokens=300)) == [("a", 0)]
    g.offer("c", versions=(), run_id="run-2", term=9, tokens=999)
    g.arrive("a", 0, 1)
    (opened,) = of(g.arrive("a", 1, 1), Open)
    assert (opened.term, opened.tokens) == (2, 300)
