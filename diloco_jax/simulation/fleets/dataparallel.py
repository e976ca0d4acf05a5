"""Baseline of decoupling: one data-parallel program on all chips.

No protocol decides anything here, so both methods are closed loops over interruptions.
"""

from __future__ import annotations

import math

import numpy as np

from diloco_jax.observability.measures import IslandMeasure
from diloco_jax.simulation.fleets.failures import FailureModel, segments


def elastic(
    chips: float,
    step_seconds: float,
    model: FailureModel,
    seconds: float,
    rng: np.random.Generator,
    *,
    computing: float = 1.0,
) -> IslandMeasure:
    """Measure one island of all chips that goes on with the slices that are left.

    computing: share of the time of its steps in which a chip computes; it waits for the
    rest (`steps.lockstep_share`).
    """
    worked, active = 0.0, []
    for segment in segments(chips, model, rng):
        if segment.start >= seconds:
            break
        if segment.share:
            stop = min(segment.stop, seconds)
            worked += (stop - segment.start) * segment.share
            active.append((segment.start, stop))
    return _measure(worked * computing, step_seconds, seconds, active)


def rigid(
    chips: float,
    step_seconds: float,
    model: FailureModel,
    seconds: float,
    rng: np.random.Generator,
    *,
    computing: float = 1.0,
) -> IslandMeasure:
    """Measure an island that stops as a whole after a step with interruptions.

    It stops once for `restart_seconds`, however many interruptions the step had. The
    interrupted step counts as made.
    computing: as for `elastic`.
    """
    step = step_seconds / computing
    interrupted = -math.expm1(-chips * model.interruptions_per_chip_second * step)
    now, steps = 0.0, 0
    active: list[tuple[float, float]] = []
    while now < seconds:
        run = int(rng.geometric(interrupted)) if interrupted else math.inf
        active.append((now, min(now + run * step, seconds)))
        # The step in which the time runs out is never finished.
        steps += int(min(run, (seconds - now) // step))
        now += run * step + model.restart_seconds
    return _measure(steps * step_seconds, step_seconds, seconds, active)


def _measure(
    worked_seconds: float,
    step_seconds: float,
    seconds: float,
    active: list[tuple[float, float]],
) -> IslandMeasure:
    """Measure with one token per step: only shares matter, and every step is merged."""
    steps = round(worked_seconds / step_seconds)
    return IslandMeasure(
        provisioned_seconds=seconds,
        tokens_per_step=1,
        median_step_seconds=step_seconds,
        computed_tokens=steps,
        merged_tokens=steps,
        active=tuple(active),
    )
