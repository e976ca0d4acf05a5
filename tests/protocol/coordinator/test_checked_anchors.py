"""Anchors are checked before they count: by the log, by the others, or by a person."""

from __future__ import annotations

from typing import Any

import pytest
from kit import of
from msgspec.structs import replace
from search_support import CONFIG, PATIENCE_S, Searching, asked, found

from diloco_jax.protocol.coordinator import anchors
from diloco_jax.protocol.coordinator.anchors import MERGES_APART, MOST_CHANGES
from diloco_jax.protocol.coordinator.search import Effect, FoundTerm, GiveUp
from diloco_jax.protocol.coordinator.state import Alert
from diloco_jax.protocol.holding import AwaitAnchor
from diloco_jax.protocol.messages import MAX_COUNT, Version

CHANGE = 0.5


def offering(
    *numbers: int, changes: tuple[float, ...] = (), mute: str = "", **aim: Any
) -> Searching:
    """Islands a, b, ... offer both fragments at these versions, and are all there.
    mute: those that send no ballots."""
    names = "abcd"[: len(numbers)]
    g = Searching(names, **aim)
    g.says |= dict.fromkeys(mute)
    for name, number in zip(names, numbers, strict=True):
        g.offer(name, number, number, changes=changes)
    return g


def texts(effects: list[Effect]) -> str:
    return " ".join(alert.text for alert in of(effects, Alert))


def test_what_is_not_finite_is_refused_and_the_next_is_asked() -> None:
    g = offering(5, 5)
    effects = g.arrive("a", 0, 5, unfit=True, digest="")
    assert "island 'a' is not finite" in texts(effects)
    assert asked(g.arrive("b", 1, 5)) == [("b", 0)]
    g.arrive("b", 0, 5)
    assert g.state.got[0].island == "b"


def test_an_anchor_that_most_contradict_does_not_count_wherever_the_liar_is() -> None:
    for liar in "abc":
        g = offering(5, 5, 5)
        g.says = {name: {"equal": False} for name in "abc" if name != liar}
        effects = g.arrive(liar, 0, 5) if liar == "a" else []
        if liar == "a":
            assert "island 'a' does not count: it is not confirmed by 'b'; 'c'" in (
                texts(effects)
            )
            g.says = {"a": {"equal": False}}
            assert asked(effects) == [("c", 0)], "b sends fragment 1"
            effects = g.arrive("c", 0, 5)
        else:
            g.says = {liar: {"equal": False}}
            effects = g.arrive("a", 0, 5)
        assert g.state.got[0].island != liar
        assert not of(effects, GiveUp)


@pytest.mark.parametrize("trusted", ["", "b"])
def test_half_of_four_are_not_most_unless_one_is_trusted(trusted: str) -> None:
    g = offering(5, 5, 5, 5, trusted=trusted)
    g.says = {name: {"equal": False} for name in "cd"}
    said = texts(g.arrive("a", 0, 5))
    assert ("not confirmed by 'c'; 'd'" in said) is (not trusted)
    assert (0 in g.state.got) is bool(trusted)


def test_one_of_four_that_claims_the_newest_version_gives_way_to_the_next() -> None:
    g = offering(6, 5, 5, 5, changes=(CHANGE, CHANGE))
    g.says = {name: {"apart": 10 * MOST_CHANGES * CHANGE} for name in "bcd"}
    effects = g.arrive("a", 0, 6)
    assert "not confirmed by 'b'; 'c'; 'd'" in texts(effects)
    assert asked(effects) == [("a", 1), ("b", 0)]
    assert asked(g.arrive("a", 1, 6)) == [("c", 1)], "a comes last from now on"
    g.says = {"a": {"apart": 1e9}}
    g.arrive("b", 0, 5)
    opened = found(g.arrive("c", 1, 5))
    assert [anchor.version for anchor in opened.anchors] == [Version(2, 5)] * 2


@pytest.mark.parametrize(
    ("changes", "apart", "counts"),
    [
        ((CHANGE, CHANGE), MOST_CHANGES * CHANGE * 3, True),
        ((CHANGE, CHANGE), MOST_CHANGES * CHANGE * 3 + 0.1, False),
        ((CHANGE, CHANGE), float("inf"), False),
        ((), 1e9, True),
        ((0.0, CHANGE), 1e9, True),
    ],
)
def test_an_honest_newest_version_that_one_island_alone_has_counts(
    changes: tuple[float, ...], apart: float, counts: bool
) -> None:
    """It is three merges ahead, and within bounds if any island reports changes."""
    g = offering(8, 5, 5, changes=changes)
    g.says = {name: {"apart": apart} for name in "bc"}
    g.arrive("a", 0, 8)
    assert (0 in g.state.got) is counts


