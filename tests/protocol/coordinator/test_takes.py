"""Outstanding takes: bytes and records in any order, refusals, their end, and deltas of
a worker that outlives its lead.
"""

from __future__ import annotations

import pytest
from kit import (
    Driver,
    asked,
    begun,
    joined,
    notes,
    of,
    only,
    pair,
    scene,
    scenes,
    took,
    verdicts,
)

from diloco_jax.protocol.coordinator.state import Alert
from diloco_jax.protocol.coordinator.takes import UNFIT_DELTAS
from diloco_jax.protocol.holding import DeltaArrived, Drop, Merge
from diloco_jax.protocol.messages import (
    DeltaKey,
    Published,
    ResendRequest,
    TakeVerdict,
    Version,
)


@pytest.fixture
def open_for_a() -> Driver:
    """a and b train, quorum 2; fragment 0 is open at tick 1, nobody answered yet."""
    d = pair("a", "b", quorum=2)
    d.reports(a=2, b=2)
    return d


@scenes(
    """
bytes may come before the record
    pair a b quorum=2
    a=2 b=2 b/0=2 a/0 -> ask 0:ab
    a/0~2 -> merge 0: a 0-2, b 0-2
a refused delta is not merged and blocks the next
    pair a b
    b=1 a=2 a/0~2 -> ask 0:ab
    a/0! -> refused non_finite:a; drop 0:a
    b/0=2 -> merge 0: b 0-2
    /0 -> publish refused non_finite:a
    a=4 -> ask 0:b
reopened steps are in the next delta
    pair a b
    b=1 a=2 a/0~2 a/0! -> ask 0:ab; refused non_finite:a; drop 0:a
    a=3 a/0-reopened b/0=2 /0 -> merge 0: b 0-2
    a=6 b/0=4 /0 -> ask 0:ab; merge 0: b 2-4; publish pending:a
    a/0=6 b=8 -> ask 0:b
    b/0=8 -> merge 0: a 0-6, b 4-8
    lost -> nothing
bytes that prove unfit before the record
    pair a
    a=2 -> ask 0:a
    a/0! -> refused non_finite:a; drop 0:a; skip 0: quorum is out of reach
    a/0~2 a/0-reopened ->
    a=4 -> ask 0:a
    a/0=4 -> merge 0: a 0-4
a take without steps is refused
    pair a b quorum=2
    a=2 b=2 b/0=2 -> ask 0:ab
    a/0~0 -> refused empty:a; drop 0:a; skip 0: quorum is out of reach
a refusal is told once, though every merge until it is answered finds it again
    pair a b max_staleness=0
    a=2 b=2 a/0~2 b/0=2 -> ask 0:ab; merge 0: b 0-2
    /0 -> publish refused stale:a; drop 0:a
    b=4 b/0=4 /0 -> ask 0:b; merge 0: b 2-4; publish refused stale:a
    b=6 b/0=6 /0 -> ask 0:b; merge 0: b 4-6; publish refused stale:a
    ; alert fragment 0 was merged 3 times in a row from 'b' [...]
a coordinator that dies of a merge has refused nobody for it
    # Else b opens steps again that the next coordinator merges, and whatever it takes
    # after that overlaps with them, for ever.
    pair a b max_staleness=0
    a=2 a/0=2 -> ask 0:ab; merge 0: a 0-2
    b/0=2 crash ->
    a.back=2 b.back=2 -> resend 0:ab
    a/0 b/0 ->
    a=4 -> merge 0: a 0-2, b 0-2
bytes that come twice change nothing
    pair a b quorum=2
    a=2 b=2 a/0=2
    a/0 ->
steps that are settled are refused as overlap
    # The island goes back to the anchor; what comes then is whole.
    pair a
    a=2 a/0=2 /0 a=4
    a/0~4@1 -> refused overlap:a; drop 0:a; skip 0: quorum is out of reach
    a=5 a/0-reset ->
    lost -> a overlap 20
    a=6 a/0=6@5 /0 -> ask 0:a; merge 0: a 5-6
    merged -> a 30
    lost -> a overlap 20, a overwritten 10
steps that adoption overwrote are lost, after a crash too
    pair a
    a=2 a/0=2 /0 a=6 a/0=6@3 /0
    lost -> a overwritten 10
    crash a.back
    lost -> a overwritten 10
    merged -> a 50
a take is stale only once the merge that makes it so is durable
    pair a b max_staleness=0
    a=2 a/0=2 b/0~2 -> ask 0:ab; merge 0: a 0-2
    /0 -> publish refused stale:b; drop 0:b
who comes back is told which versions its delta is not in
    pair a b
    b=1 a=2 a/0=2 b/0~2 /0 b.away b.back -> ask 0:ab; merge 0: a 0-2
    ; publish pending:b; pending:b; resend 0:b
    b/0 b.away b.back -> pending:b
"""
)
def test_a_scene_of_takes(first: str, text: str) -> None:
    scene(begun(first, pair=pair), text)


