"""A worker has lost its disk, and the log is whole: its fragments alone begin the run's
next term, with anchors of islands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kit import Driver, of, only, persisted
from search_support import anchor

from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.search import FoundTerm
from diloco_jax.protocol.coordinator.state import MERGES_KNOWN
from diloco_jax.protocol.messages import (
    Outstanding,
    Refused,
    ResendRequest,
    TakeVerdict,
    Version,
    Welcome,
)
from diloco_jax.protocol.records import line

TERM = 2


class Merging(Driver):
    """Fragment 0 is merged into version 1 from 2 steps of islands a and b each;
    fragment 1 from 4."""

    def __init__(self) -> None:
        super().__init__(quorum=2)
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

    def lose(self, number: int) -> dict[str, Any]:
        """The lead starts again; fragment 0 is gathered at that version of term 1."""
        self.crash()
        kept = anchor(0, "a", number, TERM)
        found = FoundTerm(
            run_id=self.config.run_id,
            term=TERM,
            name="n",
            anchors=(kept,),
            tokens=0,
            next_position=0,
        )
        (record,) = recovery.term_records(self.state, found)
        self.log.append(record)
        self.state = recovery.fragment_begun(self.state, record)
        return json.loads(json.dumps(line(record)))

    def back(self, name: str, **fields: Any) -> list[Any]:
        """An island of term 1 comes back."""
        own = {"phase": "training", "steps": self.steps, "term": 1, **fields}
        return self.hello(name, **own)


def test_the_runs_term_rises_and_only_that_fragment_begins_anew() -> None:
    d = Merging()
    record = d.lose(1)
    assert (record["island"], record["version"]) == ("a", [TERM, 1])
    assert (record["replaced"], record["lost_tokens"]) == ([1, 1], {})
    assert (d.state.term, d.state.term_name, d.state.books) == (TERM, "n", 1)
    assert [f.version for f in d.state.fragments] == [Version(TERM, 1), Version(1, 1)]
    effects = d.back("a")
    welcome = only(effects, Welcome)
    assert (welcome.resumed, welcome.term, welcome.anew) == (True, TERM, ())
    assert welcome.term_name == "n"
    assert persisted(effects, "joined") == [], "its books go on"
    d.back("b")
    assert d.totals("a").lost == {}
    d.turn(0)
    assert d.fragment(0).version == Version(TERM, 2)
    d.turn(1)
    assert d.fragment(1).version == Version(1, 2)


def test_exactly_what_was_merged_above_the_anchor_is_lost() -> None:
    d = Merging()
    d.turn(0)
    assert d.lose(1)["lost_tokens"] == {"a": 40, "b": 40}
    for name in "ab":
        assert d.account(name, 0).merged_tokens == 20
        assert d.account(name, 0).lost_tokens == {"worker": 40}
        assert d.account(name, 1).lost_tokens == {}


def test_recovery_from_the_log_gives_the_same_books() -> None:
    d = Merging()
    d.turn(0)
    d.lose(1)
    before = d.state
    d.crash()
    assert (d.state.term, d.state.term_name) == (before.term, before.term_name)
    for f, was in zip(d.state.fragments, before.fragments, strict=True):
        assert (f.version, f.newest) == (was.version, was.newest)
        for name, account in was.accounts.items():
            assert f.accounts[name].merged_tokens == account.merged_tokens
            assert f.accounts[name].lost_tokens == account.lost_tokens


@pytest.mark.parametrize(("fragment", "stale"), [(0, True), (1, False)])
def test_open_takes_of_the_lost_fragment_are_stale_and_the_others_go_on(
    fragment: int, stale: bool
) -> None:
    d = Merging()
    start = d.account("a", fragment).start
    d.lose(1)
    held = Outstanding(
        fragment=fragment,
        tick=d.state.tick,
        start=start,
        end=d.steps + 2,
        base=Version(1, 1),
        seq=1,
    )
    d.steps += 2
    effects = d.back("a", outstanding=(held,), records_through=1)
    if stale:
        (verdict,) = of(effects, TakeVerdict)
        assert (verdict.tick, verdict.reason) == (held.tick, "stale")
        reopened = d.record("a", "reopened", d.steps, fragment=0, tick=held.tick)
        d.report("a", d.steps, reopened)
        assert d.account("a", 0).take is None
        assert d.account("a", 0).lost_tokens == {}, "its steps stay with it"
    else:
        assert only(effects, ResendRequest).tick == held.tick
    assert bool(of(effects, ResendRequest)) is not stale


def test_only_the_last_merges_are_known() -> None:
    d = Merging()
    for _ in range(MERGES_KNOWN):
        d.turn(0)
        d.turn(1)
    digests = {Version(1, 5): "five"}
    known = recovery.versions_known(d.fragment(0), digests)
    assert list(known) == [Version(1, n) for n in range(2, 2 + MERGES_KNOWN)]
    assert known[Version(1, 5)] == "five"
    assert known[Version(1, 6)] == ""


def test_an_island_of_that_term_of_another_coordinator_is_not_of_this_one() -> None:
    d = Merging()
    d.lose(1)
    refused = only(d.back("a", term=TERM, term_name="other"), Refused)
    assert refused.code == "other_term"
    assert "term 2 'other'" in refused.message
    assert "term 2 'n'" in refused.message
    assert only(d.back("a", term=TERM, term_name="n"), Welcome).resumed
