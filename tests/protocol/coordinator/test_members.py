"""Members of a run: leases, incarnations, fencing, and coming back."""

import pytest
from kit import (
    Driver,
    asked,
    begun,
    joined,
    kinds,
    notes,
    of,
    only,
    pair,
    persisted,
    scene,
    scenes,
    verdicts,
)

from diloco_jax.protocol.coordinator import members
from diloco_jax.protocol.coordinator.state import (
    Alert,
    Effect,
    Note,
    Persist,
    Said,
)
from diloco_jax.protocol.holding import Drop
from diloco_jax.protocol.messages import (
    Goodbye,
    Granted,
    Outstanding,
    Refused,
    Report,
    ResendRequest,
    Span,
    TakeRequest,
    TakeVerdict,
    Version,
    Welcome,
)


def status(d: Driver, name: str) -> str:
    return d.state.islands[name].status


def test_a_join_is_durable_before_it_is_visible() -> None:
    d = Driver()
    effects = d.hello("a")
    order = kinds(effects)
    assert order.index(Persist) < order.index(Welcome)
    assert persisted(effects, "joined")[0]["session"] == "a1"
    welcome = only(effects, Welcome)
    assert not welcome.resumed
    assert welcome.versions == (Version(1, 0), Version(1, 0))


@pytest.mark.parametrize(
    ("name", "lookahead", "hosts"),
    [
        ("one", 0, ""),
        ("one", 1, "1 hosts"),
        ("one", 2, "1 hosts"),
        ("one", 2**16, "1 hosts"),
        ("two", 0, "2 hosts"),
        ("two", 2, ""),
        ("two", 3, "2 hosts"),
        ("undescribed", 0, ""),
        ("undescribed", 1, "1 hosts"),
        ("undescribed", 2, ""),
        ("undescribed", 2**16, "1 hosts"),
    ],
)
def test_a_lead_is_that_of_the_hosts_that_the_config_has(
    name: str, lookahead: int, hosts: str
) -> None:
    d = Driver(hosts={"one": 1, "two": 2})
    effects = d.hello(name, lookahead=lookahead)
    if not hosts:
        assert only(effects, Welcome)
        assert d.state.islands[name].lookahead == lookahead
        return
    refused = only(effects, Refused)
    assert refused.code == "config"
    assert f"{lookahead} boundaries late, but it has {hosts}" in refused.message
    late = 2 if name == "two" else 0
    assert f"islands.{name}.hosts), with which that is {late};" in refused.message


@scenes(
    """
a silent island is absent and loses nothing
    joined a b quorum=2
    b=5 +60 a=1 +40 ->
    status -> a live, b absent
    b=6 ->
    status -> a live, b live
    lost -> nothing
a fenced delta is merged if it has arrived, and is in no quorum
    # Fragment 0 has 30 of 40 parameters; nothing of fragment 1 was asked for.
    joined a b c quorum=2
    a=2 b=2 a/0=2 -> ask 0:abc
    a.2 -> out fenced:a1
    b/0=2 ->
    c/0=2 -> merge 0: a 0-2, b 0-2, c 0-2
    /0 ->
    lost -> a died 5
one that has not arrived is lost
    joined a b c quorum=2
    a=2 b=2 a/0~2 -> ask 0:abc
    a.2 -> drop 0:a; out fenced:a1
    b/0=2 ->
    c/0=2 -> merge 0: b 0-2, c 0-2
    /0 ->
    lost -> a died 20
a request that got lost is repeated
    pair a b quorum=2
    a=2 b=2 -> ask 0:ab
    a.away -> skip 0: quorum is out of reach
    a.back -> ask 0:a
bytes that got lost are asked for
    pair a b quorum=2
    a=2 b=2 a/0~2 -> ask 0:ab
    a.away -> skip 0: quorum is out of reach
    a.back -> resend 0:a
bytes that are here are not
    pair a b quorum=2
    a=2 b=2 a/0=2 a.away -> ask 0:ab
    a.back ->
a take unknown after a crash is sent again and merged
    pair a b quorum=2
    a=2 b=2 a/0=2 crash -> ask 0:ab
    a.back=2 -> resend 0:a
    b.back=2 a/0 a=4 ->
    b=4 -> ask 0:b
    b/0=4 -> merge 0: a 0-2, b 0-4
a take that grew stale while away is refused
    pair a b
    a=2 a/0~2 a.away b=2 b/0=2 /0 -> ask 0:ab; merge 0: b 0-2; publish pending:a
    b=4 b/0=4 /0 -> ask 0:b; merge 0: b 2-4; publish refused stale:a; drop 0:a
    a.back -> refused stale:a
compiling is not mistaken for death
    joined
    a.1 a.compiles +299
    status -> a live
    +2
    status -> a absent
nor is joining
    joined
    a.1 +299
    status -> a live
    +2
    status -> a absent
a goodbye loses what is open
    # Of 50 tokens, fragment 0 (30 of 40 parameters) merged 20, fragment 1 none.
    joined a
    a=2 a/0=2 /0 a=5 a.leaves
    merged -> a 15
    lost -> a stopped 35
    a.leaves a=6 -> out fenced:a1
an island fenced while its merge is under way
    # The new one took nothing.
    joined a
    a=2 a/0=2 a=5 a.2
    lost -> a died 35
    /0 ->
    merged -> a 15
    open -> a 0
an island that gave a refused take up is not asked for it again
    # The record that says so is on its way.
    pair a b
    b=1 a=2 a/0~2 a/0! -> ask 0:ab; refused non_finite:a; drop 0:a
    a.1 ->
"""
)
def test_a_scene_of_members(first: str, text: str) -> None:
    scene(begun(first, joined=joined, pair=pair), text)