def test_one_that_nobody_is_near_enough_to_confirm_does_not_count() -> None:
    g = offering(5 + MERGES_APART + 1, 5, 5)
    assert "not confirmed" in texts(g.arrive("a", 0, 5 + MERGES_APART + 1))
    g = offering(5 + MERGES_APART, 5, 5)
    g.arrive("a", 0, 5 + MERGES_APART)
    assert 0 in g.state.got


@pytest.mark.parametrize(
    ("number", "equal", "counts"),
    [(5, True, True), (5, False, False), (4, True, False)],
)
def test_who_has_it_under_its_name_of_an_earlier_term_confirms_it(
    number: int, equal: bool, counts: bool
) -> None:
    """Version (1, 5) went on as (2, 5), which one island alone has adopted."""
    g = Searching("abc")
    g.offer("a", term=2, versions=(Version(2, 5),) * 2)
    for name in "bc":
        g.says[name] = {"equal": equal}
        g.offer(name, number, number, term=2)
    g.arrive("a", 0, 5, term=2)
    assert (0 in g.state.got) is counts


def test_with_fewer_than_three_finite_is_enough_and_people_are_told() -> None:
    g = offering(5, 4)
    g.arrive("a", 0, 5)
    assert g.vote("b", 0) == [], "it counts already"
    effects = g.arrive("a", 1, 5)
    assert of(effects, FoundTerm)
    assert "goes on with values of 'a', which no majority has checked" in texts(effects)
    g = offering(5, 5, 5)
    g.arrive("a", 0, 5)
    assert asked(g.offer("d", 5, 5), ballots=True) == [], "it counts already"
    assert "no majority" not in texts(g.arrive("b", 1, 5))


def torn(after_s: float = 0.0, **aim: Any) -> tuple[Searching, list[Effect]]:
    """Islands a and b differ in fragment 0, which comes after so long."""
    g = offering(5, 5, **aim)
    g.pass_time(after_s, "ab")
    g.says = {"b": {"equal": False}, "a": {"equal": False}}
    return g, g.arrive("a", 0, 5)


def test_two_that_differ_wait_for_a_third_which_decides() -> None:
    for third, island in (({"equal": True}, "a"), ({"equal": False}, "c")):
        g, effects = torn()
        assert "'a' and 'b' have two anchors of fragment 0 at version (1, 5)" in (
            texts(effects)
        )
        assert anchors.notices(g.state)
        assert 0 not in g.state.got
        g.says["c"] = third
        g.offer("c", 5, 5)
        if island == "c":
            g.says = {"a": {"equal": False}, "b": {"equal": True}}
            g.arrive("b", 1, 5)
            g.arrive("c", 0, 5)
        assert g.state.got[0].island == island


def test_while_a_third_may_vote_nobody_is_told_that_two_differ() -> None:
    g = offering(5, 5, 5, mute="c")
    g.says["b"] = {"equal": False}
    g.arrive("a", 0, 5)
    assert not anchors.notices(g.state)


def test_one_that_differs_and_starts_again_is_asked_anew_and_differs_until_then() -> (
    None
):
    """Its ballot may never come: the anchor that it contradicts must not count."""
    g, _ = torn()
    g.says["b"] = None
    g.pass_time(CONFIG.outage_budget_s + 0.5, "ab")
    effects = g.offer("b", 5, 5, incarnation=2)
    assert asked(effects, ballots=True) == [("b", 0)]
    assert anchors.notices(g.state)
    assert 0 not in g.state.got
    g.vote("b", 0, incarnation=2, equal=True)
    assert g.state.got[0].island == "a"
    assert not anchors.notices(g.state)


def test_two_that_come_to_two_that_differ_are_both_heard() -> None:
    g, _ = torn()
    g.says = {"c": None, "d": None}
    g.offer("c", 5, 5)
    g.offer("d", 5, 5)
    g.vote("c", 0, equal=False)
    assert 0 not in g.state.got
    assert not anchors.notices(g.state), "they wait for no third any more"
    g.vote("d", 0, equal=False)
    assert ("a", 0) in g.state.failed


@pytest.mark.parametrize("trusted", ["a", "b"])
def test_a_person_may_say_who_is_believed(trusted: str) -> None:
    g, effects = torn(trusted=trusted)
    if trusted == "b":
        assert "it is not confirmed by 'b'" in texts(effects)
        g.arrive("b", 1, 5)
        g.arrive("b", 0, 5)
    assert g.state.got[0].island == trusted


