"""Islands of an earlier term in a new one: they go on, and the books balance. The term
may be of all fragments, or of those alone that a worker has lost.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from kit import TOKENS_PER_STEP, Driver, asked, notes, of, only, persisted
from msgspec.structs import replace
from search_support import anchor

from diloco_jax.protocol.coordinator import ledger, members, recovery
from diloco_jax.protocol.coordinator.islands import FIRST_LEASE_STEPS
from diloco_jax.protocol.coordinator.search import FoundTerm
from diloco_jax.protocol.coordinator.state import (
    MERGES_KNOWN,
    Alert,
    Effect,
    Outdated,
    SaidAhead,
)
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import (
    Granted,
    Hello,
    Outstanding,
    Progress,
    Refused,
    ResendRequest,
    Steer,
    Stop,
    TakeRequest,
    TakeVerdict,
    Version,
    Welcome,
)
from diloco_jax.protocol.records import line

TOKENS = 1000
"""Progress with which the term begins."""
POSITION = 500
REUNION_S = 0.5
LEAST_S = 2.5
"""Least seconds of a step by the config, where it names any."""


def second_term(offered: tuple[str, ...] = (), **changes: Any) -> Driver:
    """A coordinator that gathered anchors of versions (1, 5) and (1, 4)."""
    d = Driver(**changes)
    opened = FoundTerm(
        run_id=d.config.run_id,
        term=2,
        name="",
        anchors=(anchor(0, "a", 5, 2), anchor(1, "a", 4, 2)),
        tokens=TOKENS,
        next_position=POSITION,
        offered=offered,
    )
    d.state = d.first = recovery.first_state(d.config, opened)  # type: ignore[attr-defined]
    return d


def come_back(d: Driver, name: str, steps: int, **fields: Any) -> list[Effect]:
    """A process that was welcomed in the first term and made so many steps, all of them
    before it last heard of the run's progress."""
    defaults: dict[str, Any] = {
        "steps": steps,
        "phase": "training",
        "term": 1,
        "sequences_granted": steps + 3,
        "own_tokens": steps * TOKENS_PER_STEP,
        "records_through": 0,
    }
    return d.hello(name, **{**defaults, **fields})


def carry(d: Driver, name: str, steps: int, first: int, second: int) -> list[Effect]:
    """It says which of its steps are in no take, by fragment."""
    return d.report(
        name,
        steps,
        d.record(name, "carried", steps, fragment=0, start=first),
        d.record(name, "carried", steps, fragment=1, start=second),
    )


def test_it_is_welcome_where_it_is() -> None:
    d = second_term()
    effects = come_back(d, "a", 7)
    assert not only(effects, Welcome).resumed
    assert only(effects, Welcome).versions == (Version(2, 5), Version(2, 4))
    (joined,) = persisted(effects, "joined")
    carried = {"steps": 7, "sequences_granted": 10, "counted_tokens": 70}
    assert joined["carried"] == carried
    grant = only(effects, Granted)
    assert (grant.offset, grant.span.start) == (10, POSITION)
    assert d.state.islands["a"].steps == 7


def test_steps_of_an_earlier_term_are_carried_and_no_more() -> None:
    d = second_term()
    come_back(d, "a", 7)
    effects = carry(d, "a", 8, 6, 8)
    assert [r["steps"] for r in persisted(effects, "carried")] == [6, 8]
    d.play("a=12 a/0=12 /0 a.leaves")
    totals = d.totals("a")
    # 12 steps: of the larger fragment 6 are carried, of the smaller 8.
    assert totals.computed == 12 * TOKENS_PER_STEP
    assert totals.carried == (30 * 60 + 10 * 80) // 40
    assert totals.merged == 30 * 60 // 40
    assert sum(totals.lost.values()) == 10 * 40 // 40, "the last steps of the smaller"
    assert totals.in_flight == 0
    assert ledger.run_totals(d.config, d.state) == totals
    assert ledger.merged_into(d.fragment(0)) == 6 * TOKENS_PER_STEP + 60
    others = d.state.carried_progress
    assert others > 0, "of islands that are not back"
    trained = ledger.trained_tokens(d.config, d.state)
    assert trained == others + totals.carried + totals.merged


def test_a_new_term_lets_in_the_islands_of_the_config_alone() -> None:
    """Orders of operators were in the log that is lost: an island that they had let in
    is out, and so stays one that they had removed, whatever it was before."""
    d = second_term(admitted={"a": 1}, sequence_length=TOKENS_PER_STEP)
    assert d.state.admitted == ()
    assert only(come_back(d, "c", 7), Refused).code == "unknown_island"
    only(come_back(d, "a", 7), Welcome)
    d.feed(Steer(how="admit", island="c"))
    only(come_back(d, "c", 7), Welcome)


