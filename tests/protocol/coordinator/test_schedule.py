"""Ticks: when they come and for which fragment."""

import pytest
from kit import (
    Driver,
    begun,
    joined,
    kinds,
    make_config,
    of,
    only,
    pair,
    persisted,
    scene,
    scenes,
)
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.schedule import (
    after_crash,
    fragment_of,
    pace,
    steps_to_tick,
)
from diloco_jax.protocol.coordinator.state import Effect, Persist
from diloco_jax.protocol.messages import TakeRequest


@pytest.mark.parametrize(
    ("cycle", "fragments", "expected"),
    [
        (4, 2, [2, 2, 2, 2]),
        (7, 3, [2, 2, 3, 2, 2, 3]),
        (2, 4, [0, 1, 0, 1, 0, 1, 0, 1]),
        (5, 1, [5, 5]),
    ],
)
def test_steps_between_ticks(cycle: int, fragments: int, expected: list[int]) -> None:
    config = make_config(steps_per_cycle=cycle, fragment_sizes=(1,) * fragments)
    ticks = range(1, len(expected) + 1)
    assert [steps_to_tick(config, n) for n in ticks] == expected
    assert [fragment_of(config, n) for n in ticks] == [
        i % fragments for i in range(len(expected))
    ]


@scenes(
    """
a tick asks every live island for its fragment
    joined a b
    b=1 ->
    a=2 -> ask 0:ab
    a/0=2 b/0=1 /0 a=3 -> merge 0: a 0-2; publish pending:b
    a=4 -> ask 1:ab
ticks of one cycle may be of unequal lengths
    joined a fragment_sizes=1,1,1 steps_per_cycle=5
    a=1 -> ask 0:a
    a=2 ->
    a=3 -> ask 1:a
    a=5 -> ask 2:a
islands out of phase pace no faster than one of them
    # One step per tick; whoever is ahead paces.
    joined a b c d e steps_per_cycle=2
    a=1 b=1 c=1 d=1 e=1
    tick -> 1
    a=2 b=2 c=2 d=2 e=2
    tick -> 2
    c=3
    tick -> 3
    c=4
    tick -> 4
no lead outlives a tick
    # The first five steps of a made the tick before.
    joined a b
    b=1 a=5 -> ask 0:ab
    a=6 ->
    a=7 -> ask 1:ab
the K-th fastest island sets the pace
    # c makes up for the first tick, and b does nothing after it.
    joined a b c quorum=2
    a=50 ->
    b=2 -> ask 0:abc
    c=2 a=60 ->
    c=4 -> ask 1:abc
ticks pause below quorum
    joined a quorum=2
    a=40 ->
    b.joins b=1 ->
    b=2 -> ask 0:ab
    b.away a=100 -> skip 0: quorum is out of reach
counters restart at a join and at a return
    # What a did while it was away does not pace.
    joined a b quorum=2
    a=1 a.away a.back=9 b=2 ->
    a=11 -> ask 0:ab
a fragment still open skips its tick
    pair a
    a=2 -> ask 0:a
    a=4 -> skip 0: open
    a/0=4 a=6 -> merge 0: a 0-4; skip 0: merging
    /0 ->
    a=8 -> ask 0:a
more fragments than steps gives several ticks at once, the first without a step
    joined a fragment_sizes=1,1,1,1 steps_per_cycle=2
    tick -> 1
    a=1 -> ask 1:a; ask 2:a
    a=2 -> ask 3:a; skip 0: open
    tick -> 5
no tick waits for one island that was cut off
    joined a b c reunion_s=20
    a.away c.away ->
    b=2 -> ask 0:b
    a.back ->
    b=4 -> ask 1:ab
when all were cut off the others are waited for again
    joined a b reunion_s=20
    a.away b.away b.back b=4 ->
    a.back -> ask 0:ab
the first ticks after a crash wait for who is not back yet
    # Else b is merged without a until a's delta, of before the crash, is stale.
    joined a b reunion_s=20
    a=2 a/0~2 crash b.back +19 b=8 -> ask 0:ab
    a.back=2 -> resend 0:a; ask 0:b
    a/0 ->
    b/0=8 -> merge 0: a 0-2, b 0-8
a lag is of one tick at most
    # What b did not do long ago does not hold it up.
    joined a b steps_per_cycle=4 fragment_sizes=1,1,1,1
    a=1 a=2 a=3 a=4 a=5 a.away
    tick -> 5
    b=1 b=2
    tick -> 6
ticks before its first step are no debt of an island
    pair a
    b.1 b.compiles a=2
    tick -> 1
    b=0 b=2
    tick -> 2
only islands that train count
    joined a b quorum=2
    b.compiles a=40 ->
    b=0 b.stops a=80 -> may leave:b
    tick -> 0
one durable record reserves the numbers of many ticks
    joined a
    log
    a=2 -> ask 0:a
    log -> ticks
    a/0=2 /0 a=4 -> merge 0: a 0-2; ask 1:a
    log -> merged
"""
)
def test_a_scene_of_ticks(first: str, text: str) -> None:
    scene(begun(first, joined=joined, pair=pair), text)