@pytest.mark.parametrize(
    "numbers", [(5 + MERGES_APART + 1, 5), (5 + MERGES_APART + 1, 5, 5)]
)
def test_whom_a_person_trusts_confirms_what_counts(numbers: tuple[int, ...]) -> None:
    g = offering(*numbers, trusted="b")
    effects = g.arrive("a", 0, numbers[0])
    assert "it is not confirmed by 'b'" in texts(effects)
    g.arrive("b", 0, 5)
    assert g.state.got[0].island == "b"


def test_where_three_islands_are_of_three_terms_a_person_has_to_say() -> None:
    """An anchor of another term confirms none, unless it is the same."""
    g = Searching("abc")
    for name, term in (("a", 1), ("b", 2), ("c", 3)):
        versions = (Version(term, 5 + term),) * 2
        g.offer(name, term=term, versions=versions)
    effects = list[Effect]()
    for name, term in (("c", 3), ("b", 2), ("a", 1)):
        effects = g.arrive(name, 0, 5 + term, term=term)
    (end,) = of(effects, GiveUp)
    assert not end.unfit, "the next process may find more"
    assert "fragment 0 has no anchor that counts" in end.message
    assert "'b' at (2, 7): it is not confirmed by 'a'; 'c'" in end.message
    assert "again with --trust and the island whose values" in end.message


def test_where_nobody_decides_the_coordinator_ends_and_names_both() -> None:
    g, _ = torn()
    g.arrive("b", 1, 5)
    wait_s = PATIENCE_S + CONFIG.outage_budget_s - CONFIG.lease_s / 2
    assert not of(g.pass_time(wait_s, "ab"), GiveUp)
    (end,) = of(g.pass_time(CONFIG.lease_s, "ab"), GiveUp)
    assert not end.unfit, "the next process may find more"
    assert "islands 'a' and 'b'" in end.message
    assert "again with --trust and the island" in end.message


@pytest.mark.parametrize("after_s", [0.0, PATIENCE_S + 10])
def test_it_ends_at_the_moment_at_which_the_wait_for_a_third_does(
    after_s: float,
) -> None:
    g, _ = torn(after_s)
    g.arrive("b", 1, 5)
    until = g.state.claims[0].waits_until
    assert until >= g.now + CONFIG.outage_budget_s
    g.pass_time(until - g.now - 1.0, "ab")
    assert anchors.next_deadline(g.state, g.now) == until
    assert of(g.wait(until - g.now), GiveUp)


def test_who_sends_no_ballot_is_not_counted() -> None:
    g = offering(5, 5, 5, mute="bc")
    g.arrive("a", 0, 5)
    assert not g.state.got
    g.arrive("b", 1, 5)
    for _ in range(4):
        g.pass_time(CONFIG.outage_budget_s / 4, "abc")
    assert g.state.got[0].island == "a"
    assert g.state.unchecked == {"a", "b"}


@pytest.mark.parametrize(("who", "heard"), [("c", "abc"), ("b", "ac"), ("a", "abc")])
def test_who_comes_again_and_again_holds_nobody_up(who: str, heard: str) -> None:
    """Neither a voter nor the source, whose anchor stays once it has come: else it
    could send it anew, each time before the others have voted."""
    g = offering(5, 5, 5, mute="bc")
    g.arrive("a", 0, 5)
    for incarnation in range(2, 8):
        g.pass_time(CONFIG.outage_budget_s / 5, heard)
        effects = g.offer(who, 5, 5, incarnation=incarnation)
        assert ("a", 0) not in asked(effects)
    assert (g.state.got[0].island, g.state.got[0].incarnation) == ("a", 1)


def test_a_source_that_comes_again_and_again_gives_way_to_the_next() -> None:
    """It has the highest version, and sends nothing."""
    g = offering(9, 5, 5)
    assert g.state.claims[0].island == "a"
    for incarnation in range(2, 7):
        g.pass_time(CONFIG.outage_budget_s / 4, "abc")
        g.offer("a", 9, 9, incarnation=incarnation)
    assert g.state.claims[0].island != "a"


def test_a_sample_is_drawn_once_the_claim_is_there() -> None:
    drawn = set()
    for digest in ("x", "y"):
        g = offering(5, 5, 5, secret="s")
        effects = g.arrive("a", 0, 5, digest=digest)
        awaited = [e for e in of(effects, AwaitAnchor) if e.sample]
        assert len({e.sample for e in awaited}) == 1, "one for all who vote"
        assert {e.island for e in awaited} == {"b", "c"}
        assert 0 < awaited[0].sample <= MAX_COUNT
        drawn.add(awaited[0].sample)
    assert len(drawn) == 2