def test_what_it_tells_of_takes_of_the_earlier_term_changes_nothing() -> None:
    d = second_term()
    held = Outstanding(fragment=0, tick=9, start=2, end=5, base=Version(1, 4), seq=1)
    effects = come_back(d, "a", 7, outstanding=(held,))
    took = d.record("a", "took", 5, fragment=0, tick=9, start=2, version=Version(1, 4))
    dropped = d.record("a", "dropped", 7, fragment=0, tick=9)
    effects += d.report("a", 7, took, dropped)
    assert len(notes(effects, "island")) == 2, "the tape has it"
    ignored = [(i.machine, i.state, i.message) for i in d.ignored]
    assert ignored == [("take", "carried", "record")] * 2
    assert not d.totals("a").lost
    assert d.account("a", 0).start == 0
    carry(d, "a", 7, 5, 4)
    assert not d.totals("a").lost
    assert [d.account("a", f).start for f in (0, 1)] == [5, 4]


def test_a_hello_that_comes_late_opens_no_take_of_the_earlier_term() -> None:
    d = second_term()
    held = Outstanding(fragment=0, tick=9, start=2, end=5, base=Version(1, 4), seq=1)
    come_back(d, "a", 7, outstanding=(held,))
    carry(d, "a", 7, 5, 4)
    effects = come_back(d, "a", 7, outstanding=(held,), records_through=2)
    assert only(effects, Welcome).resumed
    assert d.account("a", 0).take is None
    assert not of(effects, ResendRequest)
    assert not of(effects, TakeVerdict)


def test_it_can_be_asked_at_once_and_takes_after_what_is_carried() -> None:
    d = second_term()
    come_back(d, "a", 7)
    effects = d.report("a", 9)
    assert asked(effects) == {0: ["a"]}
    assert only(effects, TakeRequest).tick == 1_000_000_001
    carry(d, "a", 9, 6, 6)
    (merge,) = of(d.take("a", 0, 10, start=6), Merge)
    assert merge.version == Version(2, 6)
    assert [(c.start, c.end) for c in merge.contributions] == [(6, 10)]


def test_progress_goes_on_where_it_was() -> None:
    d = second_term()
    come_back(d, "a", 7)
    progress = only(d.report("a", 7), Progress)
    assert (progress.tokens, progress.own_tokens) == (TOKENS, 70)
    assert progress.next_position == d.state.next_position > POSITION
    come_back(d, "b", 50)
    assert only(d.report("b", 51), Progress).tokens == TOKENS + TOKENS_PER_STEP
    assert only(d.report("a", 9), Progress).tokens == TOKENS + 3 * TOKENS_PER_STEP


@pytest.mark.parametrize("crash", [False, True])
def test_steps_of_the_outage_are_new_progress(crash: bool) -> None:
    """The progress that it last heard has 7 of its 12 steps."""
    d = second_term()
    come_back(d, "a", 12, own_tokens=70)
    if crash:
        d.crash(snapshot=d.first)  # type: ignore[attr-defined]
        come_back(d, "a", 12, own_tokens=70)
    progress = only(d.report("a", 12), Progress)
    assert (progress.tokens, progress.own_tokens) == (TOKENS + 50, 120)


def test_steps_of_the_outage_that_an_adoption_undoes_count_off_once() -> None:
    d = second_term()
    come_back(d, "a", 12, own_tokens=70)
    carry(d, "a", 12, 7, 7)
    d.hello("a", incarnation=2)
    assert d.totals("a").lost == {"died": 50}
    assert ledger.progress_tokens(d.config, d.state) == TOKENS


@pytest.mark.parametrize(
    ("step_seconds", "steps"), [(0.1, 2 * 2 * 301), (1.0, 2 * 2 * FIRST_LEASE_STEPS)]
)
@pytest.mark.parametrize("size", [1, 4])
def test_more_steps_of_an_outage_than_it_had_data_for_are_no_progress(
    size: int, step_seconds: float, steps: int
) -> None:
    """A wrong number could end the run otherwise. The first grant goes by no speed.
    size: sequences of a step."""
    d = second_term(outage_budget_s=30.0)
    d.state = replace(d.state, next_position=10**9)
    come_back(
        d,
        "a",
        10**6,
        own_tokens=0,
        step_seconds=step_seconds,
        sequences_per_step=size,
        sequences_granted=size * 10**6,
    )
    progress = only(d.report("a", 10**6), Progress)
    assert progress.tokens == TOKENS + steps * TOKENS_PER_STEP


