"""The variation of step times, and the cost of waiting for the slowest."""

import itertools
import tracemalloc

import numpy as np
import pytest

from diloco_jax.simulation.virtual.steps import (
    DRAWN_AT_ONCE,
    LOCKSTEP_STEPS,
    drawn,
    durations,
    lockstep_share,
)


def test_steps_without_spread_take_what_they_usually_take():
    steps = durations(10.0, 0.0, np.random.default_rng(0))
    assert set(itertools.islice(steps, 2 * DRAWN_AT_ONCE)) == {10.0}


def test_mean_and_spread_are_those_asked_for():
    seconds = drawn(10.0, 0.1, 100_000, np.random.default_rng(0))
    assert seconds.mean() == pytest.approx(10.0, rel=0.002)
    assert seconds.std() == pytest.approx(1.0, rel=0.02)
    assert seconds.min() > 0


def test_in_lockstep_the_fast_wait_for_the_slow():
    rng = np.random.default_rng(0)
    assert lockstep_share([1.0, 1.0], 0.0, rng) == pytest.approx(1.0)
    assert lockstep_share([1.0, 2.0], 0.0, rng) == pytest.approx(0.75)


def test_the_published_mix_computes_84_percent_of_the_time_in_lockstep():
    rng = np.random.default_rng(0)
    share = lockstep_share([1.0] * 4 + [1.18] * 4, 0.10, rng)
    assert share == pytest.approx(0.84, abs=0.01)


def test_lockstep_of_many_islands_holds_few_arrays():
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        lockstep_share([1.0] * 100, 0.1, rng)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * LOCKSTEP_STEPS * 8
