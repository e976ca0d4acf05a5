"""The state of an island after its goodbye."""

import msgspec
import pytest
from kit import Driver, asked, check_state, joined, notes, of, only, persisted, verdicts

from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator.state import Effect, from_builtins
from diloco_jax.protocol.holding import DeltaArrived, Drop, Forget, Merge
from diloco_jax.protocol.messages import DeltaKey


def whose(effects: list[Effect]) -> list[tuple[str, int, int, int]]:
    """The contributions of the one merge."""
    merge = only(effects, Merge)
    return [(c.island, c.incarnation, c.start, c.end) for c in merge.contributions]


def left_behind(**changes: int) -> Driver:
    """Islands a, b, c, of which 2 are a quorum, were asked for fragment 0; the delta
    of a's 2 steps is here, and a, which has made 5, said goodbye."""
    d = joined("a", "b", "c", **{"quorum": 2, **changes})
    d.reports(a=2, b=2, c=2)
    d.take("a", 0, 2)
    d.report("a", 5)
    d.goodbye("a", "preempted")
    return d


def test_a_delta_that_is_here_is_merged_after_the_goodbye() -> None:
    d = left_behind()
    (record,) = persisted(d.effects, "left")
    assert record["settled_steps_by_fragment"] == [2, 0]
    (kept,) = record["left_behind"]
    assert (kept["fragment"], kept["tick"], kept["end"]) == (0, 1, 2)
    assert of(d.effects, Drop) == []
    # Fragment 0 has 30 of 40 parameters: of a's 50 tokens 20 are in the delta.
    assert d.totals("a").lost == {"preempted": (30 * 30 + 10 * 50) // 40}
    assert of(d.take("b", 0, 2), Merge) == [], "who left is not in the quorum"
    expected = [("a", 1, 0, 2), ("b", 1, 0, 2), ("c", 1, 0, 2)]
    assert whose(d.take("c", 0, 2)) == expected
    d.computed(0)
    assert (d.totals("a").merged, d.totals("a").in_flight) == (15, 0)
    assert d.fragment(0).left_behind == ()


def test_what_comes_after_the_goodbye_is_lost() -> None:
    d = joined("a", "b", quorum=2)
    d.reports(a=2, b=2)
    tick = d.tick_of("a", 0)
    d.take("a", 0, 2, arrive=False)
    d.goodbye("a", "preempted")
    assert persisted(d.effects, "left")[0]["left_behind"] == []
    late = DeltaArrived(island="a", incarnation=1, fragment=0, tick=tick)
    assert only(d.feed(late), Drop).tick == tick
    assert d.totals("a").lost == {"preempted": 20}


def test_bytes_that_come_twice_do_not_drop_what_was_left_behind() -> None:
    d = left_behind()
    again = DeltaArrived(island="a", incarnation=1, fragment=0, tick=1)
    assert d.feed(again) == []
    d.hello("a", 2)
    assert d.feed(again) == []
    d.take("b", 0, 2)
    assert len(whose(d.take("c", 0, 2))) == 3
    assert only(d.feed(again), Drop).tick == 1


def test_the_next_incarnation_is_merged_beside_it() -> None:
    d = joined("a", "b", fragment_sizes=(4,), quorum=2)
    d.reports(a=4, b=4)
    d.take("a", 0, 4)
    assert notes(d.goodbye("a"), "skipped"), "b alone is no quorum"
    d.take("b", 0, 4)
    d.hello("a", 2)
    for name, steps in (("a", 0), ("b", 8), ("a", 4)):
        effects = d.report(name, steps)
    assert asked(effects) == {0: ["a"]}
    merge = d.take("a", 0, 4)
    assert whose(merge) == [("a", 1, 0, 4), ("a", 2, 0, 4), ("b", 1, 0, 4)]
    told = verdicts(d.computed(0))
    assert {n: v[1] for n, v in told.items()} == {"a": "merged", "b": "merged"}
    account = d.account("a", 0)
    assert (account.merged_tokens, account.start) == (80, 4)
    assert (account.merges_in, account.merges_alive) == (1, 1)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_that_lags_too_far_is_lost(max_staleness: int) -> None:
    d = joined("a", "b", max_staleness=max_staleness)
    d.reports(a=2, b=2)
    d.take("b", 0, 2, arrive=False)
    d.take("a", 0, 2)
    leases = messages.join_spans(lease.span for lease in d.state.islands["b"].leases)
    # It arrives, and b leaves, while the merge that it is too late for is under way.
    d.arrive("b", 0)
    d.goodbye("b", "preempted")
    effects = d.computed(0)
    totals = d.totals("b")
    if max_staleness:
        assert of(effects, Drop) == []
        assert totals.in_flight == 15
        return
    drop = only(effects, Drop)
    assert (drop.island, drop.incarnation, drop.fragment) == ("b", 1, 0)
    assert notes(effects, "refused")[0]["reason"] == "stale"
    assert totals.lost == {"preempted": 5, "stale": 15}
    assert d.state.departed == ()
    assert messages.common_spans(d.state.free_spans, leases) == leases


def test_an_island_leaves_one_delta_of_a_fragment_at_most() -> None:
    d = joined("a", "b", fragment_sizes=(4,), quorum=2)
    d.reports(a=4, b=4)
    d.take("a", 0, 4)
    d.goodbye("a")
    for name in "ab":
        d.hello(name, 2)
    for steps in (0, 4):
        d.reports(a=steps, b=steps)
    d.take("a", 0, 4)
    effects = d.goodbye("a", "failed")
    assert persisted(effects, "left")[0]["left_behind"] == []
    assert only(effects, Drop).incarnation == 2
    assert [kept.incarnation for kept in d.fragment(0).left_behind] == [1]
    assert d.totals("a").lost == {"failed": 40}


@pytest.mark.parametrize("merged", [True, False])
def test_its_data_is_granted_again_if_its_last_delta_is_in_no_merge(merged) -> None:
    d = left_behind()
    if merged:
        d.takes(0, b=2, c=2)
        d.computed(0)
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
    d.reports(a=2, b=2)
    d.take("a", 0, 2)
    effects = d.hello("a", 2)
    (left,) = persisted(effects, "left")
    assert (left["reason"], left["incarnation"]) == ("died", 1)
    (kept,) = left["left_behind"]
    assert (kept["fragment"], kept["end"]) == (0, 2)
    assert of(effects, Drop) == []
    assert only(effects, Forget).kept == (DeltaKey("a", 1, 0, 1),)


def test_a_coordinator_that_crashes_loses_it() -> None:
    d = left_behind()
    d.hello("a", 2)
    d.crash()
    assert d.fragment(0).left_behind == ()
    assert d.account("a", 0).lost_tokens == {"preempted": 30, "coordinator": 20}


def test_a_snapshot_knows_it_and_what_the_log_has_of_its_merge() -> None:
    d = left_behind()
    stored = from_builtins(msgspec.json.decode(msgspec.json.encode(d.state)))
    assert stored == d.state
    check_state(stored)
    skip = len(d.log)
    d.takes(0, b=2, c=2)
    d.computed(0)
    before = d.totals("a")
    d.crash(stored, skip)
    assert d.totals("a") == before


def test_the_flush_merges_what_was_left_behind_and_waits_for_nobody() -> None:
    d = left_behind(total_tokens=90)
    assert d.state.phase == "stopping"
    for name in "bc":
        d.goodbye(name, "preempted")
    (merge,) = of(d.effects, Merge)
    assert merge.final
    assert [c.island for c in merge.contributions] == ["a"]
    d.wait(d.config.flush_s - 1)
    effects = d.computed(0)
    assert persisted(effects, "finished")
    assert d.totals("a").merged == 15


def test_nothing_is_left_behind_for_a_fragment_whose_flush_is_over() -> None:
    d = joined("a", "b", fragment_sizes=(4, 4), steps_per_cycle=10**6, total_tokens=80)
    d.reports(a=4, b=4)
    for name in "ab":
        d.report(name, phase="stopped")
    d.take("a", 0, 4)
    d.take("b", 1, 4, arrive=False)
    d.wait(d.config.flush_s)
    assert [d.fragment(i).phase for i in (0, 1)] == ["merging", "done"]
    d.arrive("b", 1)
    assert persisted(d.goodbye("b", "failed"), "left")[0]["left_behind"] == []
    assert persisted(d.computed(0), "finished")
    assert (d.totals("b").lost, d.totals("b").in_flight) == ({"failed": 40}, 0)