def test_an_outage_is_claimed_once() -> None:
    """Each incarnation could bring another one, and end the run with them."""
    d = second_term()
    d.state = replace(d.state, next_position=10**9)
    come_back(d, "a", 12, own_tokens=70)
    progress = only(d.report("a", 12), Progress).tokens
    come_back(d, "a", 900, own_tokens=0, incarnation=2)
    assert ledger.progress_tokens(d.config, d.state) <= progress
    assert only(d.report("a", 900), Progress).tokens <= progress


def test_a_step_under_way_is_believed_of_who_replaces_another_carrier() -> None:
    """Both joined in the earlier term, and the new one hears of the older one first."""
    d = second_term(least_seconds={"a": LEAST_S})
    come_back(d, "a", 9)
    come_back(d, "a", 6, incarnation=2)
    d.now += 0.1
    d.report("a", 7)
    assert d.state.islands["a"].status == "live"
    assert d.state.islands["a"].steps == 7


def test_a_step_under_way_is_believed_after_one_that_was_in_no_term() -> None:
    """A new process of that name joined first."""
    d = second_term(least_seconds={"a": 8.0})
    d.join("a")
    come_back(d, "a", 6, incarnation=2)
    d.report("a", 7)
    assert d.state.islands["a"].status == "live"
    come_back(d, "a", 6, incarnation=3)
    d.report("a", 7)
    assert d.state.islands["a"].status != "live", "once in a term"


def test_steps_under_way_are_no_more_than_time_has_passed() -> None:
    """A liar could otherwise come again and again, with another step each time."""
    d = second_term(least_seconds={"a": LEAST_S})
    made = 0
    for incarnation in range(1, 100):
        come_back(d, "a", 6, incarnation=incarnation)
        d.report("a", 7)
        made += d.state.islands["a"].status == "live"
    assert made == 2, "one by the first, and one in what is left of its time"


def test_a_run_that_had_its_tokens_ends_with_all_who_were_in_it() -> None:
    d = second_term(total_tokens=TOKENS)
    effects = come_back(d, "a", 7)
    assert only(effects, Stop).island == "a"
    assert d.state.phase == "stopping"
    effects = come_back(d, "b", 5)
    assert only(effects, Welcome).island == only(effects, Stop).island == "b"
    assert only(d.hello("c"), Refused).code == "finished"
    for name, steps in (("a", 7), ("b", 5)):
        carry(d, name, steps, steps - 2, steps)
        d.report(name, steps, phase="stopped")
    assert d.state.phase == "flushing"
    d.take("a", 0, 7, start=5)
    (merge,) = of(d.take("b", 0, 5, start=3), Merge)
    assert merge.final
    assert [(c.start, c.end) for c in merge.contributions] == [(5, 7), (3, 5)]


@pytest.mark.parametrize("comes", [True, False])
def test_the_end_awaits_who_offered_for_a_lease(comes: bool) -> None:
    d = second_term(("a", "b"), total_tokens=TOKENS)
    come_back(d, "a", 7, phase="stopped")
    carry(d, "a", 7, 5, 7)
    d.report("a", 7, phase="stopped")
    assert d.state.phase == "stopping", "b may have the last steps of all"
    if comes:
        come_back(d, "b", 5, phase="stopped")
    else:
        d.now += d.config.lease_s / 2
        d.report("a", 7, phase="stopped")
        assert d.state.phase == "stopping"
        d.wait(d.config.lease_s / 2)
    assert d.state.phase == "flushing"


def test_ticks_wait_for_who_offered_for_a_short_time() -> None:
    def ticks(offered: tuple[str, ...], pause_s: float) -> bool:
        d = second_term(offered, reunion_s=REUNION_S)
        come_back(d, "a", 7)
        d.now += pause_s
        return bool(notes(d.report("a", 7 + d.config.steps_per_cycle), "tick"))

    assert ticks((), 0.0)
    assert not ticks(("a", "b"), 0.0)
    assert ticks(("a", "b"), REUNION_S)
    assert ticks(("a",), 0.0), "it has joined"


def test_who_offered_and_is_not_of_the_config_is_not_awaited() -> None:
    d = second_term(("a", "c"), admitted={"a": 1}, sequence_length=TOKENS_PER_STEP)
    assert d.state.returning == ("a",)