def test_a_stop_by_its_own_count_that_was_too_early_costs_no_steps() -> None:
    d = joined("a", "b", "c", quorum=2)
    d.report("a", 1)
    d.report("a", 1, phase="stopped")
    tick = d.state.tick
    d.report("a", 2, phase="training")
    assert d.state.islands["a"].steps_at_tick == 0
    d.report("b", 2)
    assert d.state.tick == tick + 1


def test_islands_that_take_at_once_wait_for_those_that_take_later() -> None:
    def puts_off(d: Driver, steps: int) -> dict[str, int]:
        asks = of([e for n in "abc" for e in d.report(n, steps)], TakeRequest)
        return {ask.island: ask.after for ask in asks}

    d = Driver(quorum=3)
    for name, lookahead in {"a": 0, "b": 2, "c": 2}.items():
        d.hello(name, lookahead=lookahead)
    d.reports(a=0, b=0, c=0)
    assert puts_off(d, 2) == {"a": 2, "b": 0, "c": 0}
    d.disconnect("a")
    back = only(d.hello("a", steps=2, phase="training", lookahead=0), TakeRequest)
    assert back.after == 2, "a request that is repeated is put off, too"
    alike = Driver(quorum=3)
    for name in "abc":
        alike.hello(name, lookahead=2)
    alike.reports(a=0, b=0, c=0)
    assert puts_off(alike, 2) == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize(
    ("own_s", "leads_s", "after"),
    [
        (0.5, 0.5, 2),
        (0.4, 0.5, 2),
        (1.0, 0.5, 1),
        (5.0, 0.5, 0),
        (0.5, 1.0, 0),
        (0.0, 0.5, 0),
    ],
)
def test_a_take_is_put_off_by_time_and_not_for_much_slower_islands(
    own_s: float, leads_s: float, after: int
) -> None:
    d = Driver(quorum=1)
    d.hello("a")
    d.hello("b", lookahead=2)
    d.report("a", 0, step_seconds=own_s)
    d.report("b", 0, step_seconds=leads_s)
    effects = d.report("a", 2, step_seconds=own_s)
    effects += d.report("b", 2, step_seconds=leads_s)
    asks = {ask.island: ask.after for ask in of(effects, TakeRequest)}
    assert asks == {"a": after, "b": 0}


SLOW = 20.0
"""Step time of a slow island, in those of a fast one."""


def beside_a_slow_one(said_s: float, *, cycle: int = 1000, ticks: int = 3) -> Driver:
    """A fast island with a step a second beside one of two hosts, without which there
    is no quorum; that one makes a step in 20 s, and says how long it takes. Each
    of so many ticks, a is asked for the next fragment."""
    d = Driver(
        quorum=2,
        steps_per_cycle=cycle,
        fragment_sizes=(1,) * cycle,
        outage_budget_s=1e4,
        compile_budget_s=1e4,
        lease_s=1e4,
    )
    d.hello("a")
    d.hello("b", lookahead=2)
    d.report("a", 0)
    d.report("b", 0, step_seconds=said_s)
    for tick in range(1, ticks + 1):
        d.now += SLOW
        d.report("a", round(tick * SLOW))
        d.report("b", tick, step_seconds=said_s)
    return d


def put_off(effects: list[Effect], name: str = "a") -> list[int]:
    return [ask.after for ask in of(effects, TakeRequest) if ask.island == name]


def test_the_pace_is_that_of_the_quorum() -> None:
    assert pace(1, [3.0, 1.0, 2.0]) == 1.0
    assert pace(2, [3.0, 1.0, 2.0]) == 2.0
    # Of those whose speed is known, though they are fewer.
    assert pace(2, [3.0, 0.0]) == 3.0
    assert pace(1, []) == 0.0