def test_another_process_votes_anew_and_a_ballot_of_the_one_before_is_nothing() -> None:
    g = offering(5, 5, 5, mute="bc")
    g.arrive("a", 0, 5)
    assert asked(g.offer("b", 5, 5), ballots=True) == [("b", 0)], "it may be lost"
    effects = g.offer("b", 5, 5, incarnation=2)
    assert asked(effects, ballots=True) == [("b", 0)]
    (awaited,) = (e for e in of(effects, AwaitAnchor) if e.sample)
    assert (awaited.island, awaited.incarnation) == ("b", 2), "its holder takes it in"
    g.vote("b", 0, incarnation=1, equal=False)
    assert not g.state.claims[0].votes
    g.vote("b", 0, incarnation=2)
    assert asked(g.offer("b", 5, 5, incarnation=2), ballots=True) == []
    assert asked(g.offer("b", 5, 5, incarnation=3), ballots=True) == [("b", 0)]
    assert not g.state.claims[0].votes, "it voted, and is asked anew"


def test_who_lost_its_connection_as_the_claim_came_votes_once_it_is_back() -> None:
    """Else a liar would count that sends while the others blink."""
    g = offering(5, 5, 5)
    for name in "bc":
        g.says[name] = {"equal": False}
        g.lose(name)
    effects = g.arrive("a", 0, 5)
    assert 0 not in g.state.got
    for name in "bc":
        effects = g.offer(name, 5, 5)
    assert "not confirmed by 'b'; 'c'" in texts(effects)
    g = offering(5, 5, 5)
    g.lose("b")
    g.lose("c")
    g.arrive("a", 0, 5)
    g.pass_time(CONFIG.lease_s, "a")
    assert g.state.unchecked == {"a"}, "they are gone"


def test_who_claims_an_anchor_says_not_how_long_changes_are() -> None:
    g = Searching("abc")
    g.offer("a", 6, 6, changes=(1e9, 1e9))
    g.offer("b", 5, 5, changes=(CHANGE, CHANGE))
    g.offer("c", 5, 5)
    g.says = {name: {"apart": 1e6} for name in "bc"}
    assert "not confirmed by 'b'; 'c'" in texts(g.arrive("a", 0, 6))


# ---- with a log ------------------------------------------------------------------

KNOWN = {0: {Version(1, 4): "", Version(1, 5): "digest of 5", Version(1, 6): ""}}


def lost(*numbers: int, **aim: Any) -> Searching:
    """Fragment 0 is lost at version (1, 6), in term 1 of the run."""
    names = "abcd"[: len(numbers)] or "a"
    g = Searching(names, run_id="run-1", term=2, known=KNOWN, **aim)
    g.aim = replace(g.aim, lost=(0,))
    g.state = anchors.begin(g.config, g.aim, g.now)
    for name, number in zip(names, numbers, strict=False):
        g.offer(name, number, 9)
    return g


def test_where_the_log_has_the_digest_it_decides() -> None:
    g = lost(5, 5, 5)
    g.says = {name: {"equal": False} for name in "bc"}
    opened = found(g.arrive("a", 0, 5))
    assert (opened.term, opened.anchors[0].version) == (2, Version(2, 5))
    g = lost(5, 5, 5)
    effects = g.arrive("a", 0, 5, digest="another")
    assert "its digest is another, and that of the log digest of 5" in texts(effects)
    assert asked(effects) == [("b", 0)]


def test_only_versions_after_which_the_log_knows_all_merges_are_gathered() -> None:
    g = lost(3, 4, 5)
    assert asked(g.effects) == [("c", 0)]
    effects = g.arrive("c", 0, 3)
    assert "was offered as (1, 5)" in texts(effects)
    assert asked(effects) == [("b", 0)]
    g = lost(3)
    (end,) = of(g.effects, GiveUp)
    assert "((1, 4) to (1, 6)): 'a' has (1, 3)" in end.message
    assert "bring its disk back, or start the coordinator on an empty --workdir" in (
        end.message
    )


def test_an_island_of_this_term_of_another_coordinator_has_other_values() -> None:
    g = lost(last_name="n")
    effects = g.offer("a", 6, 9, term_name="other")
    assert "in term 1 'other', and this coordinator's log in term 1 'n'" in (
        texts(effects)
    )
    assert not g.state.members
    g.offer("a", 6, 9, term_name="n")
    assert g.state.members
    g.offer("b", term_name="n", versions=(Version(1, 6), Version(7, 9)))
    assert g.state.term == 2, "it is the log that tells"


def test_an_island_of_a_later_term_shows_that_this_state_is_an_old_one() -> None:
    g = lost()
    effects = g.offer("a", 6, 9, term=2)
    assert "log ends in term 1: its state is an old one" in texts(effects)
    assert not g.state.members