def test_a_pending_verdict_says_up_to_which_version_a_delta_is_in_none() -> None:
    d = pair("a", "b")
    d.play("b=1 a=2 a/0=2 b/0~2 /0 b.away b.back")
    verdict = only(d.effects, TakeVerdict)
    assert (verdict.verdict, verdict.version) == ("pending", Version(1, 1))


def test_a_record_of_a_take_that_is_merged_already_is_ignored() -> None:
    """The hello told of the take, and its bytes were faster than the report."""
    d = pair("a", "b")
    d.report("a", 2)
    held = d.held("a", 0, 0, 2)
    d.disconnect("a")
    d.hello("a", steps=2, phase="training", outstanding=(held,))
    assert of(d.arrive("a", 0), Merge)
    d.computed(0)
    effects = d.report("a", 2, took(1, 0, held.tick, 0, 2))
    assert of(effects, TakeVerdict) == []
    assert d.account("a", 0).take is None
    assert asked(d.report("a", 4)) == {0: ["a"]}


@pytest.mark.parametrize(
    ("name", "incarnation", "tick"),
    [("a", 1, 77), ("a", 0, 1), ("a", 2, 1), ("x", 1, 1)],
)
def test_bytes_of_an_unknown_take_or_another_incarnation_are_dropped(
    open_for_a: Driver, name: str, incarnation: int, tick: int
) -> None:
    d = open_for_a
    d.play("b/0=2 a/0~2")
    event = DeltaArrived(island=name, incarnation=incarnation, fragment=0, tick=tick)
    effects = d.feed(event)
    assert of(effects, Drop) == [DeltaKey(name, incarnation, 0, tick)]
    assert of(effects, Merge) == []


@pytest.mark.parametrize(("staleness", "refused"), [(0, True), (1, False)])
def test_a_take_against_an_old_version(staleness: int, refused: bool) -> None:
    """Its island is told at once, since it may be about to adopt the newer one."""
    d = pair("a", "b", max_staleness=staleness)
    d.play("b=1 a=2 a/0=2 /0")
    effects = d.take("b", 0, 2, base=Version(1, 0))
    verdicts = [(v.verdict, v.reason) for v in of(effects, TakeVerdict)]
    assert verdicts == [("refused", "stale") if refused else ("pending", "")]
    assert len(of(effects, Drop)) == 2 * refused, "once here, once on arrival"


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (Version(0, 9), "stale"),
        (Version(1, 1), "future"),
        (Version(1, 10**9), "future"),
        (Version(2, 0), "future"),
    ],
)
def test_a_take_is_of_a_version_of_this_term_that_was_merged(
    open_for_a: Driver, base: Version, reason: str
) -> None:
    d = open_for_a
    assert only(d.take("a", 0, 2, base=base), TakeVerdict).reason == reason
    assert d.fragment(0).merges == 0
    d.play("a/0-reset")
    assert d.totals("a").lost == {reason: 20}


def test_the_tape_has_refusals_and_publishes_tell_them_again() -> None:
    d = pair("a", "b")
    d.play("b=1 a=2 a/0~2")
    (note,) = notes(d.arrive("a", 0, refusal="non_finite"), "refused")
    assert note["reason"] == "non_finite"
    d.take("b", 0, 2)
    assert verdicts(d.computed(0))["a"] == (1, "refused", "non_finite")


def unfit(d: Driver, step: int) -> list[str]:
    """Return the alerts when a's delta up to this step is not finite and given up."""
    d.report("a", step)
    d.take("a", 0, step, arrive=False)
    effects = d.arrive("a", 0, refusal="non_finite")
    d.play("a/0-dropped")
    return [alert.text for alert in of(effects, Alert)]


