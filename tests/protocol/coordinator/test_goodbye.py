"""The state of an island after its goodbye."""

import msgspec
import pytest
from kit import (
    Driver,
    begun,
    check_state,
    joined,
    notes,
    of,
    only,
    persisted,
    scene,
    scenes,
    verdicts,
    whose,
)

from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator.state import from_builtins
from diloco_jax.protocol.holding import DeltaArrived, Drop, Forget, Merge
from diloco_jax.protocol.messages import DeltaKey


def left_behind(**changes: int) -> Driver:
    """Islands a, b, c, of which 2 are a quorum, were asked for fragment 0; the delta
    of a's 2 steps is here, and a, which has made 5, said goodbye."""
    d = joined("a", "b", "c", **{"quorum": 2, **changes})
    d.play("a=2 b=2 c=2 a/0=2 a=5")
    d.goodbye("a", "preempted")
    return d


def test_the_log_has_what_was_left_behind() -> None:
    d = left_behind()
    (record,) = persisted(d.effects, "left")
    assert record["settled_steps_by_fragment"] == [2, 0]
    (kept,) = record["left_behind"]
    assert (kept["fragment"], kept["tick"], kept["end"]) == (0, 1, 2)
    d.merge(0, b=2, c=2)
    assert (d.totals("a").merged, d.totals("a").in_flight) == (15, 0)
    assert d.fragment(0).left_behind == ()


def test_bytes_after_the_goodbye_are_dropped() -> None:
    d = joined("a", "b", quorum=2)
    d.reports(a=2, b=2)
    tick = d.tick_of("a", 0)
    d.play("a/0~2 a.leaves")
    assert persisted(d.effects, "left")[0]["left_behind"] == []
    late = DeltaArrived(island="a", incarnation=1, fragment=0, tick=tick)
    assert only(d.feed(late), Drop).tick == tick


def test_bytes_that_come_twice_do_not_drop_what_was_left_behind() -> None:
    d = left_behind()
    again = DeltaArrived(island="a", incarnation=1, fragment=0, tick=1)
    assert d.feed(again) == []
    d.hello("a", 2)
    assert d.feed(again) == []
    d.take("b", 0, 2)
    assert len(whose(only(d.take("c", 0, 2), Merge))) == 3
    assert only(d.feed(again), Drop).tick == 1


@scenes(
    """
a delta that is here is merged after the goodbye, to whose quorum it does not count
    # Fragment 0 has 30 of 40 parameters: of a's 50 tokens 20 are in the delta.
    joined a b c quorum=2
    a=2 b=2 c=2 a/0=2 a=5 a.leaves -> ask 0:abc
    b/0=2 ->
    c/0=2 -> merge 0: a 0-2, b 0-2, c 0-2
    lost -> a stopped 35
what comes after the goodbye is lost
    joined a b quorum=2
    a=2 b=2 a/0~2 -> ask 0:ab
    a.leaves -> drop 0:a; skip 0: quorum is out of reach
    lost -> a stopped 20
the next incarnation is merged beside it
    joined a b quorum=2 fragment_sizes=4,
    a=4 b=4 a/0=4 a.leaves -> ask 0:ab; skip 0: quorum is out of reach
    b/0=4 a.2 a=0 b=8 ->
    a=4 -> ask 0:a
    a/0=4 -> merge 0: a 0-4, a 0-4, b 0-4
    /0 ->
    lost -> nothing
an island leaves one delta of a fragment at most
    joined a b quorum=2 fragment_sizes=4,
    a=4 b=4 a/0=4 a.leaves -> ask 0:ab; skip 0: quorum is out of reach
    a.2 b.2 -> drop 0:b; out fenced:b1
    a=0 b=0 a=4 b=4 a/0=4 -> ask 0:ab
    a.leaves -> drop 0:a; skip 0: quorum is out of reach
    lost -> a stopped 40, b died 40
the flush merges what was left behind and waits for nobody
    joined a b c quorum=2 total_tokens=90
    a=2 b=2 c=2 a/0=2 a=5 a.leaves -> ask 0:abc
    b.leaves -> drop 0:b; skip 0: quorum is out of reach
    c.leaves -> drop 0:c; flush 0: a 0-2
    +49 ->
    /0 -> finished
    lost -> a stopped 35, b stopped 20, c stopped 20
nothing is left behind for a fragment whose flush is over
    joined a b fragment_sizes=4,4 steps_per_cycle=1000000 total_tokens=80
    a=4 b=4 a.stops b.stops a/0=4 b/1~4 -> ask 0:ab; ask 1:ab
    +50 -> flush 0: a 0-4; skip 1: quorum is out of reach
    phases -> flushing merging done
    b/1 ->
    b.leaves -> drop 0:b; drop 1:b
    /0 -> alert the run ended without all that a computed; drop 1:a; finished
    lost -> a finished 20, b stopped 40
a coordinator that crashes loses what was left behind
    joined a b c quorum=2
    a=2 b=2 c=2 a/0=2 a=5 a.leaves a.2 crash
    lost -> a stopped 35, a coordinator 15
one that lags by no more than is allowed may still be merged
    joined a b
    a=2 b=2 b/0~2 a/0=2 b/0 b.leaves /0
    open -> a 5, b 15
"""
)
def test_a_scene_of_goodbyes(first: str, text: str) -> None:
    scene(begun(first, joined=joined), text)


