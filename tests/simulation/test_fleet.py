"""Islands with lives of their own under the real policy."""

import math

import pytest

from diloco_jax.observability import measures
from diloco_jax.simulation.fleet import (
    TOKENS_PER_STEP,
    ExchangeTerms,
    FleetIsland,
    FleetOutcome,
    Segment,
    run_fleet,
)

EXCHANGE = ExchangeTerms(
    cycle=4, fragments=4, params=1000, latency_seconds=0.01, merge_seconds=0.1
)
HOUR_S = 3600.0
UNDISTURBED = [Segment(0.0, math.inf, 1.0)]


def run(*lives, seconds=(10.0, 10.0), grace=0.8, progress=lambda share: None):
    machines = {
        f"island-{i}": FleetIsland(each, iter(life))
        for i, (life, each) in enumerate(zip(lives, seconds, strict=False))
    }
    sync = EXCHANGE.sync(1, grace)
    return run_fleet(EXCHANGE, sync, 10.0, machines, HOUR_S, progress)


def steps(fleet: FleetOutcome) -> list[float]:
    return [i.computed_tokens / TOKENS_PER_STEP for i in fleet.islands.values()]


def test_undisturbed_islands_merge_everything_they_compute():
    shares = []
    fleet = run(UNDISTURBED, UNDISTURBED, progress=shares.append)
    islands = list(fleet.islands.values())
    assert fleet.totals.merged == fleet.totals.computed > 2 * 359 * TOKENS_PER_STEP
    assert measures.goodput(islands) == pytest.approx(1.0)
    assert measures.uptime(islands, fleet.seconds) == pytest.approx(1.0)
    assert fleet.participation == 1.0
    # A tick a step.
    assert 355 <= fleet.merges <= 360
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_of_the_flush_only_tokens_count():
    """The time counts from the first step on, up to the end of what is under way."""
    fleet = run(UNDISTURBED, UNDISTURBED, seconds=(10.0, 16.0), grace=0.0)
    assert fleet.totals.in_flight == 0
    assert fleet.seconds == pytest.approx(HOUR_S)
    assert fleet.merges <= 360
    first, _ = fleet.islands.values()
    assert first.provisioned_seconds == pytest.approx(HOUR_S + 10)
    assert first.computed_tokens == 361 * TOKENS_PER_STEP


def test_a_stop_is_a_long_step_of_the_same_incarnation():
    stop = [Segment(0, 600, 1), Segment(600, 1200, 0), Segment(1200, 1e9, 1)]
    fleet = run(stop, UNDISTURBED)
    stopped, _ = fleet.islands.values()
    assert steps(fleet) == [301, 361]
    assert stopped.merged_tokens == stopped.computed_tokens
    assert len(stopped.active) == 2
    assert fleet.totals.lost == {}


def test_an_island_that_is_lost_loses_what_is_not_merged_and_comes_back():
    lost = [Segment(0, 605, 1), Segment(605, 1200, 0, True), Segment(1200, 1e9, 1)]
    fleet = run(lost, UNDISTURBED)
    victim, _ = fleet.islands.values()
    # A join later than the start takes its seconds; the step under way is gone.
    away = 1200 + EXCHANGE.join_seconds - 605
    assert steps(fleet)[0] == pytest.approx(361 - (away + 5) / 10, abs=2)
    died = fleet.totals.lost["died"]
    # About a cycle: the last deltas were merged, or under way and dropped.
    assert 0 < died <= 2 * EXCHANGE.cycle * TOKENS_PER_STEP
    assert victim.merged_tokens == victim.computed_tokens - died