def test_an_incarnation_that_ends_before_it_told_is_carried_whole() -> None:
    d = second_term()
    come_back(d, "a", 7)
    d.hello("a", incarnation=2)
    totals = d.totals("a")
    assert (totals.computed, totals.carried, totals.lost) == (70, 70, {})
    d.report("a", 3)
    assert d.totals("a").in_flight == 30
    assert only(d.report("a", 4), Progress).own_tokens == 40


def test_the_new_term_survives_a_crash() -> None:
    d = second_term()
    come_back(d, "a", 7)
    carry(d, "a", 7, 6, 5)
    d.play("a=12 a/0=12 /0")
    come_back(d, "b", 4)
    before = d.state
    d.crash(snapshot=d.first)  # type: ignore[attr-defined]
    assert d.state.carried_progress == before.carried_progress
    for name in "ab":
        assert (
            d.totals(name).carried
            == ledger.island_totals(d.config, before, name).carried
        )
        for fragment in (0, 1):
            old = before.fragments[fragment].accounts[name]
            new = d.account(name, fragment)
            assert (new.start, new.carrying) == (old.start, old.carrying)
    assert d.state.tick > 1_000_000_000
    come_back(d, "b", 5)
    carry(d, "b", 5, 5, 4)
    assert d.account("b", 1).start == 4


def test_a_fresh_process_carries_nothing() -> None:
    d = second_term()
    effects = d.hello("a", steps=5, term=0)
    assert "carried" not in persisted(effects, "joined")[0]
    assert d.state.islands["a"].steps == 0
    assert not d.account("a", 0).carrying


def test_who_was_let_in_by_another_coordinator_of_this_term_is_not_known() -> None:
    """Two coordinators without state may open the same term, if nobody who heard of the
    first is there for the second: its versions are not those of this one."""
    d = second_term()
    before = d.state
    refuse = only(come_back(d, "a", 4, term=2), Refused)
    assert refuse.code == "other_term"
    assert "in its term 2" in refuse.message
    assert "incarnation 2" in refuse.message
    assert d.state == before
    assert of(d.hello("a", 2), Welcome), "the next one begins afresh"
    assert of(d.hello("a", 2, term=2), Welcome), "and is known from then on"


@pytest.mark.parametrize(
    ("fields", "is_ahead"),
    [
        ({"term": 0}, False),
        ({"term": 2}, False),
        ({"term": 3}, True),
        # No merge of this copy has made these versions; those of a term before are
        # settled.
        ({"versions": ()}, False),
        ({"versions": (Version(2, 5), Version(2, 4))}, False),
        ({"versions": (Version(1, 9), Version(1, 9))}, False),
        ({"versions": (Version(2, 6),)}, True),
        ({"versions": (Version(1, 5), Version(3, 0))}, True),
        ({"versions": (Version(2, 2**48), Version(2, 2**48))}, True),
        # Who is to be refused is not told to come again.
        ({"term": 9, "run_id": "r2"}, False),
        ({"term": 9, "run_id": ""}, False),
        ({"term": 9, "island": "x"}, False),
    ],
)
def test_a_copy_of_an_earlier_state_knows_that_it_is_one(
    fields: dict[str, Any], is_ahead: bool
) -> None:
    d = second_term(admitted={"a": None})
    defaults = {"run_id": d.config.run_id, "island": "a", "incarnation": 1}
    defaults |= {"session": "a1", "fingerprint": d.config.fingerprint}
    defaults |= {"tokens_per_step": 10, "sequences_per_step": 1, **fields}
    assert bool(members.how_ahead(d.config, d.state, Hello(**defaults))) == is_ahead


def test_a_coordinator_ends_once_most_of_the_configs_islands_are_ahead_of_it() -> None:
    d = Driver(admitted=dict.fromkeys("abcd"))

    def says(name: str) -> list[type[Any]]:
        found = d.feed(SaidAhead(island=name, how="in term 3"))
        return [type(e) for e in found if isinstance(e, Alert | Outdated)]

    assert says("a") == [Alert]
    assert says("a") == [], "told once"
    d.hello("a")
    assert says("a") == [Alert], "it has been let in since"
    assert says("b") == [Alert]
    assert says("let in by an operator") == [Alert], "is none of the config's"
    assert says("c") == [Alert, Outdated]
    text = only(d.effects, Outdated).text
    assert "3 of 4 islands (a, b, c)" in text
    assert "newest snapshots" in text
    d.crash()
    assert d.state.ahead == ()


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
    known = recovery.versions_known(d.fragment(0), {})
    assert list(known) == [Version(1, 0), Version(1, 1), Version(TERM, 1)]
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
