"""A worker loses its disk: its fragments are gathered from islands, each under a new
term of its own."""

from __future__ import annotations

from typing import Any

from kit import Driver, of, only, persisted, verdicts
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.events import Alert, FragmentsLost
from diloco_jax.protocol.coordinator.state import (
    MERGES_KNOWN,
    with_island,
)
from diloco_jax.protocol.holding import AnchorKept, AwaitAnchor, Commit
from diloco_jax.protocol.messages import AnchorRequest, Published, ResendRequest
from diloco_jax.protocol.values import STALE, Version

LEASE_S, OUTAGE_S = 100.0, 30.0


class Gathering(Driver):
    """Fragment 0, of worker 0, is merged into version 1 from 2 steps of islands a and
    b each; fragment 1, of worker 1, from 4."""

    def __init__(self, **changes: int) -> None:
        super().__init__(**{"quorum": 2, "workers": 2, **changes})
        self.join("a", "b")
        self.steps = 0
        self.turn(0)
        self.turn(1)

    def turn(self, fragment: int) -> None:
        """Two more steps, after which the fragment is taken and merged."""
        self.steps += 2
        for name in "ab":
            self.report(name, self.steps)
        self.merge(fragment, a=self.steps, b=self.steps)

    def adopt(self, number: int, *names: str, term: int = 1) -> None:
        """These islands report that they have adopted a version of fragment 0."""
        for name in names:
            adopted = self.record(
                name, "adopted", self.steps, fragment=0, version=Version(term, number)
            )
            self.report(name, self.steps, adopted)

    def lose(self) -> list[Any]:
        """The lead has started, and worker 0 lacks fragment 0."""
        effects = self.feed(FragmentsLost(worker=0, fragments=(0,)))
        assert self.fragment(0).lost is not None
        return effects

    def pass_lease(self) -> list[Any]:
        """A lease passes, in which the islands are heard."""
        effects: list[Any] = []
        for _ in range(2):
            effects += self.wait(LEASE_S / 2)
            effects += [e for name in "ab" for e in self.report(name)]
        return effects

    def kept(self, island: str, number: int, *, term: int = 2) -> list[Any]:
        """The worker has kept the anchor that an island had at the version of that
        number, in the first term."""
        return self.feed(
            AnchorKept(
                fragment=0,
                island=island,
                incarnation=self.state.islands[island].incarnation,
                replaced=Version(1, number),
                version=Version(term, number),
                digest="d",
            )
        )


def requests(effects: list[Any]) -> list[tuple[str, int, int]]:
    return [(t.island, t.fragment, t.term) for t in of(effects, AnchorRequest)]


def test_an_island_with_the_committed_version_is_asked_at_once() -> None:
    d = Gathering()
    d.adopt(1, "b")
    effects = d.lose()
    assert requests(effects) == [("b", 0, 2)]
    awaited = only(effects, AwaitAnchor)
    assert (awaited.island, awaited.incarnation, awaited.term) == ("b", 1, 2)
    texts = [alert.text for alert in of(effects, Alert)]
    assert any("worker 0 has lost its fragments [0]" in text for text in texts)
    assert of(effects, ResendRequest) == [], "it could not take them in"


def test_the_term_begins_with_its_record_and_nothing_is_lost() -> None:
    d = Gathering()
    d.adopt(1, "b")
    d.lose()
    effects = d.kept("b", 1)
    assert [type(effect).__name__ for effect in effects[:2]] == ["Persist", "Commit"]
    (record,) = persisted(effects, "term_begun")
    assert (record["island"], record["version"]) == ("b", [2, 1])
    assert (record["replaced"], record["lost_tokens"]) == ([1, 1], {})
    assert only(effects, Commit).version == Version(2, 1)
    assert {told.version for told in of(effects, Published)} == {Version(2, 1)}
    assert (d.state.term, d.fragment(1).version) == (1, Version(1, 1))
    assert d.totals("a").lost == {}
    d.turn(0)
    assert d.fragment(0).version == Version(2, 2)


def test_exactly_what_was_merged_above_the_anchor_is_lost() -> None:
    d = Gathering()
    d.adopt(1, "a", "b")
    d.turn(0)
    d.turn(1)
    assert requests(d.lose()) == [], "an island may yet say that it has version 2"
    assert requests(d.pass_lease()) == [("a", 0, 2)]
    (record,) = persisted(d.kept("a", 1), "term_begun")
    assert record["lost_tokens"] == {"a": 40, "b": 40}
    for name in "ab":
        assert d.account(name, 0).merged_tokens == 20
        assert d.account(name, 0).lost_tokens == {"worker": 40}
        assert d.account(name, 1).lost_tokens == {}


def test_recovery_from_the_log_gives_the_same_books() -> None:
    d = Gathering()
    d.adopt(1, "a", "b")
    d.turn(0)
    snapshot = d.state
    skip = len(d.log)
    d.turn(1)
    d.lose()
    d.pass_lease()
    d.kept("a", 1)
    before = d.state
    for state, skipped in ((None, 0), (snapshot, skip)):
        d.crash(state, skipped)
        for f, was in zip(d.state.fragments, before.fragments, strict=True):
            assert (f.version, f.newest, f.lost) == (was.version, was.newest, None)
            for name, account in was.accounts.items():
                assert f.accounts[name].merged_tokens == account.merged_tokens
                assert f.accounts[name].lost_tokens == account.lost_tokens


