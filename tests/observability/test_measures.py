"""The measures of a run, on numbers that can be checked by hand."""

import pytest

from diloco_jax.observability.measures import (
    IslandMeasure,
    compute_goodput,
    goodput,
    participation,
    uptime,
)


def island(**fields):
    defaults = {
        "provisioned_seconds": 100.0,
        "tokens_per_step": 1000,
        "median_step_seconds": 0.5,
        "computed_tokens": 200_000,
        "merged_tokens": 200_000,
    }
    return IslandMeasure(**{**defaults, **fields})


def test_an_island_that_never_stopped_and_lost_nothing_has_goodput_one():
    assert goodput([island()]) == pytest.approx(1.0)


def test_goodput_counts_merged_and_compute_goodput_computed_tokens():
    half = island(merged_tokens=50_000, computed_tokens=100_000)
    assert goodput([half]) == pytest.approx(0.25)
    assert compute_goodput([half]) == pytest.approx(0.5)


def test_islands_count_by_what_they_could_have_done():
    fast = island(tokens_per_step=3000, computed_tokens=0, merged_tokens=0)
    assert goodput([island(), fast]) == pytest.approx(0.25)


def test_an_island_without_steps_neither_helps_nor_hurts():
    idle = island(median_step_seconds=0.0, computed_tokens=0, merged_tokens=0)
    assert goodput([island(), idle]) == pytest.approx(1.0)
    assert goodput([idle]) == 0.0


def test_uptime_counts_overlaps_once_and_gaps_not():
    a = island(active=((0.0, 10.0), (40.0, 50.0)))
    b = island(active=((2.0, 4.0), (5.0, 20.0)))
    assert uptime([a, b], wall_seconds=100.0) == pytest.approx(0.3)


def test_participation_is_a_share_and_zero_of_none():
    assert participation(3, 4) == 0.75
    assert participation(0, 0) == 0.0
