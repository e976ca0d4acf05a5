"""Time that counts as a step, as validation, and as neither."""

import math
import statistics

from diloco_jax.island.timing import LOSS_STEPS, MEDIAN_STEPS, Timing


def test_validation_is_neither_a_stall_nor_part_of_a_gap():
    now = 0.0
    timing = Timing(0.0, lambda: now)
    for _ in range(2):
        with timing.validation():
            now += 30.0
        now += 1.0
        with timing.step():
            now += 2.0
    measures = timing.measures()
    assert (measures.eval_seconds, measures.step_seconds_total) == (60.0, 4.0)
    assert measures.stalled_seconds == 2.0
    assert measures.max_step_gap_seconds == measures.median_step_seconds == 3.0


def test_a_boundary_during_a_step_is_no_stall():
    now = 0.0
    timing = Timing(0.0, lambda: now)
    for busy in (False, True, True):
        now += 1.0
        with timing.step(busy):
            now += 2.0
    measures = timing.measures()
    assert (measures.step_seconds_total, measures.stalled_seconds) == (8.0, 1.0)
    assert measures.median_step_seconds == 3.0


def test_the_median_is_that_of_the_last_gaps():
    now, gaps = 0.0, []
    timing = Timing(0.0, lambda: now)
    assert timing.measures().median_step_seconds == 0.0
    for number in range(MEDIAN_STEPS + 300):
        with timing.step():
            gap = float(number * 7919 % 613)
            now += gap
        gaps.append(gap)
        if number % 37 == 0:
            expected = statistics.median(gaps[-MEDIAN_STEPS:])
            assert timing.measures().median_step_seconds == expected


def test_a_sources_loss_is_over_its_own_last_steps():
    timing = Timing(0.0)
    assert timing.measures().losses_by_source == ()
    timing.by_source([(6.0, 2.0), (0.0, 0.0), (8.0, 4.0)])
    often, never, rare = timing.measures().losses_by_source
    assert (often, rare) == (3.0, 2.0)
    assert math.isnan(never)
    for _ in range(LOSS_STEPS):
        timing.by_source([(5.0, 1.0), (0.0, 0.0), (0.0, 0.0)])
    often, never, rare = timing.measures().losses_by_source
    assert (often, rare) == (5.0, 2.0)  # A source without rows keeps what it had.
    assert math.isnan(never)
    timing.by_source([(1.0, 8.0), (3.0, 1.0), (0.0, 0.0)])
    often, never, rare = timing.measures().losses_by_source
    assert often == (5.0 * (LOSS_STEPS - 1) + 1.0) / (LOSS_STEPS - 1 + 8.0)
    assert (never, rare) == (3.0, 2.0)


def test_an_adoption_is_told_by_the_losses_around_it():
    timing = Timing(0.0)
    timing.loss(3.0, adopted=True)  # Before it there was no step.
    assert math.isnan(timing.measures().adoption_loss)
    for loss, adopted in ((2.0, False), (2.5, True), (1.0, False), (1.25, True)):
        timing.loss(loss, adopted=adopted)
    assert timing.measures().adoption_loss == 0.375
    for number in range(LOSS_STEPS):
        timing.loss(float(number), adopted=True)
    assert timing.measures().adoption_loss == (7 - 1.25) / LOSS_STEPS


def test_a_step_without_a_loss_tells_nothing_of_the_adoption_before_it():
    timing = Timing(0.0)
    for loss in (2.0, math.nan, 1.0, 1.5):
        timing.loss(loss, adopted=True)
    assert timing.measures().adoption_loss == 0.5