def test_both_incarnations_of_an_island_in_one_merge_count_once_as_present() -> None:
    d = joined("a", "b", fragment_sizes=(4,), quorum=2)
    d.play("a=4 b=4 a/0=4 a.leaves b/0=4 a.2 a=0 b=8 a=4 a/0=4")
    told = verdicts(d.computed(0))
    assert {n: v[1] for n, v in told.items()} == {"a": "merged", "b": "merged"}
    account = d.account("a", 0)
    assert (account.merged_tokens, account.start) == (80, 4)
    assert (account.merges_in, account.merges_alive) == (1, 1)


def test_one_that_lags_too_far_is_lost() -> None:
    d = joined("a", "b", max_staleness=0)
    d.play("a=2 b=2 b/0~2 a/0=2")
    leases = messages.join_spans(lease.span for lease in d.state.islands["b"].leases)
    # It arrives, and b leaves, while the merge that it is too late for is under way.
    d.arrive("b", 0)
    d.goodbye("b", "preempted")
    effects = d.computed(0)
    drop = only(effects, Drop)
    assert (drop.island, drop.incarnation, drop.fragment) == ("b", 1, 0)
    assert notes(effects, "refused")[0]["reason"] == "stale"
    assert d.totals("b").lost == {"preempted": 5, "stale": 15}
    assert d.state.departed == ()
    assert messages.common_spans(d.state.free_spans, leases) == leases


@pytest.mark.parametrize("merged", [True, False])
def test_its_data_is_granted_again_if_its_last_delta_is_in_no_merge(merged) -> None:
    d = left_behind()
    if merged:
        d.play("b/0=2 c/0=2 /0")
        assert d.state.departed == ()
    d.crash()
    (free,) = d.state.free_spans
    assert free.start == (2 if merged else 0)
    # What is granted of it by the next life is not free after the next crash.
    (granted,) = (r for r in d.state.free_spans)
    d.hello("d")
    left = d.state.free_spans
    d.crash()
    assert d.state.free_spans == left != (granted,)


def test_a_fenced_incarnation_leaves_what_has_arrived() -> None:
    d = joined("a", "b", quorum=2)
    d.play("a=2 b=2 a/0=2")
    effects = d.hello("a", 2)
    (left,) = persisted(effects, "left")
    assert (left["reason"], left["incarnation"]) == ("died", 1)
    (kept,) = left["left_behind"]
    assert (kept["fragment"], kept["end"]) == (0, 2)
    assert of(effects, Drop) == []
    assert only(effects, Forget).kept == (DeltaKey("a", 1, 0, 1),)


def test_a_snapshot_knows_it_and_what_the_log_has_of_its_merge() -> None:
    d = left_behind()
    stored = from_builtins(msgspec.json.decode(msgspec.json.encode(d.state)))
    assert stored == d.state
    check_state(stored)
    skip = len(d.log)
    d.play("b/0=2 c/0=2 /0")
    before = d.totals("a")
    d.crash(stored, skip)
    assert d.totals("a") == before