def test_a_broken_connection_makes_absent_at_once() -> None:
    d = joined("a")
    assert notes(d.disconnect("a"), "absent")[0]["why"] == "disconnected"
    assert d.disconnect("a") == []
    back = d.hello("a", phase="training")
    assert only(back, Welcome).resumed
    assert notes(back, "resumed")[0]["island"] == "a"
    assert d.state.islands["a"].joins == 1


def test_a_higher_incarnation_fences_the_older_one() -> None:
    d = joined("a")
    d.play("a=2 a/0~2")
    effects = d.hello("a", 2)
    refuse = only(effects, Refused)
    assert (refuse.session, refuse.code) == ("a1", "fenced")
    assert "incarnation 2" in refuse.message
    assert persisted(effects, "left")[0]["reason"] == "died"
    assert persisted(effects, "joined")[0]["incarnation"] == 2
    assert only(effects, Drop).incarnation == 1
    assert d.state.islands["a"].joins == 2
    assert d.totals("a").lost == {"died": 20}
    # What the old one still says has no effect.
    before = d.state
    for message in (
        Report(phase="training", steps=9, step_seconds=1.0),
        Goodbye(reason="failed", text="late"),
    ):
        effects = d.feed(Said(island="a", session="a1", message=message))
        told = [refused.code for refused in of(effects, Refused)]
        assert told == (["fenced"] if isinstance(message, Report) else [])
    assert d.state == before


def test_an_incarnation_is_told_nothing_of_a_take_of_the_one_before() -> None:
    """It would be a verdict on a take that it has not made."""
    d = joined("a")
    d.play("a=2 a/0=2 a=5 a.2")
    assert verdicts(d.computed(0)) == {}


def test_the_end_of_an_incarnation_tells_its_own_losses() -> None:
    d = Driver()
    for life, steps in enumerate((5, 3), 1):
        d.hello("a", life)
        d.report("a", 0)
        d.report("a", steps)
        (left,) = persisted(d.goodbye("a", "failed"), "left")
        assert left["lost_tokens_by_fragment"] == [10 * steps] * 2
    assert d.totals("a").lost == {"failed": 80}


def test_an_island_that_failed_is_named_with_what_it_said() -> None:
    d = joined("a", "b")
    assert of(d.goodbye("a", "stopped"), Alert) == []
    (alert,) = of(d.goodbye("b", "failed"), Alert)
    assert "island 'b' failed, and says: bye" in alert.text


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"run_id": "other"}, "run_id", ["run-1", "other"]),
        ({"fingerprint": "beef"}, "config", ["f00d", "beef"]),
        ({"incarnation": 2}, "fenced", ["incarnation 3", "2", "--incarnation 4"]),
        ({"incarnation": 3, "session": "else"}, "name_in_use", ["'a'", "4"]),
    ],
)
def test_refusals_name_both_sides(
    fields: dict[str, object], code: str, words: list[str]
) -> None:
    d = Driver()
    d.hello("a", 3)
    before = d.state
    effects = d.hello("a", **{"incarnation": 3, **fields})  # type: ignore[arg-type]
    refuse = only(effects, Refused)
    assert refuse.code == code
    assert all(word in refuse.message for word in words), refuse.message
    assert kinds(effects) == [Note, Refused]
    assert d.state == before, "the others are not disturbed"


def test_a_first_join_does_not_know_the_run_id() -> None:
    d = Driver()
    assert of(d.hello("a", run_id=""), Welcome)


# ---- coming back ------------------------------------------------------------------


@pytest.fixture
def asked_a() -> Driver:
    """a and b train with quorum 2; both are asked for fragment 0 at tick 1."""
    d = pair("a", "b", quorum=2)
    d.report("a", 2)
    assert asked(d.report("b", 2)) == {0: ["a", "b"]}
    return d