def test_a_fast_island_waits_for_an_honest_slow_one_of_several_hosts() -> None:
    d = beside_a_slow_one(SLOW)
    assert put_off(d.effects)[-1] == 2 * SLOW


@pytest.mark.parametrize("said_s", [1e3, 1e6, 1e9])
def test_a_step_time_counts_within_a_factor_of_two_of_what_reports_show(
    said_s: float,
) -> None:
    """Twice the wall time per step."""
    d = beside_a_slow_one(said_s, ticks=20)
    assert put_off(d.effects)[-1] == 2 * 2 * SLOW


@pytest.mark.parametrize("said_s", [SLOW, 1e9])
def test_a_take_is_put_off_by_a_cycle_of_its_islands_steps_at_most(
    said_s: float,
) -> None:
    d = beside_a_slow_one(said_s, cycle=4)
    assert max(put_off(d.effects)) == 4


@pytest.mark.parametrize("ends", ["goodbye", "disconnect", "falls silent", "compiles"])
def test_takes_that_were_put_off_are_asked_for_again_once_their_cause_is_gone(
    ends: str,
) -> None:
    d = Driver(quorum=2, steps_per_cycle=100, lease_s=10.0)
    d.hello("a")
    d.hello("b", lookahead=2)
    d.hello("c")
    for steps in (0, 50):
        d.reports(a=steps, c=steps)
        d.report("b", steps, step_seconds=1.4)
    tick = d.tick_of("a", 0)
    assert put_off(d.effects) == [3]
    if ends == "compiles":
        effects = d.report("b", 50, phase="compiling")
    elif ends == "falls silent":
        d.now += 9.0
        d.reports(a=51, c=51)
        effects = d.wait(2.0)
    else:
        effects = d.goodbye("b") if ends == "goodbye" else d.disconnect("b")
    asks = {ask.island: (ask.after, ask.tick) for ask in of(effects, TakeRequest)}
    assert asks == {"a": (0, tick), "c": (0, tick)}
    assert of(d.wait(0.5), TakeRequest) == [], "once"


def test_takes_are_asked_for_again_once_a_slow_one_proves_faster() -> None:
    """Nothing is known of b as fragment 0 is asked for; at the next tick it is."""
    d = Driver(quorum=2, steps_per_cycle=40)
    d.hello("a")
    d.hello("b", lookahead=2)
    for steps in (0, 20):
        d.report("a", steps)
        d.report("b", steps, step_seconds=1e9)
    assert put_off(d.effects) == [40]
    d.now += 40.0
    d.report("b", 40, step_seconds=1e9)
    assert put_off(d.hello("c")) == [], "who joins is no reason to ask"
    found = of(d.report("a", 40), TakeRequest)
    again = {ask.fragment: ask.after for ask in found if ask.island == "a"}
    assert again.keys() == {0, 1}
    assert max(again.values()) < 10


def test_numbers_of_ticks_are_durable_before_they_are_used() -> None:
    order = kinds(joined("a").report("a", 2))
    assert order.index(Persist) < order.index(TakeRequest)


def test_a_record_reserves_sixteen_cycles_beyond_the_tick_that_needs_it() -> None:
    d = joined("a")
    found = []
    for steps in range(2, 142, 2):
        effects = d.report("a", steps)
        found += [(d.state.tick, r["through"]) for r in persisted(effects, "ticks")]
    assert found == [(1, 33), (34, 66), (67, 99)]


@pytest.mark.parametrize(
    ("tick", "reserved", "then"), [(5, 33, 33), (5, 34, 35), (5, 5, 5), (6, 5, 6)]
)
def test_after_a_crash_the_cycle_goes_on_beyond_what_is_reserved(
    tick, reserved, then
) -> None:
    d = Driver()
    state = replace(d.state, tick=tick, ticks_reserved=reserved)
    assert after_crash(d.config, state).tick == then


def test_no_tick_number_is_used_twice_in_spite_of_a_crash() -> None:
    d = joined("a")
    d.report("a", 2)
    for _ in range(2):
        d.crash()
        d.hello("a", steps=2, phase="training")
        d.report("a", d.state.islands["a"].steps + 2)
        ticks = [e.tick for e in of(d.effects, TakeRequest)]
        assert len(ticks) == len(set(ticks))
    fragments = [e.fragment for e in of(d.effects, TakeRequest)]
    assert fragments == [0, 0, 0], "the cycle goes on at the last tick that is durable"
