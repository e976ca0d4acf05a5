"""The books: what the totals are, and that errors in them are found."""

from kit import Driver, joined
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.state import (
    with_account,
    with_fragment,
)


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


def test_totals_balance_exactly() -> None:
    d = worked()
    for totals in (
        ledger.run_totals(d.config, d.state),
        ledger.island_totals(d.config, d.state, "a"),
        ledger.island_totals(d.config, d.state, "b"),
    ):
        settled = totals.merged + sum(totals.lost.values())
        assert totals.computed == settled + totals.in_flight
        assert totals.in_flight >= 0
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