def back(d: Driver, *held: Outstanding, steps: int = 2) -> list[Effect]:
    d.disconnect("a")
    return d.hello("a", steps=steps, phase="training", outstanding=held)


def test_a_merge_that_was_not_heard_of_is_told_with_the_next_request(
    asked_a: Driver,
) -> None:
    d = asked_a
    held = d.held("a", 0, 0, 2)
    d.play("a/0=2 b/0=2 /0 a=4")
    assert asked(d.report("b", 4)) == {0: ["a", "b"]}
    effects = back(d, held, steps=4)
    verdict = only(effects, TakeVerdict)
    assert (verdict.tick, verdict.verdict) == (held.tick, "merged")
    ask = only(effects, TakeRequest)
    assert ask.tick == d.tick_of("a", 0) > held.tick


def test_a_refusal_is_told_again_with_its_reason_after_it_was_answered(
    asked_a: Driver,
) -> None:
    d = asked_a
    held = d.held("a", 0, 0, 2)
    d.take("a", 0, 2, arrive=False)
    d.arrive("a", 0, refusal="non_finite")
    answer = d.record("a", "reopened", 2, fragment=0, tick=held.tick, start=0)
    d.report("a", 2, answer)
    verdict = only(back(d, held), TakeVerdict)
    assert (verdict.verdict, verdict.reason) == ("refused", "non_finite")


def test_grants_that_got_lost_are_sent_again() -> None:
    d = joined("a")
    spans = [e.span for e in of(d.effects, Granted)]
    assert len(spans) == 1
    assert [e.span for e in of(d.hello("a"), Granted)] == spans
    granted = d.state.islands["a"].sequences_granted
    assert of(d.hello("a", sequences_granted=granted), Granted) == []
    d.crash()
    grant = only(d.hello("a"), Granted)
    assert (grant.span, grant.offset) == (Span(*spans[0]), 0)


def test_a_take_from_before_the_last_verdict_is_neither_judged_nor_asked_for() -> None:
    """A late hello tells it: it was judged, and so was a later one."""
    d = pair("a")
    d.report("a", 2)
    first = d.tick_of("a", 0)
    d.play("a/0=2 /0 a=4 a/0=4 /0")
    told = d.account("a", 0).told
    assert told is not None
    assert told.tick > first
    assert d.account("a", 0).take is None
    held = Outstanding(fragment=0, tick=first, start=0, end=2, base=Version(), seq=0)
    d.disconnect("a")
    effects = d.hello("a", steps=4, phase="training", outstanding=(held,))
    assert only(effects, Welcome).resumed
    assert not of(effects, ResendRequest)
    assert not of(effects, TakeVerdict)
    assert d.account("a", 0).take is None


# ---- an island that never makes a step is let in no more, so that ----


def fail(d: Driver, incarnation: int) -> None:
    """One start that fails before its first step, and says so."""
    assert only(d.hello("a", incarnation), Welcome)
    d.report("a", 0, phase="compiling")
    d.goodbye("a", "failed")


def test_failures_in_a_row_without_a_step_end_the_island() -> None:
    d = Driver(fruitless_starts=3)
    for incarnation in (1, 2):
        fail(d, incarnation)
    assert only(d.hello("a", 3), Welcome)
    d.report("a", 1)
    d.goodbye("a", "failed")  # Its step ends the row.
    for incarnation in (4, 5):
        fail(d, incarnation)
    d.hello("a", 6)  # It crashes, and nobody hears of it.
    refused = only(d.hello("a", 7), Refused)
    assert refused.code == "no_progress"
    assert "failed 3 times in a row" in refused.message
    assert "placement.fruitless_starts = 3" in refused.message
    assert only(d.hello("a", 6), Welcome), "the last one may return"
    assert only(d.hello("b"), Welcome), "the others go on"


@pytest.mark.parametrize("reason", ["stopped", "preempted"])
def test_an_island_that_was_asked_to_end_has_not_failed(reason) -> None:
    d = Driver(fruitless_starts=2)
    for incarnation in range(1, 6):
        assert only(d.hello("a", incarnation), Welcome)
        d.goodbye("a", reason)


def test_a_crash_of_the_coordinator_does_not_start_the_row_anew() -> None:
    d = Driver(fruitless_starts=3)
    fail(d, 1)
    snapshot = d.state
    logged = len(d.log)
    fail(d, 2)
    fail(d, 3)
    d.crash(snapshot, skip=logged)
    assert of(d.hello("a", 4), Refused)[0].code == "no_progress"


def test_incarnations_that_have_ended_are_fenced() -> None:
    d = Driver(workers=2)
    d.join("a", "b")
    d.hello("b", 3)
    d.goodbye("a", "preempted")
    assert [(fence.island, fence.before) for fence in members.fences(d.state)] == [
        ("a", 2),
        ("b", 3),
    ]
