"""Leases of data: enough for an outage, never twice, back only if without effect; and
the books: what the totals are, and that errors in them are found.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import Driver, joined, kinds, of, only, persisted
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import leases, ledger
from diloco_jax.protocol.coordinator.islands import FIRST_LEASE_STEPS, GRANTS_AT_ONCE
from diloco_jax.protocol.coordinator.state import (
    Effect,
    Persist,
    with_account,
    with_fragment,
    with_island,
)
from diloco_jax.protocol.messages import Granted, Span, Welcome, join_spans


def spans(effects: list[Effect]) -> list[Span]:
    return [grant.span for grant in of(effects, Granted)]


def test_a_new_island_gets_data_with_its_welcome() -> None:
    d = Driver()
    effects = d.hello("a", sequences_per_step=3)
    (span,) = spans(effects)
    assert span.stop - span.start >= 3 * FIRST_LEASE_STEPS
    assert kinds(effects)[-2:] == [Persist, Granted], "durable first"
    assert persisted(effects, "granted")[0] == {
        "kind": "granted",
        "island": "a",
        "incarnation": 1,
        "start": span.start,
        "stop": span.stop,
        "offset": 0,
    }


def test_a_welcome_says_where_grants_go_on() -> None:
    """An island that needs none may be the only one that tells the next coordinator."""
    d = Driver()
    d.state = replace(d.state, next_position=500)
    assert only(d.hello("a"), Welcome).next_position == 500
    assert only(d.hello("a"), Welcome).next_position == d.state.next_position > 500


def test_an_island_always_holds_an_outage_budget_of_data() -> None:
    d = Driver(outage_budget_s=30.0)
    d.hello("a", sequences_per_step=2)
    for steps in range(0, 4000, 7):
        d.now += 0.7
        d.report("a", steps, step_seconds=0.1)
        island = d.state.islands["a"]
        steps_held = island.sequences_granted / 2 - island.steps
        assert steps_held * 0.1 >= 30
    assert island.sequences_granted < 2 * (4000 + 1200), "and not much more"
    grants = of(d.effects, Granted)
    assert [g.offset for g in grants] == [
        sum(g.span.stop - g.span.start for g in grants[:i]) for i in range(len(grants))
    ]


def test_data_is_leased_no_faster_than_the_step_time_allows() -> None:
    """A counter that runs away, or a liar, must not end the run at once."""
    d = Driver(outage_budget_s=30.0)
    d.hello("a", sequences_per_step=2)
    d.report("a", 1, step_seconds=0.1)
    for _ in range(50):  # All that it holds, at once, again and again.
        d.now += 0.01
        d.report("a", d.state.islands["a"].sequences_granted // 2, step_seconds=0.1)
    assert d.state.islands["a"].steps < 4000
    began = d.now
    for _ in range(400):
        d.now += 1.0
        d.report("a", d.state.islands["a"].sequences_granted // 2, step_seconds=0.1)
    made = d.state.islands["a"].steps
    assert 3 < made / ((d.now - began) / 0.1) < 5, "four times those of its step time"
    d.now += 1000.0
    d.report("a", made, step_seconds=0.1)  # Honest again.
    for _ in range(1000):
        d.now += 0.7
        made += 7
        d.report("a", made, step_seconds=0.1)
        assert d.state.islands["a"].sequences_granted >= 2 * (made + 300)


def test_in_a_moment_only_the_largest_grants_are_given() -> None:
    d = Driver(outage_budget_s=30.0)
    d.hello("a", step_seconds=1.0)
    for _ in range(9):
        d.report("a", d.state.islands["a"].sequences_granted)
    assert len(spans(d.effects)) == GRANTS_AT_ONCE


def test_no_position_is_granted_to_two_islands() -> None:
    d = joined("a", "b")
    for steps in range(0, 300, 50):
        d.reports(a=steps, b=steps)
    granted = [p for span in spans(d.effects) for p in range(*span)]
    assert len(granted) == len(set(granted))


def test_positions_after_the_last_merged_step_are_granted_again() -> None:
    d = Driver()
    d.hello("a", sequences_per_step=2)
    d.play("a=0 a=5 a/0=5 /0 a=9 a.leaves")
    (first,) = spans(d.effects)
    again = spans(d.hello("b"))
    assert again[0].start == first.start + 5 * 2, "steps 0 to 4 are in a merge"
    assert d.state.free_spans == () or d.state.free_spans[0].start >= again[0].stop


def test_positions_in_a_merge_under_way_are_not_free() -> None:
    d = joined("a")
    d.play("a=5 a/0=5")
    assert d.fragment(0).phase == "merging"
    (first,) = spans(d.effects)
    assert spans(d.hello("a", 2))[0].start == first.start + 5


@pytest.mark.parametrize(
    ("step_seconds", "steps"), [(1.0, 31), (1e-300, 300_001), (5e-324, 300_001)]
)
def test_what_an_island_holds_at_most_is_twice_an_outage_budget(
    step_seconds: float, steps: int
) -> None:
    """30 s and a step, twice, of 2 sequences; no step takes less than 0.1 ms."""
    d = Driver(outage_budget_s=30.0)
    d.hello("a", sequences_per_step=2, step_seconds=step_seconds)
    assert spans(d.effects) == [Span(0, 2 * steps * 2)]
    if step_seconds == 1.0:
        assert spans(d.report("a", 31)) == [], "just a half is left"
        assert spans(d.report("a", 32)) == [Span(124, 124 + 64)], "and is filled up"


@pytest.mark.parametrize(
    ("last", "granted", "left"),
    [
        ([(500, 540), (550, 600)], [Span(500, 512)], ((512, 540), (550, 600))),
        ([(500, 511)], [Span(500, 511), Span(600, 601)], ()),
    ],
)
def test_a_grant_is_made_of_as_many_spans_as_it_takes(last, granted, left) -> None:
    d = Driver(outage_budget_s=30.0)
    free = (Span(0, 10), Span(100, 140), *itertools.starmap(Span, last))
    d.state = replace(d.state, free_spans=free, next_position=600)
    d.hello("a", step_seconds=1.0)
    assert spans(d.effects) == [Span(0, 10), Span(100, 140), *granted]
    assert d.state.free_spans == left


def test_leases_whose_steps_are_all_merged_are_forgotten() -> None:
    d = Driver()
    d.hello("z")
    d.hello("a", sequences_per_step=2)
    d.report("a", 0)
    (lease,) = d.state.islands["a"].leases
    steps = (lease.span.stop - lease.span.start) // 2
    d.report("a", steps - 1)
    assert len(d.state.islands["a"].leases) == 2
    d.report("a", steps)
    d.merge(0, a=steps)
    d.state = leases.granted(d.state, "a", Span(9000, 9002))
    kept = d.state.islands["a"].leases
    assert lease not in kept
    assert len(kept) == 2


def test_what_was_trained_on_is_neither_free_nor_still_to_come() -> None:
    d = Driver()
    d.hello("a", sequences_per_step=2)
    d.hello("b", sequences_per_step=1)
    assert leases.trained(d.state) == []
    (first,) = d.state.islands["a"].leases
    (other,) = d.state.islands["b"].leases
    d.play("a=0 a=3 b=5")
    begun = other.span.start
    mine = Span(first.span.start, first.span.start + 6)
    assert leases.trained(d.state) == [mine, Span(begun, begun + 5)]
    d.goodbye("b")  # It is in no merge.
    assert leases.trained(d.state) == [mine]
    steps = (first.span.stop - first.span.start) // 2
    d.report("a", steps)
    d.merge(0, a=steps)
    d.goodbye("a")
    assert leases.trained(d.state) == [first.span]


@given(
    merged=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=8),
    granted=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40)), min_size=1),
    size=st.integers(1, 3),
)
def test_positions_come_back_whose_steps_are_in_no_merge(merged, granted, size) -> None:
    steps = join_spans(Span(start, start + count) for start, count in merged)
    d = Driver()
    d.hello("a", sequences_per_step=size)
    held, offset = list[leases.Lease](), 0
    for start, count in granted:
        held.append(leases.Lease(offset=offset, span=Span(start, start + count)))
        offset += count
    island = replace(d.state.islands["a"], leases=tuple(held))
    state = replace(d.state, in_merges={"a": steps}, free_spans=())
    state = leases.release(with_island(state, island), "a", steps)
    expected = {
        lease.span.start + index
        for lease in held
        for index in range(lease.span.stop - lease.span.start)
        if not any(a <= (lease.offset + index) // size < b for a, b in steps)
    }
    free = {p for span in state.free_spans for p in range(span.start, span.stop)}
    assert free == expected


def worked() -> Driver:
    """Two incarnations of a, one of b; merged, lost and open steps."""
    d = joined("a", "b", fragment_sizes=(7, 3), grace=1.0, overlap_steps=10)
    d.play("b=1 a=2 b/0=3 a/0=2 /0 a=5 a.2 a=0 a=4")
    return d


def test_totals_are_weighted_by_parameters_and_floored() -> None:
    d = worked()
    totals = ledger.island_totals(d.config, d.state, "a")
    assert totals.computed == 50 + 40
    assert totals.merged == 7 * 20 // 10
    assert totals.lost == {"died": (7 * 30 + 3 * 50) // 10}
    assert totals.in_flight == 90 - 14 - 36
    # It was in one merge of fragment 0, and b in that and in the next.
    assert (totals.merges_in, totals.merges_alive) == (1, 1)


def test_totals_say_in_how_many_merges_an_island_was_of_those_in_its_life() -> None:
    d = joined("a", "b")
    d.play("a=2 a/0=2 /0")
    counts = [(d.totals(n).merges_in, d.totals(n).merges_alive) for n in "ab"]
    assert counts == [(1, 1), (0, 1)]


def test_totals_of_the_run_are_those_of_its_islands() -> None:
    d = worked()
    assert min(d.totals(name).in_flight for name in "ab") >= 0
    run = ledger.run_totals(d.config, d.state)
    assert run.computed == 90 + 30
    assert run.merged == 14 + 7 * 30 // 10
    assert ledger.merged_by_fragment(d.state) == [20 + 30, 0]
    assert ledger.merged_by_fragment(d.state, "b") == [30, 0]


def test_progress_counts_what_is_computed_and_not_lost() -> None:
    d = worked()
    assert ledger.progress_tokens(d.config, d.state) == 120 - 36
    fragment = d.fragment(1)
    fragment = replace(fragment, lost_in_all=fragment.lost_in_all + 3)
    state = with_fragment(d.state, fragment)
    assert ledger.progress_tokens(d.config, state) == 120 - 36, "0.9 is none yet"


def test_progress_never_goes_back() -> None:
    d = joined("a", "b", fragment_sizes=(7, 3))
    d.report("a", 50)
    before = d.state.progress_tokens
    assert before == 500
    d.play("a.leaves b=1")
    assert ledger.progress_tokens(d.config, d.state) == 10
    assert d.state.progress_tokens == before


def test_check_finds_books_that_do_not_balance() -> None:
    d = worked()
    assert ledger.check(d.state) == []
    fragment = d.fragment(0)
    account = d.account("b", 0)
    for wrong in (
        replace(account, merged_tokens=account.merged_tokens + 1),
        replace(account, start=account.start + 1),
        account.lose(1, "nowhere"),
    ):
        state = with_fragment(d.state, with_account(fragment, "b", wrong))
        lines = ledger.check(state)
        assert lines
        assert all("fragment 0, island b" in line for line in lines)
    unsaid = replace(fragment, lost_in_all=fragment.lost_in_all + 1)
    (line,) = ledger.check(with_fragment(d.state, unsaid))
    assert "fragment 0: its accounts have lost" in line
    ahead = replace(account, start=9, merged_tokens=90)
    state = with_fragment(d.state, with_account(fragment, "b", ahead))
    assert "settled to step 9 of 3" in ledger.check(state)[0]