def test_deltas_that_are_not_finite_in_a_row_are_told_of_once() -> None:
    d = pair("a", "b")
    steps = range(2, 2 * (UNFIT_DELTAS + 2), 2)
    said = [unfit(d, step) for step in steps]
    assert [len(texts) for texts in said] == [0] * (UNFIT_DELTAS - 1) + [1, 0]
    (text,) = said[UNFIT_DELTAS - 1]
    assert f"{UNFIT_DELTAS} deltas of fragment 0" in text
    assert "'a'" in text
    assert "inner.learning_rate" in text


def test_a_take_that_was_asked_for_before_a_crash_is_sent_again() -> None:
    """Its bytes may have come first, and been dropped: nobody knew of it."""
    d = pair("a")
    d.play("a=2 crash")
    d.hello("a", steps=2, phase="training")
    assert of(d.arrive("a", 0, tick=1), Drop)
    effects = d.report("a", 2, took(1, 0, 1, 0, 2))
    assert only(effects, ResendRequest).tick == 1
    d.arrive("a", 0, tick=1)
    d.play("a=4 a=6")
    assert d.account("a", 0).take is not None


def test_only_bytes_after_their_record_that_are_merged_tell_of_transfer_times(
    open_for_a: Driver,
) -> None:
    d = open_for_a
    d.take("b", 0, 2)
    before = d.fragment(0).transfer_seconds
    d.play("+4 a/0")
    assert d.fragment(0).transfer_seconds == before, "nobody knows since when"
    unfit = pair("a")
    unfit.play("a=2 a/0~2 +4")
    unfit.arrive("a", 0, refusal="non_finite")
    assert unfit.fragment(0).transfer_seconds == 0


def test_a_record_that_is_told_twice_is_on_the_tape_once() -> None:
    d = joined("a")
    record = d.record("a", "progress", 1, value=7)
    assert len(notes(d.report("a", 1, record), "island")) == 1
    assert notes(d.report("a", 1, record), "island") == []


def test_who_is_gone_is_told_of_no_version() -> None:
    d = joined("a", "b")
    d.play("b.leaves a=2")
    assert [told.island for told in of(d.merge(0, a=2), Published)] == ["a"]


@pytest.mark.parametrize("bytes_first", [False, True])
@pytest.mark.parametrize(("more", "refused"), [(0, False), (1, True)])
def test_counts_of_more_than_the_tokens_are_refused(
    open_for_a: Driver, more: int, refused: bool, bytes_first: bool
) -> None:
    d = open_for_a
    tokens = d.account("a", 0).tokens_per_step  # It is of one step, of two.
    tick = d.tick_of("a", 0)
    here = DeltaArrived(
        island="a",
        incarnation=1,
        fragment=0,
        tick=tick,
        norm=1.0,
        used=tokens + more,
        uses="abc",
    )
    effects = d.feed(here) if bytes_first else []
    effects += d.take("a", 0, 2, start=1, arrive=False)
    effects += [] if bytes_first else d.feed(here)
    take = d.account("a", 0).take
    assert take is not None
    assert (take.refused, take.ready) == ("miscounted" * refused, not refused)
    noted = notes(effects, "refused")
    if refused:
        (line,) = noted
        assert (line["island"], line["reason"]) == ("a", "miscounted")
        assert (line["norm"], line["most"]) == (tokens + 1, tokens)
        return
    assert not noted
    merge = only(d.take("b", 0, 2), Merge)
    assert [c.uses for c in merge.contributions] == ["abc", ""]


def test_an_island_that_miscounts_is_quarantined_and_told_why() -> None:
    d = joined(
        "a",
        "b",
        "c",
        quorum=1,
        fragment_sizes=(5,),
        steps_per_cycle=2,
        quarantine_after=1,
    )
    d.play("a=2 b=2 c=2 a/0~2")
    effects = d.feed(
        DeltaArrived(
            island="a", incarnation=1, fragment=0, tick=d.tick_of("a", 0), used=10**9
        )
    )
    (alert,) = of(effects, Alert)
    assert "'a' is quarantined" in alert.text
    assert "says that 1000000000 of its tokens used a row, but it has" in alert.text
