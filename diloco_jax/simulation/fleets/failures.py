"""Chip time that an island loses by interruptions, reconfigurations and returns.

An island is made of equal slices. Interruptions are Poisson, at the rate of its working
chips over the mean time between interruptions (MTBI) of one chip; stopped chips are not
interrupted. An interruption stops the island for `down_seconds`; it goes on with one
slice less. The slice is back `return_seconds` after the interruption. The next stop
that ends after this moment takes it in, or else a stop of `up_seconds` for that alone.
A step that a stop interrupts goes on after it: the work that a real island repeats is
part of the stop. An island that loses its last slice has nothing left to reconfigure:
it is lost, and comes back with the slice.

There is one event per stop, so a day of a million chips is some thousand events.

The baseline of decoupling is one data-parallel program on all chips (`elastic`,
`rigid`). No protocol decides anything there, so both are closed loops over
interruptions.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from diloco_jax.config.fields import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    SECONDS,
    check_bounds,
    setting,
)
from diloco_jax.observability.measures import IslandMeasure

SECONDS_PER_YEAR = 365.25 * 24 * 3600
TOUCHING_S = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Rates and times of failures.

    The defaults are calibrated: they give the published goodput, as
    docs/results/goodput.md shows.
    """

    mtbi_years: float = setting(
        1.0,
        NOT_NEGATIVE,
        help="Mean years between interruptions of one chip; 0 = they never come.",
    )
    slice_chips: int = setting(
        4096,
        AT_LEAST_1,
        help="Chips that go away together. An island has the nearest whole number of "
        "slices.",
    )
    down_seconds: float = setting(
        12.0,
        SECONDS,
        help="Seconds for which an island stops when it loses a slice.",
    )
    up_seconds: float = setting(
        12.0,
        SECONDS,
        help="Seconds for which an island stops to take slices in again.",
    )
    return_seconds: float = setting(
        120.0,
        SECONDS,
        help="Seconds from an interruption until its slice can be taken in again.",
    )
    restart_seconds: float = setting(
        85.0,
        SECONDS,
        help="Seconds for which everything stops without elasticity.",
    )

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)

    @property
    def interruptions_per_chip_second(self) -> float:
        """Interruptions per second of one working chip."""
        if not self.mtbi_years:
            return 0.0
        return 1 / (self.mtbi_years * SECONDS_PER_YEAR)

    def slices(self, chips: float) -> int:
        """Return the number of slices of an island with `chips` chips."""
        return max(1, round(chips / self.slice_chips))


class Segment(NamedTuple):
    """Interval in which `share` of an island's chips work. lost: no chip is left."""

    start: float
    stop: float
    share: float
    lost: bool = False


def segments(
    chips: float, model: FailureModel, rng: np.random.Generator
) -> Iterator[Segment]:
    """Yield the life of an island from second 0 on, without gaps and without end.

    If nothing interrupts the island any more, its last segment ends at infinity.
    """
    slices = model.slices(chips)
    rate = model.interruptions_per_chip_second * chips / slices
    working, now = slices, 0.0
    returns: collections.deque[float] = collections.deque()
    while True:
        fails = back = math.inf
        if working and rate:
            # The process is memoryless, so a return in between may draw the failure
            # anew.
            fails = now + rng.exponential(1 / (rate * working))
        if returns:
            back = returns[0]
        if (event := min(fails, back)) > now:
            yield Segment(now, event, working / slices, lost=not working)
        if event == math.inf:
            return
        if fails < back:
            working -= 1
            returns.append(fails + model.return_seconds)
            now = event + model.down_seconds
        else:
            # A slice may be back at the moment when a stop ends.
            now = max(event, now) + model.up_seconds
        if now > event:
            yield Segment(event, now, 0.0, lost=not working)
        while returns and returns[0] <= now:
            returns.popleft()
            working += 1


def undisturbed() -> Iterator[Segment]:
    """Yield the life of an island that is never interrupted."""
    yield Segment(0.0, math.inf, 1.0)


class Capacity:
    """Chip time of an island, used up step by step, forward in time."""

    def __init__(self, life: Iterator[Segment]) -> None:
        self._life = life
        self._segment = next(life)
        self.active: list[tuple[float, float]] = []
        """Intervals in which steps ran, in order, joined where they touch."""

    def use(self, start: float, work_seconds: float) -> tuple[float, bool]:
        """Make a step that takes `work_seconds` on all chips, from `start` on.

        Returns the time of its end and True, or the time at which the island is lost
        and False.
        """
        now = start
        while not (segment := self._at(now)).lost:
            if segment.share:
                done = now + work_seconds / segment.share
                self._note(now, min(done, segment.stop))
                if done <= segment.stop:
                    return done, True
                work_seconds -= (segment.stop - now) * segment.share
            now = segment.stop
        return now, False

    def back_at(self, time: float) -> float:
        """Return the first moment from `time` on at which chips work."""
        while not (segment := self._at(time)).share:
            time = segment.stop
        return time

    def _at(self, time: float) -> Segment:
        while time >= self._segment.stop:
            self._segment = next(self._life)
        return self._segment

    def _note(self, start: float, stop: float) -> None:
        # A clock's sums of seconds are not exact.
        if self.active and start - self.active[-1][1] < TOUCHING_S:
            start = self.active.pop()[0]
        self.active.append((start, stop))


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
