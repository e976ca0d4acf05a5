"""A worker outlives its lead: its deltas count once islands say of what they are."""

from __future__ import annotations

import pytest
from kit import Driver, of

from diloco_jax.protocol.coordinator.events import Effect, WorkerAway
from diloco_jax.protocol.holding import DeltaArrived, Drop, Merge
from diloco_jax.protocol.messages import ResendRequest, TakeVerdict
from diloco_jax.protocol.values import DeltaKey, Outstanding, Version

VERSIONS = (Version(1, 0), Version(1, 0))
KEY = DeltaKey("a", 1, 0, 1)


def taken() -> tuple[Driver, Outstanding]:
    """Island a has taken fragment 0 as the lead dies; b has not. 2 are a quorum."""
    d = Driver(quorum=2, workers=2)
    d.join("a", "b")
    for name in "ab":
        d.report(name, 2)
    d.take("a", 0, 2, arrive=False)
    held = d.held("a", 0, 0, 2)
    d.crash()
    return d, held


def resume(d: Driver, *held: Outstanding, through: int = 0) -> list[Effect]:
    return d.hello(
        "a",
        phase="training",
        steps=2,
        versions=VERSIONS,
        outstanding=held,
        records_through=through,
    )


def test_a_delta_counts_once_its_island_has_told_of_its_take() -> None:
    d, held = taken()
    assert d.arrive("a", 0, held.tick, norm=3.0) == []
    effects = resume(d, held, through=held.seq)
    assert of(effects, ResendRequest) == []
    take = d.account("a", 0).take
    assert take is not None
    assert (take.ready, take.norm) == (True, 3.0)
    assert d.fragment(0).early == ()
    assert d.fragment(0).transfer_seconds == 0.0, "nobody knows how long it took"


def test_it_is_merged_then() -> None:
    d, held = taken()
    d.arrive("a", 0, held.tick)
    resume(d, held, through=held.seq)
    d.hello("b", phase="training", steps=2, versions=VERSIONS)
    effects: list[Effect] = []
    for steps in (4, 6, 8):
        for name in "ab":
            effects += d.report(name, steps)
        take = d.account("b", 0).take
        if take is not None and take.end is None:
            effects += d.take("b", 0, steps)
    (merge,) = of(effects, Merge)
    assert (merge.contributions[0].island, merge.contributions[0].end) == ("a", 2)


def test_it_waits_for_a_record_that_the_dead_lead_may_not_have_written() -> None:
    d, held = taken()
    d.arrive("a", 0, held.tick)
    effects = resume(d, held)
    assert d.account("a", 0).take is None
    record = d.record(
        "a", "took", 2, fragment=0, tick=held.tick, start=0, version=VERSIONS[0]
    )
    effects += d.report("a", 2, record)
    assert of(effects, ResendRequest) == []
    take = d.account("a", 0).take
    assert take is not None
    assert take.ready


def test_it_stays_though_it_comes_once_more_before_that_record() -> None:
    """A worker tells a new lead of all that it has, and of what arrives meanwhile."""
    d, held = taken()
    d.arrive("a", 0, held.tick)
    resume(d, held)
    assert of(d.arrive("a", 0, held.tick), Drop) == []
    record = d.record(
        "a", "took", 2, fragment=0, tick=held.tick, start=0, version=VERSIONS[0]
    )
    d.report("a", 2, record)
    take = d.account("a", 0).take
    assert take is not None
    assert take.ready


def test_without_a_worker_that_outlived_the_lead_it_is_asked_for() -> None:
    d, held = taken()
    (request,) = of(resume(d, held, through=held.seq), ResendRequest)
    assert (request.fragment, request.tick) == (0, held.tick)


@pytest.mark.parametrize("tick", [0, 2])
def test_the_delta_of_another_take_is_dropped(tick: int) -> None:
    d, held = taken()
    d.arrive("a", 0, tick)
    effects = resume(d, held, through=held.seq)
    assert of(effects, Drop) == [KEY._replace(tick=tick)]
    assert len(of(effects, ResendRequest)) == 1


def test_a_delta_that_its_island_does_not_know_is_dropped() -> None:
    d, _ = taken()
    d.arrive("a", 0, 1)
    assert of(resume(d), Drop) == [KEY]
    assert d.fragment(0).early == ()


def test_the_delta_of_an_incarnation_that_has_ended_is_dropped() -> None:
    d, _ = taken()
    d.arrive("a", 0, 1)
    assert KEY in of(d.hello("a", 2), Drop)
    assert d.fragment(0).early == ()
    assert of(d.feed(DeltaArrived(**KEY._asdict())), Drop) == [KEY]


def test_an_unfit_delta_is_refused_as_its_take_is_known() -> None:
    d, held = taken()
    d.arrive("a", 0, held.tick, refusal="non_finite")
    effects = resume(d, held, through=held.seq)
    (verdict,) = of(effects, TakeVerdict)
    assert (verdict.verdict, verdict.reason) == ("refused", "non_finite")


def test_a_worker_that_dies_after_all_has_nothing() -> None:
    d, held = taken()
    d.arrive("a", 0, held.tick)
    d.feed(WorkerAway(worker=0))
    assert d.fragment(0).early == ()
