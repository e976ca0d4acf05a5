"""A coordinator without its state, or with a run that an island's parameters begin: who
is waited for, what is fetched from whom, and what the new term begins with.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit import of
from msgspec.structs import replace
from search_support import CONFIG, PATIENCE_S, Searching, anchor, asked, found

from diloco_jax.protocol.coordinator import anchors, recovery
from diloco_jax.protocol.coordinator.leases import most_unheard
from diloco_jax.protocol.coordinator.search import (
    MERGES_AHEAD,
    MOST_NAMED,
    Effect,
    FoundTerm,
    GiveUp,
    Postpone,
    listed,
    run_of_most,
)
from diloco_jax.protocol.coordinator.state import Alert, Tell
from diloco_jax.protocol.messages import FIRST_VERSION, Refused, Version, Welcome


def versions(opened: FoundTerm) -> tuple[Version, ...]:
    return tuple(anchor.version for anchor in opened.anchors)


def sources(opened: FoundTerm) -> tuple[str, ...]:
    return tuple(anchor.island for anchor in opened.anchors)


def test_the_highest_version_of_every_fragment_begins_the_next_term() -> None:
    g = Searching()
    (admit,) = g.offer("a", 5, 7, tokens=300, next_position=40)
    welcome = Welcome(run_id="run-1", term=0, resumed=True, versions=())
    assert admit == Tell(session="a1", message=welcome)
    effects = g.offer("b", 6, 7, tokens=280, next_position=44, step_seconds=0.5)
    assert asked(effects) == [("b", 0), ("a", 1)]
    g.arrive("b", 0, 6)
    opened = found(g.arrive("a", 1, 7))
    unheard = 2 * most_unheard(CONFIG, 0.5, 2)
    assert opened == FoundTerm(
        run_id="run-1",
        term=2,
        name="n",
        anchors=(
            anchor(0, "b", 6, 2),
            anchor(1, "a", 7, 2),
        ),
        tokens=300,
        next_position=44 + unheard,
        offered=("a", "b"),
    )
    assert unheard > 0
    assert g.wait(10 * PATIENCE_S) == []


def test_people_are_told_what_it_waits_for() -> None:
    g = Searching()
    g.offer("a", 5, 7)
    g.offer("b", 6, 7)
    assert "has lost its state" in anchors.waits_for(g.state)
    assert "0 of 2 fragments have arrived" in anchors.waits_for(g.state)
    g.arrive("b", 0, 6)
    assert "1 of 2 fragments have arrived" in anchors.waits_for(g.state)
    lost = Searching(run_id="run-1", term=2, known={0: {}, 1: {}})
    assert "fragments [0, 1] are lost" in anchors.waits_for(lost.state)
    first = Searching("a", run_id="run-1", first=True)
    assert "with the parameters of island 'a'" in anchors.waits_for(first.state)


def test_offers_are_awaited_from_the_first_one_on() -> None:
    g = Searching()
    g.now += 0.9 * PATIENCE_S
    g.offer("a", 1, 1)
    assert anchors.next_deadline(g.state, g.now) == g.now + PATIENCE_S
    assert asked(g.wait(0.9 * PATIENCE_S)) == []
    g.hear("a")
    assert asked(g.offer("c", 0, 0)) == []
    assert asked(g.wait(0.1 * PATIENCE_S)) == [("a", 0)]


def test_without_an_offer_there_is_no_term() -> None:
    g = Searching()
    (postponed,) = g.offer("a")
    assert isinstance(postponed, Postpone)
    assert "no state yet, and the island no anchors" in postponed.message
    assert g.wait(0.99 * PATIENCE_S) == []
    (given_up,) = g.wait(0.01 * PATIENCE_S)
    assert isinstance(given_up, GiveUp)
    assert given_up.message == "no island offered its anchors within 200 s"
    assert not given_up.unfit, "the next process asks again"
    assert g.wait(PATIENCE_S) == []


def test_where_the_config_names_nobody_offers_are_awaited_all_the_same() -> None:
    g = Searching("")
    assert not of(g.offer("a"), GiveUp), "a join has none"
    assert asked(g.offer("b", 1, 1)) == []
    g.now += PATIENCE_S
    assert asked(g.hear("b")) == [("b", 0)]


def test_who_comes_when_the_others_are_asked_is_asked_for_the_rest() -> None:
    g = Searching()
    g.offer("a", 1, 1)
    g.now += PATIENCE_S
    assert asked(g.hear("a")) == [("a", 0)]
    assert asked(g.offer("b", 9, 9)) == [("b", 1)]


def test_a_connection_that_breaks_is_waited_for() -> None:
    g = Searching()
    g.offer("b", 1, 1)
    g.offer("a", 2, 1)
    assert g.lose("a") == []
    assert g.wait(0.9 * CONFIG.lease_s) == []
    g.hear("b")
    effects = g.offer("a", 2, 1)
    assert isinstance(of(effects, Tell)[0].message, Welcome)
    assert asked(effects) == [("a", 0)], "the request may be lost"
    assert g.wait(CONFIG.lease_s * 0.2) == []


@pytest.mark.parametrize("silent", [False, True])
def test_who_is_cut_off_or_silent_is_not_here(silent: bool) -> None:
    g = Searching("abc")
    g.offer("a", 1, 1)
    if silent:
        g.now += CONFIG.lease_s
    else:
        g.lose("a")
    g.offer("b", 1, 1)
    assert asked(g.offer("c", 1, 1)) == []
    assert asked(g.offer("a", 2, 1)) == [("a", 0), ("b", 1)]


def test_all_who_offered_may_be_gone_at_the_deadline() -> None:
    """Their run is known, but nobody is left to send."""
    g = Searching()
    g.offer("a", 1, 1)
    (given_up,) = of(g.wait(PATIENCE_S), GiveUp)
    assert "did not come from any island that had it" in given_up.message


def test_of_an_earlier_connection_nothing_counts() -> None:
    g = Searching()
    g.offer("a", 1, 1, session="newer")
    assert g.lose("a") == []
    assert g.state.members["a"].connected


def test_the_next_best_has_to_do() -> None:
    g = Searching()
    g.offer("b", 1, 3)
    effects = g.offer("a", 2, 3)
    assert asked(effects) == [("a", 0), ("b", 1)]
    g.arrive("b", 1, 3)
    g.now += 1.0
    g.lose("a")
    g.hear("b")
    assert anchors.next_deadline(g.state, g.now) == g.now + CONFIG.lease_s
    g.now += 0.5 * CONFIG.lease_s
    g.hear("b")
    assert asked(g.wait(0.5 * CONFIG.lease_s)) == [("b", 0)]
    assert anchors.next_deadline(g.state, g.now) == g.now + 0.5 * CONFIG.lease_s
    assert g.arrive("a", 0, 2) == [], "too late"
    opened = found(g.arrive("b", 0, 1))
    assert versions(opened) == (Version(2, 1), Version(2, 3))


def test_an_anchor_that_does_not_come_is_given_up() -> None:
    g = Searching("a")
    g.offer("a", 1, 1)
    g.now += 0.9 * CONFIG.outage_budget_s
    assert g.hear("a") == []
    (given_up,) = g.wait(0.1 * CONFIG.outage_budget_s)
    assert isinstance(given_up, GiveUp)
    assert "fragment 0 did not come from any island" in given_up.message


def test_who_did_not_send_one_fragment_is_asked_last_for_the_others() -> None:
    """Or an island that claims the newest versions would delay each fragment."""
    g = Searching()
    g.offer("b", 9, 9)
    assert asked(g.offer("a", 1, 1)) == [("b", 0)]
    for _ in range(9):
        g.now += 0.1 * CONFIG.outage_budget_s
        assert asked([*g.hear("a"), *g.hear("b")]) == []
    assert asked(g.wait(0.1 * CONFIG.outage_budget_s)) == [("a", 0)]
    assert asked(g.arrive("a", 0, 1)) == [("a", 1)], "and not b, though it has 9"
    g.lose("a")
    g.now += 0.5 * CONFIG.lease_s
    g.hear("b")
    assert asked(g.wait(0.5 * CONFIG.lease_s)) == [("b", 1)], "nobody else is left"


def test_a_later_process_of_an_island_offers_instead_of_the_earlier() -> None:
    g = Searching()
    g.offer("a", 1, 1, incarnation=2)
    (late,) = g.offer("a", 4, 4, incarnation=1)
    assert isinstance(late, Postpone)
    assert "incarnation 2 of this island has offered" in late.message
    g.offer("a", 3, 3, incarnation=3)
    assert g.state.members["a"].offer.incarnation == 3


def test_an_anchor_of_an_earlier_process_does_not_count() -> None:
    g = Searching("a")
    assert asked(g.offer("a", 3, 3, incarnation=2)) == [("a", 0)]
    before = g.state
    assert g.arrive("a", 0, 3) == []
    assert g.state == before


def test_a_term_is_above_all_that_anybody_was_in() -> None:
    g = Searching("ab")
    g.offer("a", versions=(Version(1, 9), Version(1, 9)), term=4)
    effects = g.offer("b", versions=(Version(3, 2), Version(1, 2)), term=3)
    assert asked(effects) == [("b", 0), ("a", 1)]
    g.arrive("b", 0, 2, term=3)
    opened = found(g.arrive("a", 1, 9))
    assert versions(opened) == (Version(5, 2), Version(5, 9))


def test_what_a_join_heard_counts_though_it_has_no_anchors() -> None:
    """Another new term may have ended before anybody but the join was in it."""
    g = Searching("a")
    heard = {"versions": (), "term": 2, "tokens": 350, "next_position": 900}
    (postponed,) = g.offer("b", **heard)
    assert isinstance(postponed, Postpone)
    g.offer("c", versions=(), term=7, differences=("seed: 0 here, 1 there",))
    assert asked(g.offer("a", 9, 9, tokens=300, next_position=70)) == [("a", 0)]
    g.offer("b", versions=(), term=3, incarnation=2)
    g.arrive("a", 0, 9)
    opened = found(g.arrive("a", 1, 9))
    assert (opened.term, opened.tokens) == (4, 350)
    unheard = most_unheard(CONFIG, 1.0, 2)
    assert opened.next_position == 900 + unheard


def test_the_state_of_the_new_term() -> None:
    opened = FoundTerm(
        run_id="run-1",
        term=3,
        name="n",
        anchors=tuple(anchor(f, "a", n, 3) for f, n in enumerate((6, 7, 0))),
        tokens=500,
        next_position=77,
    )
    config = replace(CONFIG, fragment_sizes=(1, 1, 1))
    state = recovery.first_state(config, opened)
    assert [f.version for f in state.fragments] == list(versions(opened))
    for fragment, begun in zip(state.fragments, opened.anchors, strict=True):
        known = recovery.versions_known(fragment, {})
        assert list(known) == [begun.replaced, begun.version], "islands have both"
    assert (state.term, state.term_name, state.books) == (3, "n", 3)
    assert (state.tick, state.ticks_reserved) == (2_000_000_001,) * 2
    assert state.tick % 3 == 0, "the first tick is fragment 0's"
    assert (state.progress_tokens, state.next_position) == (500, 77)
    assert (state.islands, state.phase) == ({}, "running")


@pytest.mark.parametrize(
    ("lie", "claim"),
    [
        ({"term": 2**20}, "term = 1048576, and at most 18"),
        ({"tokens": 10**9}, "tokens = 1000000000, and at most"),
        ({"next_position": 2**40}, "next_position = 1099511627776, and at most"),
        ({"versions": (Version(1, 2**47), Version(1, 7))}, "merges = 14073748835"),
        ({"versions": (Version(2**19, 5), Version(1, 7))}, "term = 524288, and at"),
    ],
)
def test_one_of_three_that_claims_far_more_is_not_believed(
    lie: dict[str, Any], claim: str
) -> None:
    g = Searching("abc")
    g.offer("a", 5, 7, tokens=300, next_position=40)
    g.offer("b", 5, 7, **lie)
    effects = g.offer("c", 6, 6, tokens=310)
    (refused,) = of(effects, Refused)
    assert "island 'b' is not believed" in refused.message
    assert claim in refused.message
    assert "start it again with incarnation 2" in refused.message
    assert asked(effects) == [("c", 0), ("a", 1)]
    assert of(g.offer("b", 5, 7, **lie), Refused), "nor later"
    g.arrive("c", 0, 6)
    opened = found(g.arrive("a", 1, 7))
    assert versions(opened) == (Version(2, 6), Version(2, 7))
    assert (opened.tokens, sources(opened)) == (310, ("c", "a"))
    assert opened.next_position < 2**20


def test_an_island_that_was_alone_for_long_is_believed() -> None:
    g = Searching("abc")
    g.offer("a", 50, 50, tokens=CONFIG.total_tokens // 4)
    g.offer(
        "b", 90, 90, tokens=CONFIG.total_tokens // 2 + 1, term=5, next_position=2**20
    )
    effects = g.offer("c", 50, 50, tokens=CONFIG.total_tokens // 4)
    assert not of(effects, Refused)
    assert asked(effects) == [("b", 0)]


@pytest.mark.parametrize(
    ("number", "term", "counts"),
    [
        (5, 1, True),
        (5 + MERGES_AHEAD, 1, True),
        (6 + MERGES_AHEAD, 1, False),
        (4, 1, False),
        (6, 2, False),
        (2**40, 1, False),
    ],
)
def test_an_anchor_arrives_at_about_the_version_that_was_offered(
    number: int, term: int, counts: bool
) -> None:
    """It may be some merges newer."""
    g = Searching("ab")
    g.offer("a", 5, 7)
    assert asked(g.offer("b", 5, 6)) == [("a", 0)]
    effects = g.arrive("a", 0, number, term)
    assert (0 in g.state.got) is counts
    if counts:
        return
    assert asked(effects) == [("b", 0)]
    assert asked(g.arrive("b", 0, 5)) == [("b", 1)], "a is asked last"


def test_an_anchor_that_is_judged_is_not_replaced_by_another() -> None:
    """Ballots are of the first."""
    g = Searching("abc")
    g.says = dict.fromkeys("bc")
    for name in "abc":
        g.offer(name, 5, 5)
    g.arrive("a", 0, 5)
    judged = g.state.claims[0]
    assert judged.anchor is not None
    assert g.arrive("a", 0, 5, digest="of other values") == []
    assert g.arrive("a", 0, 5, unfit=True) == []
    assert g.state.claims[0] == judged


def test_anchors_of_a_term_that_is_known_already_do_not_count() -> None:
    """An island has heard of the number that was chosen: all come anew for the next."""
    g = Searching("ab")
    g.offer("a", 5, 5)
    assert asked(g.offer("b", 4, 4)) == [("a", 0)]
    late = anchor(0, "a", 5, g.state.term)
    assert asked(g.offer("b", 4, 4, term=g.state.term)) == [("a", 0)]
    assert g.state.term == 3
    assert g.feed(late) == []
    assert g.state.claims[0].anchor is None
    g.arrive("a", 0, 5)
    assert found(g.arrive("a", 1, 5)).term == 3


def test_an_island_makes_anchors_come_anew_once() -> None:
    """One that is told the new number, and claims to know it, held all up."""
    g = Searching("ab")
    g.offer("a", 5, 5)
    g.offer("b", 4, 4)
    g.offer("b", 4, 4, term=g.state.term)
    g.arrive("a", 0, 5)
    (refused,) = of(g.offer("b", 4, 4, term=g.state.term), Tell)
    assert "it claims term = 3, and has made the new one's" in refused.message.message
    assert found(g.arrive("a", 1, 5)).term == 3


def test_an_anchor_is_awaited_until_its_own_deadline() -> None:
    g = Searching("a")
    g.offer("a", 5, 5)
    until = g.now + CONFIG.outage_budget_s
    g.pass_time(CONFIG.outage_budget_s - 50, "a")
    assert anchors.next_deadline(g.state, g.now) == until
    assert of(g.wait(50), GiveUp)


@pytest.mark.parametrize(
    ("changes", "step_seconds", "position"),
    [
        # One that says it is fast uses up no more.
        ({"least_seconds": {"a": 0.25}}, 1e-9, 8 + most_unheard(CONFIG, 0.5, 2)),
        # First grants go by no speed: two of an island, each of twice 64 steps.
        ({"outage_budget_s": 20.0}, 1.0, 8 + 2 * (2 * 64 * 2)),
    ],
)
def test_grants_begin_beyond_those_that_nobody_may_have_heard_of(
    changes: dict[str, Any], step_seconds: float, position: int
) -> None:
    g = Searching("a")
    g.config = replace(g.config, **changes)
    g.offer("a", 1, 1, step_seconds=step_seconds, next_position=8)
    g.arrive("a", 0, 1)
    assert found(g.arrive("a", 1, 1)).next_position == position


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"differences": ("seed: 0 here, 1 there",)}, "another config: seed: 0 here"),
        ({"run_id": "run-2"}, "'x' is in run run-2, and this coordinator gathers"),
        ({"run_id": ""}, "'x' offers anchors of no run"),
    ],
)
@pytest.mark.parametrize("phase", ["waiting", "fetching"])
def test_an_offer_that_does_not_fit_is_put_off_and_ends_nothing(
    other: dict[str, Any], said: str, phase: str
) -> None:
    g = Searching("ab", run_id="run-1")
    g.offer("a", 5, 7)
    if phase == "fetching":
        assert asked(g.offer("b", 6, 7)) == [("b", 0), ("a", 1)]
    postponed, alert = g.offer("x", 9, 9, term=9, **other)
    assert isinstance(postponed, Postpone)
    assert postponed.session == "x1"
    assert said in postponed.message
    assert isinstance(alert, Alert)
    assert anchors.notices(g.state) == [alert.text]
    assert alert.text in postponed.message
    (again,) = g.offer("x", 9, 9, term=9, **other)
    assert again == postponed, "told the island again, and people once"
    if phase == "waiting":
        assert asked(g.offer("b", 6, 7)) == [("b", 0), ("a", 1)]
    g.arrive("b", 0, 6)
    opened = found(g.arrive("a", 1, 7))
    assert (opened.run_id, opened.term) == ("run-1", 2)
    assert sources(opened) == ("b", "a")


def test_an_island_that_comes_to_fit_is_no_longer_told_of() -> None:
    g = Searching()
    g.offer("a", 1, 1, differences=("seed: 0 here, 1 there",))
    assert anchors.notices(g.state)
    g.offer("a", 1, 1, incarnation=2)
    assert anchors.notices(g.state) == []


def test_if_no_offer_fits_it_ends_at_the_deadline_with_both_values() -> None:
    g = Searching()
    g.offer("a", 1, 1, differences=("seed: 0 here, 1 there",))
    assert not of(g.wait(0.99 * PATIENCE_S), GiveUp)
    g.offer("b", 1, 1, differences=("seed: 0 here, 1 there",))
    (given_up,) = of(g.wait(0.01 * PATIENCE_S), GiveUp)
    assert "fit within 200 s: island 'a' is in run run-1 with" in given_up.message
    assert "'b' is in run run-1 with another config: seed: 0 here" in given_up.message
    assert "this coordinator that is wrong: start it with their" in given_up.message
    assert given_up.unfit, "a person has to change this config"
    assert not of(g.effects, Tell), "refused, islands would end, and their anchors too"


def test_the_run_of_most_islands_goes_on() -> None:
    g = Searching("abc")
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
    opened = found(g.arrive("a", 1, 7))
    assert (opened.run_id, opened.term) == ("run-1", 2), "no claim of run-2 counts"


@pytest.mark.parametrize(
    ("runs", "most"), [("a", "a"), ("aab", "a"), ("abc", ""), ("aabbc", ""), ("", "")]
)
def test_a_run_is_that_of_most_if_no_other_one_has_as_many(runs, most) -> None:
    assert run_of_most(runs) == most


@pytest.mark.parametrize(("more", "rest"), [(0, ""), (1, "; and 1 more")])
def test_of_many_some_are_named_and_the_others_counted(more: int, rest: str) -> None:
    assert listed(["x"] * (MOST_NAMED + more)) == "; ".join("x" * MOST_NAMED) + rest


def test_of_two_runs_with_as_many_islands_neither_is_chosen() -> None:
    g = Searching()
    g.offer("a", 1, 1)
    g.offer("b", 1, 1, run_id="run-2")
    leases = (PATIENCE_S + CONFIG.outage_budget_s) / CONFIG.lease_s
    for _ in range(int(2 * leases) - 1):
        assert not of(g.wait(0.5 * CONFIG.lease_s), GiveUp)
        assert anchors.next_deadline(g.state, g.now) <= g.state.decided_by
        g.hear("a")
        g.hear("b")
    assert anchors.next_deadline(g.state, g.now) <= g.now + 0.5 * CONFIG.lease_s
    (given_up,) = of(g.wait(0.5 * CONFIG.lease_s), GiveUp)
    assert "'a' in run run-1; 'b' in run run-2" in given_up.message
    assert "with --run-id and its own run, or end the islands" in given_up.message


def test_a_coordinator_that_is_told_its_run_waits_for_no_other_one() -> None:
    g = Searching("ab", run_id="run-1")
    g.offer("a", 1, 1)
    assert of(g.offer("b", 1, 1, run_id="run-2"), Postpone)
    for _ in range(3):
        assert asked(g.wait(0.25 * PATIENCE_S)) == []
        g.hear("a")
    assert asked(g.wait(0.25 * PATIENCE_S)) == [("a", 0)]


def test_a_tie_is_over_once_an_island_has_gone() -> None:
    g = Searching()
    g.offer("a", 1, 1)
    g.offer("b", 1, 1, run_id="run-2")
    for _ in range(4):
        g.wait(0.5 * CONFIG.lease_s)
        g.hear("a")
        g.hear("b")
    g.lose("b")
    g.wait(0.5 * CONFIG.lease_s)
    g.hear("a")
    assert anchors.next_deadline(g.state, g.now) == g.now + 0.5 * CONFIG.lease_s
    assert asked(g.wait(0.5 * CONFIG.lease_s)) == [("a", 0)]


def test_news_of_another_run_do_not_count() -> None:
    g = Searching("a")
    g.offer("b", versions=(), run_id="run-2", term=9, tokens=999)
    assert asked(g.offer("a", 1, 1, tokens=300)) == [("a", 0)]
    g.offer("c", versions=(), run_id="run-2", term=9, tokens=999)
    g.arrive("a", 0, 1)
    opened = found(g.arrive("a", 1, 1))
    assert (opened.term, opened.tokens) == (2, 300)
    g = Searching("ab")
    g.offer("a", 1, 1, term=4)
    g.offer("a", incarnation=2, run_id="run-2")
    assert asked(g.offer("b", 1, 1)) == [("a", 0), ("b", 1)]
    assert g.state.term == 5, "nor do they hide those of the run"


COMPILE_S = 600.0


class Giving(Searching):
    """Island a gives two fragments."""

    def __init__(self) -> None:
        super().__init__("a", run_id="run-1", first=True)
        self.config = replace(self.config, compile_budget_s=COMPILE_S)
        self.state = anchors.begin(self.config, self.aim, self.now)

    def hello(self, name: str = "a", **fields: Any) -> list[Effect]:
        return self.offer(name, **{"run_id": "", "term": 0, **fields})

    def give(self, fragment: int, **fields: Any) -> list[Effect]:
        return self.arrive("a", fragment, 0, **fields)


@pytest.fixture
def run() -> Giving:
    return Giving()


def test_each_fragment_is_asked_for_and_the_run_begins_with_all(run: Giving) -> None:
    begun = run.hello()
    (welcome,) = of(begun, Welcome)
    assert (welcome.run_id, welcome.term, welcome.versions) == ("run-1", 0, ())
    assert asked(begun) == [("a", 0)]
    assert asked(run.give(0)) == [("a", 1)]
    opened = found(run.give(1))
    assert opened.run_id == "run-1"
    assert [a.version for a in opened.anchors] == [FIRST_VERSION] * 2
    assert [a.island for a in opened.anchors] == ["a", "a"]
    assert (opened.tokens, opened.next_position) == (0, 0)


def test_others_are_told_for_whom_they_wait(run: Giving) -> None:
    (postponed,) = of(run.hello("b"), Postpone)
    assert "island 'a', of which 0 of 2" in postponed.message
    run.hello()
    run.give(0)
    (postponed,) = run.hello("b")
    assert "1 of 2 fragments" in postponed.message


@pytest.mark.parametrize("silent", [False, True])
def test_another_attempt_gives_all_of_them_anew(run: Giving, silent: bool) -> None:
    run.hello()
    run.give(0)
    if silent:
        assert not of(run.wait(CONFIG.lease_s), GiveUp)
        assert not run.state.got
    assert asked(run.hello(incarnation=2)) == [("a", 0)]
    assert run.give(0) == [], "of the attempt before"
    assert not run.state.got
    run.give(0, incarnation=2)
    found(run.give(1, incarnation=2))


def test_a_connection_that_broke_loses_nothing(run: Giving) -> None:
    run.hello()
    run.give(0)
    run.lose("a")
    assert asked(run.hello(run_id="run-1")) == [("a", 1)]
    found(run.give(1))


def test_what_was_not_asked_for_or_is_not_finite_does_not_count(run: Giving) -> None:
    run.hello()
    assert run.give(1) == []
    assert not run.state.got
    (end,) = of(run.give(0, unfit=True), GiveUp)
    assert "fragment 0" in end.message
    assert "was not finite" in end.message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"differences": ("seed: 1 here, 2 there",)}, "config"),
        ({"run_id": "other"}, "run_id"),
        ({"incarnation": 2, "session": "other"}, "name_in_use"),
    ],
)
def test_who_cannot_give_is_refused(
    run: Giving, changes: dict[str, Any], code: str
) -> None:
    run.hello(incarnation=2)
    (refused,) = of(run.hello(**({"incarnation": 3} | changes)), Refused)
    assert refused.code == code
    (postponed,) = run.hello(incarnation=1)
    assert isinstance(postponed, Postpone)


def test_it_is_waited_for_until_a_deadline_that_it_can_meet_by_compiling(
    run: Giving,
) -> None:
    assert anchors.next_deadline(run.state, run.now) == run.now + COMPILE_S
    assert run.wait(COMPILE_S - 1) == []
    run.hello()
    assert anchors.next_deadline(run.state, run.now) == run.now + CONFIG.lease_s
    assert not of(run.pass_time(COMPILE_S, "a"), GiveUp)
    assert asked(run.give(0)) == [("a", 1)]


def test_where_it_does_not_come_the_coordinator_gives_up(run: Giving) -> None:
    (gone,) = of(run.wait(COMPILE_S), GiveUp)
    assert "island 'a'" in gone.message
    assert "compile_budget_s = 600" in gone.message
    assert run.wait(1) == []


def test_where_it_lives_and_sends_nothing_the_coordinator_gives_up(run: Giving) -> None:
    run.hello()
    (end,) = of(run.pass_time(COMPILE_S + CONFIG.outage_budget_s, "a"), GiveUp)
    assert "fragment 0" in end.message