def test_takes_against_the_term_before_are_refused_and_their_steps_kept() -> None:
    d = Gathering()
    d.adopt(1, "a", "b")
    for name in "ab":
        d.report(name, d.steps + 2)
    d.take("a", 0, d.steps + 2)
    tick = d.tick_of("a", 0)
    d.lose()
    effects = d.kept("a", 1)
    assert verdicts(effects)["a"] == (tick, "refused", STALE)
    reopened = d.record("a", "reopened", d.steps + 2, fragment=0, tick=tick)
    d.report("a", d.steps + 2, reopened)
    assert d.account("a", 0).take is None
    assert d.account("a", 0).lost_tokens == {}


def test_an_island_that_does_not_answer_gives_way_to_another() -> None:
    d = Gathering()
    d.adopt(1, "a", "b")
    assert requests(d.lose()) == [("a", 0, 2)]
    assert requests(d.wait(OUTAGE_S - 1)) == []
    effects = d.wait(1)
    assert requests(effects) == [("b", 0, 2)]
    assert only(effects, AwaitAnchor).island == "b"
    assert persisted(d.kept("a", 1), "term_begun") == [], "it is not awaited any more"
    assert requests(d.wait(OUTAGE_S)) == [("a", 0, 2)], "all have failed: begin anew"
    assert persisted(d.kept("a", 1), "term_begun")


def test_an_island_that_breaks_off_gives_way_and_one_that_returns_is_asked_again() -> (
    None
):
    d = Gathering()
    d.adopt(1, "a")
    assert requests(d.lose()) == [("a", 0, 2)]
    again = d.hello("a", phase="training", steps=d.steps)
    assert requests(again) == [("a", 0, 2)], "the request may be lost"
    d.adopt(1, "b")
    assert requests(d.disconnect("a")) == [("b", 0, 2)]


def test_an_anchor_that_became_another_meanwhile_is_not_used() -> None:
    d = Gathering()
    d.adopt(1, "a", "b")
    d.lose()
    effects = d.kept("a", 7)
    assert persisted(effects, "term_begun") == []
    assert requests(effects) == [("b", 0, 2)]


def test_a_version_whose_merges_are_lost_is_never_gathered() -> None:
    d = Gathering()
    d.adopt(1, "a", "b")
    d.turn(0)
    d.turn(1)
    d.adopt(2, "b")
    d.disconnect("b")
    d.lose()
    d.wait(LEASE_S / 2), d.report("a"), d.wait(LEASE_S / 2)
    d.kept("a", 1)
    d.hello("b", phase="training", steps=d.steps)
    d.lose()
    assert requests(d.pass_lease()) == [("a", 0, 3)], "b has version 2 of term 1"
    (record,) = persisted(d.kept("a", 1, term=3), "term_begun")
    assert (record["version"], record["lost_tokens"]) == ([3, 1], {})


def test_an_anchor_of_long_ago_is_not_gathered() -> None:
    d = Gathering()
    d.adopt(1, "a")
    for _ in range(MERGES_KNOWN - 1):
        d.turn(0)
        d.turn(1)
    d.lose()
    assert requests(d.pass_lease()) == [("a", 0, 2)]
    d = Gathering()
    d.adopt(1, "a")
    for _ in range(MERGES_KNOWN):
        d.turn(0)
        d.turn(1)
    d.lose()
    assert requests(d.pass_lease()) == []


def test_a_quarantined_island_is_the_last_choice() -> None:
    d = Gathering()
    d.adopt(1, "a", "b")
    apart = replace(d.state.islands["a"], quarantined=True)
    d.state = with_island(d.state, apart)
    assert requests(d.lose()) == [("b", 0, 2)]
    assert requests(d.disconnect("b")) == [("a", 0, 2)]


def test_a_lead_that_comes_up_is_told_what_its_worker_lost_before() -> None:
    d = Gathering()
    d.crash()
    d.lose()
    versions = (Version(1, 1), Version(1, 1))
    back = d.hello("a", phase="training", steps=d.steps, versions=versions)
    assert requests(back) == [("a", 0, 2)]


def test_a_fragment_that_is_lost_in_the_flush_is_in_it_all_the_same() -> None:
    d = Gathering(total_tokens=100)
    d.adopt(1, "a", "b")
    for name in "ab":
        d.report(name, 5)
    for name in "ab":
        d.report(name, phase="stopped")
    assert d.state.phase == "flushing"
    d.lose()
    d.wait(d.config.flush_s - 1)
    d.kept("b", 1)  # By then a has had its time.
    d.wait(d.config.flush_s - 1)
    assert d.state.phase == "flushing", "what it lacked has a time of its own"
    d.merge(0, a=5, b=5)
    d.merge(1, a=5, b=5)
    assert d.state.phase == "done"
    assert d.totals("a").lost == {}
