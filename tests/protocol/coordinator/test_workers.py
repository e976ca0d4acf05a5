"""A worker goes away and comes back; and which worker has a fragment."""

import pytest
from kit import Driver, asked, notes, of, only

from diloco_jax.protocol.coordinator.events import Alert, WorkerAway, WorkerBack
from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import ResendRequest
from diloco_jax.protocol.values import Version


@pytest.mark.parametrize(
    ("sizes", "workers", "dealt"),
    [
        ((5, 5, 5, 5), 2, (0, 1, 0, 1)),
        ((1, 9, 4, 4), 2, (1, 0, 1, 1)),
        ((3, 2), 1, (0, 0)),
        ((3, 2), 3, (0, 1)),
    ],
)
def test_fragments_are_dealt_evenly_by_size(sizes, workers, dealt) -> None:
    assert deal(sizes, workers) == dealt


def driver(**changes: int) -> Driver:
    """Islands a and b, of which 2 are a quorum, were asked for fragment 0, which worker
    0 has; worker 1 has fragment 1."""
    d = Driver(**{"quorum": 2, "workers": 2, **changes})
    d.join("a", "b")
    for name in "ab":
        d.report(name, 2)
    return d


def test_an_open_request_is_given_up_and_what_has_arrived_is_unsent() -> None:
    d = driver()
    d.take("a", 0, 2)
    (alert,) = of(d.feed(WorkerAway(worker=0)), Alert)
    assert "worker 0 is away: its fragments [0]" in alert.text
    assert d.fragment(0).phase == "idle"
    take = d.account("a", 0).take
    assert take is not None
    assert (take.end, take.arrived) == (2, False)
    resends = of(d.feed(WorkerBack(worker=0)), ResendRequest)
    assert [(told.island, told.fragment) for told in resends] == [("a", 0), ("b", 0)]
    d.arrive("a", 0)
    assert d.account("a", 0).take.ready


def test_an_ordered_merge_never_was_and_its_deltas_are_merged_later() -> None:
    d = driver()
    d.take("a", 0, 2)
    d.take("b", 0, 2)
    assert d.fragment(0).phase == "merging"
    d.feed(WorkerAway(worker=0))
    d.computed(0)
    assert d.fragment(0).version == Version(1, 0), "its result comes from the dead"
    d.feed(WorkerBack(worker=0))
    for name in "ab":
        assert of(d.arrive(name, 0), Merge) == []
    effects = [effect for n in (4, 6) for name in "ab" for effect in d.report(name, n)]
    assert [c.end for c in only(effects, Merge).contributions] == [2, 2]
    d.computed(0)
    assert (d.totals("a").merged, d.totals("a").lost) == (15, {})


def test_ticks_skip_what_is_away_and_nothing_else() -> None:
    d = driver()
    d.take("a", 0, 2)
    d.take("b", 0, 2)
    d.computed(0)
    d.feed(WorkerAway(worker=1))
    effects = [effect for n in (4, 6) for name in "ab" for effect in d.report(name, n)]
    (skipped,) = notes(effects, "skipped")
    assert (skipped["fragment"], skipped["why"]) == (1, "its worker is away")
    assert asked(effects) == {0: ["a", "b"]}


def test_a_delta_that_was_left_behind_is_lost_with_its_worker() -> None:
    d = driver()
    d.take("a", 0, 2)
    d.goodbye("a", "preempted")
    assert d.fragment(0).left_behind
    d.feed(WorkerAway(worker=0))
    assert d.fragment(0).left_behind == ()
    assert d.account("a", 0).lost_tokens == {"worker": 20}


def test_bytes_that_came_just_before_count_for_nothing() -> None:
    d = driver()
    d.take("a", 0, 2, arrive=False)
    d.feed(WorkerAway(worker=0))
    d.arrive("a", 0)
    assert not d.account("a", 0).take.arrived
    assert [(i.state, i.expected) for i in d.ignored] == [("away", True)]


def test_the_flush_ends_at_its_deadline_and_names_what_it_lacks() -> None:
    d = driver(total_tokens=40)
    d.feed(WorkerAway(worker=1))
    for name in "ab":
        d.report(name, phase="stopped")
    assert d.state.phase == "flushing"
    d.merge(0, a=2, b=2)
    assert d.state.phase == "flushing", "it waits for the worker"
    d.wait(d.config.outage_budget_s)
    assert d.state.phase == "flushing", "its restart may take as long"
    effects = d.wait(d.config.flush_s)
    assert d.state.phase == "done"
    texts = [alert.text for alert in of(effects, Alert)]
    assert any("without a last merge of fragments [1]" in text for text in texts)


def test_a_worker_that_comes_back_in_time_is_in_the_flush() -> None:
    d = driver(total_tokens=40)
    d.feed(WorkerAway(worker=1))
    for name in "ab":
        d.report(name, phase="stopped")
    d.merge(0, a=2, b=2)
    d.feed(WorkerBack(worker=1))
    d.merge(1, a=2, b=2)
    assert d.state.phase == "done"
    assert d.totals("a").lost == {}


def test_a_worker_that_is_back_ends_the_wait_for_its_restart() -> None:
    d = driver(total_tokens=40)
    d.feed(WorkerAway(worker=1))
    for name in "ab":
        d.report(name, phase="stopped")
    d.merge(0, a=2, b=2)
    d.wait(d.config.outage_budget_s - 1)
    d.feed(WorkerBack(worker=1))
    d.wait(d.config.flush_s - 1)
    assert d.state.phase == "flushing"
    d.wait(1)
    assert d.state.phase == "done", "no delta came"


def test_a_worker_that_goes_away_in_the_flush_may_come_back() -> None:
    d = driver(total_tokens=40)
    for name in "ab":
        d.report(name, phase="stopped")
    d.merge(0, a=2, b=2)
    d.wait(d.config.flush_s - 1)
    d.feed(WorkerAway(worker=1))
    d.wait(d.config.outage_budget_s)
    d.feed(WorkerBack(worker=1))
    d.merge(1, a=2, b=2)
    assert d.state.phase == "done"
    assert d.totals("a").lost == {}


def test_a_coordinator_that_comes_back_finds_every_worker() -> None:
    d = driver()
    d.feed(WorkerAway(worker=0))
    d.crash()
    assert not d.fragment(0).away
