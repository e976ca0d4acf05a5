"""An island's claims about its steps and speed are checked against the data leased to
it and the coordinator's clock; who is let in, and whose bytes are wanted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import pytest
from kit import TOKENS_PER_STEP, Driver, make_config, of, only, persisted, took
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import claims, takes
from diloco_jax.protocol.coordinator.islands import (
    FASTER,
    FIRST_LEASE_STEPS,
    LATE_S,
    WallTime,
)
from diloco_jax.protocol.coordinator.state import Effect, MachineSlept
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import (
    Granted,
    Outstanding,
    Record,
    Refused,
    Stop,
    Version,
    Welcome,
)

LEASED = 2 * FIRST_LEASE_STEPS
"""Steps, of one sequence each, for which a join is leased data at once."""


def put_out(d: Driver, effects: list[Effect], *shown: str) -> None:
    """`a` is refused, its incarnation over, and its books say what they said before."""
    refuse = only(effects, Refused)
    assert (refuse.island, refuse.session, refuse.code) == ("a", "a1", "claims")
    for text in (*shown, "'a'", "start it again with incarnation 2"):
        assert text in refuse.message
    (left,) = persisted(effects, "left")
    assert (left["reason"], left["said"]) == ("refused", refuse.message)
    assert d.state.islands["a"].status == "gone"
    d.hello("a", 2)
    d.report("a", LEASED)
    assert d.state.islands["a"].status == "live"


def test_an_island_may_make_every_step_that_was_leased_to_it() -> None:
    d = Driver(outage_budget_s=1e6)
    d.join("a")
    d.report("a", LEASED)
    assert d.state.islands["a"].steps == LEASED
    sequences = d.state.islands["a"].sequences_granted
    d.now += sequences
    d.report("a", sequences)
    assert d.state.islands["a"].steps == sequences


@pytest.mark.parametrize("believed", [0, 7])
def test_more_steps_than_were_leased_are_not_believed(believed: int) -> None:
    d = Driver(total_tokens=10**4)
    d.hello("a", sequences_per_step=2)
    d.report("a", believed, step_seconds=0)
    effects = d.report("a", LEASED + 1, step_seconds=0)
    assert d.state.phase == "running"
    assert d.state.progress_tokens == believed * TOKENS_PER_STEP
    assert d.totals("a").lost == ({"refused": 10 * believed} if believed else {})
    put_out(d, effects, f"{LEASED + 1} steps of 2", f"{2 * LEASED} were leased to it")


def record(**fields: Any) -> Record:
    return Record(**{"seq": 1, "kind": "took", "fragment": 0, "step": 0, **fields})


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (
            record(step=5, tick=1),
            r"1 \(took\) names steps \[0, 5\), but it has made 4",
        ),
        (record(step=2, start=3, tick=1), r"\[3, 2\)"),
        (record(step=5, kind="adopted"), "adopted"),
        (record(step=0, start=5, kind="carried"), "carried"),
    ],
)
def test_a_record_of_steps_that_were_not_made_is_not_believed(
    wrong: Record, shown: str
) -> None:
    d = Driver()
    d.join("a")
    effects = d.report("a", 4, wrong)
    message = only(effects, Refused).message
    assert re.search(shown, message), message
    put_out(d, effects)


def test_a_hello_with_a_take_of_steps_to_come_is_put_out() -> None:
    d = Driver()
    d.join("a")
    held = Outstanding(fragment=0, tick=1, start=0, end=6, base=Version(), seq=1)
    effects = d.hello("a", steps=5, phase="training", outstanding=(held,))
    assert of(effects, Welcome) == []
    put_out(d, effects, "tick 1, holds steps [0, 6), but it has made 5")


def test_a_coordinator_that_came_back_knows_what_it_leased() -> None:
    d = Driver()
    d.hello("a")
    d.crash()
    d.hello("a", steps=LEASED, phase="training")
    assert d.state.islands["a"].steps == LEASED
    d.crash()
    put_out(d, d.hello("a", steps=LEASED + 1, phase="training"))


@pytest.mark.parametrize(
    ("steps", "granted", "counted", "shown"),
    [
        (100, 100, 100, ""),
        (11, 10, 0, "11 steps of 1"),
        (90, 101, 0, "granted at most 100"),
        (10, 10, 11, "has 110 tokens of its steps, but its 10 steps have 100"),
    ],
)
def test_what_an_earlier_term_leased_is_bounded_too(
    steps: int, granted: int, counted: int, shown: str
) -> None:
    d = Driver()
    d.state = replace(
        d.state,
        next_position=100,
        term=2,
        books=2,
        fragments=tuple(replace(f, version=Version(2, 0)) for f in d.state.fragments),
    )
    own = counted * TOKENS_PER_STEP
    effects = d.hello(
        "a", steps=steps, sequences_granted=granted, own_tokens=own, term=1
    )
    if not shown:
        only(effects, Welcome)
        assert of(effects, Granted)
        return
    refuse = only(effects, Refused)
    assert refuse.code == "claims"
    assert shown in refuse.message
    assert d.state.islands == {}


# ---- who is let in ----------------------------------------------------------------


def only_named(**admitted: int | None) -> Driver:
    return Driver(make_config(admitted=admitted, sequence_length=TOKENS_PER_STEP))


def test_a_name_that_nobody_knows_is_refused() -> None:
    d = only_named(a=1, b=2)
    d.hello("a")
    refuse = only(d.hello("c"), Refused)
    assert refuse.code == "unknown_island"
    for text in ("no island 'c'", "'a', 'b'", "placement.admit", "the run goes on"):
        assert text in refuse.message
    assert list(d.state.islands) == ["a"]


def test_an_island_of_another_batch_is_refused() -> None:
    d = only_named(b=2, c=None)
    refuse = only(d.hello("b", tokens_per_step=10, sequences_per_step=1), Refused)
    assert refuse.code == "config"
    for text in ("1 sequences and 10 tokens", "2 and 20", "islands.b.batch_size"):
        assert text in refuse.message
    only(d.hello("b", tokens_per_step=2**30, sequences_per_step=2), Refused)
    only(d.hello("b", tokens_per_step=20, sequences_per_step=2), Welcome)
    only(d.hello("c", tokens_per_step=31, sequences_per_step=3), Refused)
    only(d.hello("c", tokens_per_step=30, sequences_per_step=3), Welcome)


# ---- whose bytes are wanted -------------------------------------------------------


def awaited(d: Driver, name: str, tick: int, incarnation: int = 1) -> bool:
    return takes.is_awaited(d.fragment(0), name, incarnation, tick)


def test_bytes_are_wanted_from_the_request_to_the_merge() -> None:
    d = Driver(quorum=2)
    d.join("a", "b")
    assert not awaited(d, "a", 1)
    d.play("a=2 b=2")
    assert awaited(d, "a", 1), "also before its record, which may come later"
    assert not awaited(d, "a", 2)
    assert not awaited(d, "a", 1, incarnation=2)
    assert not awaited(d, "stranger", 1)
    d.take("a", 0, 2)
    assert awaited(d, "a", 1), "repeated"
    d.play("b/0=2 /0")
    assert not awaited(d, "a", 1)


def test_after_a_crash_bytes_are_wanted_once_their_record_is_here() -> None:
    d = Driver()
    d.play("a.joins a=2 crash")
    held = Outstanding(fragment=0, tick=1, start=0, end=2, base=Version(), seq=1)
    d.hello("a", steps=2, phase="training", outstanding=(held,))
    assert not awaited(d, "a", 1)
    d.report("a", 2, took(1, 0, 1, 0, 2))
    assert awaited(d, "a", 1)


LIE_S = 1e-4
"""The step time that a liar says it has."""
RUN_STEPS = 119_210
"""Steps of the faster island of configs/mixed_12b.py in the whole run."""
LEAST_S = 0.5
"""Least seconds of a step by the config."""
PLANNED = {"a": LEAST_S, "b": LEAST_S}


def is_in(d: Driver, name: str = "a") -> bool:
    return d.state.islands[name].status == "live"


def walk(
    d: Driver, steps: Iterable[int], every_s: float, said_s: float | None = None
) -> None:
    """Island a reports these steps, one report every so often; said_s: the step time
    that it says, if it is another."""
    for made in steps:
        d.now += every_s
        d.report("a", made, step_seconds=every_s if said_s is None else said_s)


# ---- the end of the run -----------------------------------------------------------


def test_two_messages_do_not_end_the_run() -> None:
    d = Driver(total_tokens=TOKENS_PER_STEP * RUN_STEPS)
    d.hello("a", step_seconds=LIE_S)
    effects = d.report("a", RUN_STEPS, step_seconds=LIE_S)
    assert d.state.phase == "running"
    assert of(effects, Stop) == []
    assert d.state.progress_tokens == 0, "the claim is not booked"
    message = only(effects, Refused).message
    for text in (f"{RUN_STEPS} steps more in 1 s", "islands.a", "step_seconds"):
        assert text in message
    d.hello("a", 2)
    assert is_in(d)


@pytest.mark.parametrize("every_s", [0.02, 3.0, 45.0])
@pytest.mark.parametrize("again", [False, True])
def test_steps_come_no_faster_than_the_config_allows(
    every_s: float, again: bool
) -> None:
    """A liar that claims as much as is believed, and tries for more; again: it comes
    back as another incarnation each time."""
    d = Driver(least_seconds=PLANNED, outage_budget_s=1000.0)
    d.hello("a", step_seconds=LIE_S)
    began, incarnation, made = d.now, 1, 0
    for _ in range(60):
        d.now += every_s
        island = d.state.islands["a"]
        some = int(FASTER * (every_s + LATE_S) / LEAST_S) + 1
        while some and is_in(d):
            before = d.state
            d.report("a", island.steps + some, step_seconds=LIE_S)
            if is_in(d):
                break
            d.state, some = before, some - 1
        made += some
        if again:
            incarnation += 1
            d.hello("a", incarnation)
    allowed = FASTER * (d.now - began + LATE_S) / LEAST_S
    assert made <= allowed
    assert again or made > 0.9 * allowed


def test_a_step_takes_the_time_of_all_its_sequences() -> None:
    d = Driver(least_seconds=PLANNED, outage_budget_s=100.0)
    d.hello("a", sequences_per_step=8, step_seconds=LIE_S)
    assert d.state.islands["a"].step_seconds == 8 * LEAST_S
    d.report("a", 0)
    d.now += 78 * LEAST_S
    most = FASTER * (78 + LATE_S / LEAST_S) / 8
    assert most == 20, "without a rest"
    d.report("a", 20)
    assert is_in(d)
    d.report("a", 21)
    assert not is_in(d)


def test_a_hello_is_believed_no_more_than_a_report() -> None:
    d = Driver(least_seconds=PLANNED)
    d.join("a", step_seconds=LIE_S)
    d.disconnect("a")
    d.now += 1.0
    some = int(FASTER * (1.0 + LATE_S) / LEAST_S) + 1
    effects = d.hello("a", steps=some, phase="training", step_seconds=LIE_S)
    assert f"{some} steps more in 2 s" in only(effects, Refused).message
    assert not is_in(d)


def test_idling_saves_up_an_outage_budget_and_no_more() -> None:
    d = Driver(least_seconds=PLANNED, outage_budget_s=30.0)
    d.join("a", step_seconds=LIE_S)
    walk(d, [0] * 100, 50.0, said_s=LIE_S)
    most = 30.0 + 64 * LEAST_S + LATE_S
    d.report("a", int(FASTER * most / LEAST_S) + 1, step_seconds=LIE_S)
    assert not is_in(d)


@pytest.mark.parametrize(
    ("known", "least_s", "most_s"),
    [
        (WallTime(), 0.0, math.inf),
        (WallTime(training_s=LATE_S / 2, steps=100), LATE_S / 404, math.inf),
        (WallTime(training_s=LATE_S), LATE_S / 2, 2 * LATE_S),
        (WallTime(training_s=40.0), 20.0, 80.0),
        (WallTime(training_s=40.0, steps=4), 4.0, 20.0),
        (WallTime(training_s=40.0, steps=4, stepping_s=90.0, stepped=3), 4.0, 60.0),
    ],
)
def test_a_step_time_is_known_within_a_factor_of_two(known, least_s, most_s) -> None:
    assert known.least_step_s == pytest.approx(least_s)
    assert known.most_step_s == most_s


AT_30 = WallTime(
    heard_at=30.0,
    training_s=20.0,
    steps=8.0,
    stepped_at=10.0,
    stepping_s=24.0,
    stepped=12.0,
)


@pytest.mark.parametrize(
    ("steps", "memory_s", "changed"),
    [
        (0, 0.0, {"stepped_at": 0.0}),
        (0, 10.0, {"training_s": 10.0 + 10, "steps": 4.0}),
        (
            3,
            10.0,
            {
                "training_s": 10.0 + 10,
                "steps": 4.0 + 3,
                "stepped_at": 40.0,
                "stepping_s": 6.0 + 30,
                "stepped": 3.0 + 3,
            },
        ),
    ],
)
def test_time_counts_for_less_as_it_gets_older(steps, memory_s, changed) -> None:
    """By the half after ten seconds, and by three quarters after thirty."""
    expected = replace(AT_30, heard_at=40.0, unused_s=5.0, **changed)
    assert AT_30.heard(40.0, 5.0, steps, memory_s) == expected


@pytest.mark.parametrize(("most_s", "unused_s"), [(99.0, LATE_S + 15), (3.0, 3.0)])
def test_the_next_incarnation_is_as_fast_as_the_one_before(most_s, unused_s) -> None:
    expected = replace(AT_30, heard_at=40.0, unused_s=unused_s, stepped_at=0.0)
    assert AT_30.next_incarnation(40.0, most_s, under_way_s=5.0) == expected


def test_time_that_the_clock_lacks_has_passed_since_all_that_was_heard() -> None:
    assert AT_30.slept(3.0) == replace(AT_30, heard_at=27.0, stepped_at=7.0)
    assert WallTime(heard_at=30.0).slept(3.0) == WallTime(heard_at=27.0)


@pytest.mark.parametrize("step_s", [0.5, 5.0, 60.0, 600.0])
def test_an_honest_step_of_any_length_is_believed(step_s: float) -> None:
    """Reports come every second, however rare the steps are, and leases are short."""
    d = Driver(lease_s=10.0, outage_budget_s=1e5)
    d.join("a", step_seconds=step_s)
    began = d.now
    for _ in range(int(20 * step_s)):
        d.now += 1.0
        d.report("a", int((d.now - began) / step_s), step_seconds=step_s)
        if d.now - began > 2 * step_s:
            assert d.state.islands["a"].believed_step_s == step_s


@pytest.mark.parametrize("said_s", [1.0, 1e9])
def test_idle_time_does_not_count_as_a_slow_step_for_long(said_s: float) -> None:
    """However long a step it says it has, which must not be what it is judged by."""
    d = Driver(lease_s=10.0, outage_budget_s=1e4, steps_per_cycle=1000)
    d.join("a", step_seconds=said_s)
    walk(d, [0] * 600, 1.0, said_s=said_s)
    walk(d, range(1, 31), 1.0, said_s=said_s)
    assert d.state.islands["a"].believed_step_s <= 2.5


@pytest.mark.parametrize("away", ["is away", "compiles"])
def test_time_that_was_none_in_training_makes_no_step_longer(away: str) -> None:
    d = Driver(lease_s=10.0, outage_budget_s=1e4, steps_per_cycle=1000)
    d.join("a", step_seconds=1e9)
    walk(d, range(1, 20), 1.0, said_s=1e9)
    if away == "is away":
        d.disconnect("a")
        d.now += 600.0
        d.hello("a", steps=19, phase="training", step_seconds=1e9)
    else:
        d.report("a", 19, phase="compiling", step_seconds=1e9)
        d.now += 200.0
        d.report("a", 19, step_seconds=1e9)
    walk(d, range(20, 24), 1.0, said_s=1e9)
    assert d.state.islands["a"].believed_step_s <= 2.3


# ---- the weight in a merge --------------------------------------------------------


def test_a_liar_outweighs_an_island_at_its_peak_by_the_margin_alone() -> None:
    d = Driver(quorum=2, fragment_sizes=(5,), steps_per_cycle=8, least_seconds=PLANNED)
    d.join("a", "b", step_seconds=LEAST_S)
    for honest in range(20, 80, 20):
        d.now += 20 * LEAST_S
        d.report("b", honest, step_seconds=LEAST_S)
        liar = int(FASTER * honest)
        d.report("a", liar, step_seconds=LIE_S)
        d.take("a", 0, liar)
        (merge,) = of(d.take("b", 0, honest), Merge)
        assert [c.tokens for c in merge.contributions] == [400, 200]
        d.computed(0)
    d.report("a", liar + int(FASTER * LATE_S / LEAST_S) + 1, step_seconds=LIE_S)
    assert not is_in(d)


# ---- the share of the others ------------------------------------------------------


@pytest.mark.parametrize("least", [{}, PLANNED])
@pytest.mark.parametrize("how", ["", "compiles for a moment", "comes as another one"])
def test_an_idle_liar_does_not_cut_the_others_share(
    how: str, least: dict[str, float]
) -> None:
    """Island a makes steps of a second, while b is idle, and may hide that."""
    d = Driver(fragment_sizes=(5,), steps_per_cycle=2, least_seconds=least)
    d.join("a")
    d.join("b", step_seconds=LIE_S)
    shares = []
    for steps in range(2, 22, 2):
        d.now += 2.0
        if how == "compiles for a moment":
            d.report("b", 0, phase="compiling", step_seconds=LIE_S)
        elif how:
            d.report("b", 0, step_seconds=LIE_S)
            d.hello("b", steps)
        d.report("b", 0, step_seconds=LIE_S)
        d.report("a", steps)
        shares.append(only(d.take("a", 0, steps), Merge).share)
        d.computed(0)
    if not how:
        assert shares[0] == pytest.approx(1 / 2), "2 s without a step: a second each"
    assert min(shares if least else shares[3:]) > (0.499 if least else 0.6)


# ---- honest islands ---------------------------------------------------------------


@pytest.mark.parametrize("least", [{}, {"a": 0.001}, {"": 0.001}])
@pytest.mark.parametrize("every_s", [0.02, 5.0])
def test_a_fast_honest_island_never_waits_for_data(
    least: dict[str, float], every_s: float
) -> None:
    """1,000 steps per second, as its config says or does not."""
    d = Driver(least_seconds=least, outage_budget_s=60.0)
    d.hello("a")
    d.report("a", 0, step_seconds=0.0)
    steps = 0
    for waited_s in [0.02] * 100 + [every_s] * 400:
        d.now += waited_s
        steps += round(waited_s / 0.001)
        d.report("a", steps, step_seconds=0.001)
        island = d.state.islands["a"]
        assert is_in(d)
        assert island.steps == steps
        assert (island.sequences_granted - steps) * 0.001 >= 60.0
        assert island.tokens_per_second == TOKENS_PER_STEP / 0.001


@pytest.mark.parametrize("cut_off", [False, True])
def test_islands_went_on_while_the_coordinators_machine_slept(cut_off: bool) -> None:
    """Its clock stood still for an hour; their data lasted for ten minutes of it."""
    d = Driver(least_seconds=PLANNED, outage_budget_s=600.0)
    d.join("a", step_seconds=LEAST_S)
    walk(d, range(1, 20), LEAST_S)
    lease = d.state.islands["a"].lease_until
    held = d.state.islands["a"].sequences_granted
    d.feed(MachineSlept(seconds=3600.0))
    assert d.state.islands["a"].lease_until == lease, "nobody could be heard"
    if cut_off:
        d.disconnect("a")
        effects = d.hello("a", steps=held, phase="training", step_seconds=LEAST_S)
        assert only(effects, Welcome).resumed
    else:
        d.report("a", held, step_seconds=LEAST_S)
    assert is_in(d)
    assert d.state.islands["a"].steps == held
    # It counts once.
    unused_s = d.state.islands["a"].wall_time.unused_s
    d.report("a", held, step_seconds=LEAST_S)
    assert d.state.islands["a"].wall_time.unused_s == unused_s <= 600.0


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("step_s", [LEAST_S, 4 * LEAST_S])
def test_an_island_that_was_cut_off_may_have_used_all_its_data(
    crash: bool, step_s: float
) -> None:
    d = Driver(least_seconds=PLANNED, outage_budget_s=600.0)
    d.join("a", step_seconds=step_s)
    walk(d, range(1, 20), step_s)
    if crash:
        d.crash()
    else:
        d.disconnect("a")
        d.now += 2500.0
    held = d.state.islands["a"].sequences_granted
    assert (held - 19) * step_s >= 600.0
    effects = d.hello("a", steps=held, phase="training", step_seconds=step_s)
    assert only(effects, Welcome).resumed
    assert d.state.islands["a"].steps == held
    d.now += step_s
    assert of(d.report("a", held, step_seconds=step_s), Granted)


@pytest.mark.parametrize(
    ("granted", "unused_s"), [(0, 10 + 64 * 0.5 + LATE_S), (802, 400 * 0.5 / FASTER)]
)
def test_unheard_an_island_used_its_data_or_an_outage(granted, unused_s) -> None:
    config = make_config(least_seconds={"a": 0.25}, outage_budget_s=10.0)
    d = Driver(config)
    d.hello("a", sequences_per_step=2)
    island = replace(d.state.islands["a"], steps=1, sequences_granted=granted)
    expected = WallTime(heard_at=7.0, unused_s=unused_s)
    assert claims.unheard(config, island, 7.0) == expected


def test_steps_that_only_the_coordinator_before_had_heard_of_are_believed() -> None:
    """No merge has told of them since the last snapshot, as below a quorum."""
    d = Driver(least_seconds=PLANNED, outage_budget_s=10.0, quorum=2)
    d.join("a", step_seconds=LEAST_S)
    steps = 0
    for _ in range(500):
        d.now += 2 * LEAST_S
        steps += 2
        d.report("a", steps, step_seconds=LEAST_S)
    d.crash()
    assert d.state.islands["a"].steps == 0
    d.now += 1.0
    effects = d.hello("a", steps=steps, phase="training", step_seconds=LEAST_S)
    assert only(effects, Welcome).resumed
    d.now += 1.0
    d.report("a", steps + 2, step_seconds=LEAST_S)
    assert is_in(d)


def test_messages_that_come_late_and_at_once_are_believed() -> None:
    d = Driver(least_seconds=PLANNED)
    d.join("a", step_seconds=LEAST_S)
    for begin in range(0, 1200, 60):
        d.now += 30.0
        for steps in range(begin, begin + 60, 4):
            d.report("a", steps, step_seconds=LEAST_S)
    assert is_in(d)


def test_a_pause_is_no_lie() -> None:
    """An evaluation; the island is as fast as before once some steps are reported."""
    d = Driver(least_seconds=PLANNED)
    d.join("a", step_seconds=1.0)
    walk(d, range(100), 1.0)
    speed = d.state.islands["a"].tokens_per_second
    d.now += 20.0
    d.report("a", 100, step_seconds=1.0)
    assert d.state.islands["a"].tokens_per_second == speed == TOKENS_PER_STEP


def test_steps_of_an_island_from_an_earlier_term_are_believed_once() -> None:
    """Nobody knows for how long it was not heard."""
    d = Driver(least_seconds=PLANNED)
    fragments = tuple(replace(f, version=Version(2, 0)) for f in d.state.fragments)
    d.state = replace(d.state, next_position=1000, term=2, books=2, fragments=fragments)
    earlier = {"term": 1, "steps": 10, "sequences_granted": 100}
    d.hello("a", **earlier)
    d.report("a", 60, step_seconds=LEAST_S)
    assert is_in(d)
    d.hello("a", 2, **earlier)
    d.report("a", 60, step_seconds=LEAST_S)
    assert not is_in(d)
