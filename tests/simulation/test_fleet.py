"""Islands with lives of their own under the real policy."""

import itertools

import pytest

from diloco_jax.observability import measures
from diloco_jax.simulation.fleets.failures import Segment, undisturbed
from diloco_jax.simulation.fleets.fleet import (
    TOKENS_PER_STEP,
    ExchangeTerms,
    VirtualFleet,
)

EXCHANGE = ExchangeTerms(
    cycle=4, fragments=4, params=1000, latency_seconds=0.01, merge_seconds=0.1
)
HOUR_S = 3600.0


def started(*lives, quorum: int = 1) -> VirtualFleet:
    fleet = VirtualFleet(EXCHANGE, EXCHANGE.sync(quorum, 0.8), 10.0)
    for i, life in enumerate(lives):
        fleet.join(f"island-{i}", 10.0, itertools.repeat(10.0), iter(life))
    fleet.begin()
    return fleet


def test_undisturbed_islands_merge_everything_they_compute():
    fleet = started(undisturbed(), undisturbed())
    fleet.run(HOUR_S)
    fleet.end()
    totals = fleet.totals
    assert totals.merged == totals.computed > 2 * 359 * TOKENS_PER_STEP
    assert measures.goodput(fleet.measures()) == pytest.approx(1.0)
    assert measures.uptime(fleet.measures(), fleet.seconds) == pytest.approx(1.0)
    assert fleet.participation() == 1.0
    # A tick a step.
    assert 355 <= fleet.merges <= 360


def test_of_the_flush_only_tokens_count():
    fleet = VirtualFleet(EXCHANGE, EXCHANGE.sync(1, 0.0), 10.0)
    for name, seconds in (("fast", 10.0), ("slow", 16.0)):
        fleet.join(name, seconds, itertools.repeat(seconds), undisturbed())
    fleet.begin()
    fleet.run(HOUR_S)
    assert fleet.totals.in_flight > 0
    before = (fleet.merges, fleet.participation())
    fleet.end()
    assert fleet.totals.in_flight == 0
    assert (fleet.merges, fleet.participation()) == before


def test_time_counts_from_the_first_step_on():
    fleet = started(undisturbed())
    fleet.run(HOUR_S)
    fleet.end()
    assert fleet.seconds == pytest.approx(HOUR_S)
    (island,) = fleet.measures()
    # The step that was under way counts, and so does its time.
    assert island.provisioned_seconds == pytest.approx(HOUR_S + 10)
    assert island.computed_tokens == 361 * TOKENS_PER_STEP


def test_a_stop_is_a_long_step_of_the_same_incarnation():
    stop = [Segment(0, 600, 1), Segment(600, 1200, 0), Segment(1200, 1e9, 1)]
    fleet = started(stop, undisturbed())
    fleet.run(HOUR_S)
    fleet.end()
    stopped, other = fleet.measures()
    assert other.computed_tokens - stopped.computed_tokens == 60 * TOKENS_PER_STEP
    assert stopped.merged_tokens == stopped.computed_tokens
    assert len(stopped.active) == 2
    assert fleet.totals.lost == {}


def test_missing_slices_slow_an_island_down_by_their_share():
    half = [Segment(0, 1e9, 0.5)]
    fleet = started(half, undisturbed())
    fleet.run(HOUR_S)
    fleet.end()
    slow, other = fleet.measures()
    assert slow.computed_tokens == 181 * TOKENS_PER_STEP
    assert other.computed_tokens == 361 * TOKENS_PER_STEP
    assert measures.compute_goodput([slow]) == pytest.approx(0.5)


def test_an_island_that_is_lost_loses_what_is_not_merged_and_comes_back():
    lost = [Segment(0, 605, 1), Segment(605, 1200, 0, True), Segment(1200, 1e9, 1)]
    fleet = started(lost, undisturbed())
    fleet.run(HOUR_S)
    fleet.end()
    victim, other = fleet.measures()
    # A join later than the start takes its seconds; the step under way is gone.
    away = 1200 + EXCHANGE.join_seconds - 605
    expected = other.computed_tokens - (away + 5) / 10 * TOKENS_PER_STEP
    assert victim.computed_tokens == pytest.approx(expected, abs=2 * TOKENS_PER_STEP)
    died = fleet.totals.lost["died"]
    # About a cycle: the last deltas were merged, or under way and dropped.
    assert 0 < died <= 2 * EXCHANGE.cycle * TOKENS_PER_STEP
    assert victim.merged_tokens == victim.computed_tokens - died


def test_an_island_that_leaves_is_provisioned_until_then():
    fleet = started(undisturbed(), undisturbed())
    fleet.run(HOUR_S / 2)
    fleet.leave("island-1")
    fleet.run(HOUR_S / 2)
    stayed, left = fleet.measures()
    assert left.provisioned_seconds == pytest.approx(HOUR_S / 2)
    assert stayed.provisioned_seconds == pytest.approx(HOUR_S)


def test_a_run_with_a_token_budget_ends_by_itself():
    fleet = VirtualFleet(
        EXCHANGE, EXCHANGE.sync(1, 0.8), 10.0, total_tokens=100 * TOKENS_PER_STEP
    )
    fleet.join("a", 10.0, itertools.repeat(10.0), undisturbed())
    fleet.begin()
    fleet.run_to(50 * TOKENS_PER_STEP)
    assert fleet.seconds == pytest.approx(500, abs=11)
    fleet.run_to(float("inf"))
    assert fleet.totals.merged == 100 * TOKENS_PER_STEP
    assert fleet.seconds == pytest.approx(1000, abs=11)


def test_progress_is_told_up_to_the_end():
    shares = []
    fleet = started(undisturbed())
    fleet.run(HOUR_S, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
