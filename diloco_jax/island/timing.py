"""The learning rate of an incarnation's steps, and where their time goes.

The rate follows the run's progress: (the others' tokens that are not lost + own ones) /
total_tokens. Clocks are read, nothing is waited for.

A *gap* is the time from one completed step's boundary to the next one's, validation
apart. *Stalled* is the part of a gap that is neither the step (with its emulated delay)
nor validation: decisions, dispatch of takes and adoptions, waiting for data. Where the
device is not yet done with the step before when the next one is dispatched, all of the
gap is step.
"""

from __future__ import annotations

import bisect
import collections
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from diloco_jax.config import RunConfig
from diloco_jax.core.inner import learning_rate
from diloco_jax.protocol.island.boundary import Goal
from diloco_jax.protocol.messages import Measures

MEDIAN_STEPS = 512
LOSS_STEPS = 8


def goal_of(run: RunConfig, batch_size: int) -> Goal:
    """Return the goal of an island with this batch size."""
    return Goal(
        total_tokens=run.total_tokens,
        tokens_per_step=batch_size * run.sequence_length,
        steps_per_cycle=run.sync.cycle,
    )


class Pace:
    """Learning rates of one incarnation, which follow the run's progress."""

    def __init__(self, run: RunConfig, goal: Goal, *, warm: bool = False) -> None:
        """warm: the incarnation does not begin with fresh moments."""
        self._rewarm_steps = 0 if warm else run.inner.rewarm_steps
        self._inner, self._goal = run.inner, goal
        self._progress = 0.0

    def learning_rate(self, step: int, others_tokens: int) -> float:
        """Return the rate of `step`, counted from 0. Call it once for every step, in
        order."""
        done = self._goal.share_done(step, others_tokens)
        # Monotone, though tokens may be lost elsewhere.
        self._progress = max(self._progress, done)
        rewarm = (step + 1) / self._rewarm_steps if self._rewarm_steps else 1.0
        return learning_rate(self._inner, self._progress, rewarm)


class Timing:
    """Measures of one train loop; `clock` in seconds, monotonic."""

    def __init__(
        self, compile_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._compile_seconds = compile_seconds
        self._boundary = clock()
        self._evaluated_in_gap = 0.0
        self._gaps: collections.deque[float] = collections.deque()
        self._sorted: list[float] = []
        """The gaps, sorted: every boundary asks for their median."""
        self._losses: collections.deque[float] = collections.deque(maxlen=LOSS_STEPS)
        self._max_gap = self._stalled = self._evaluated = self._stepped = 0.0
        self._read = 0.0
        self._by_source: list[collections.deque[tuple[float, float]]] = []
        """Sums of losses and of weights of each source's last steps."""
        self._at_adoptions: collections.deque[float] = collections.deque(
            maxlen=LOSS_STEPS
        )
        self._predicted = 0.0
        self._steps = self._skipped = 0
        self._first_unix = self._last_unix = 0.0
        self.eval_loss = float("nan")
        self.watched = (0, float("nan"))
        """Newest cycle whose merged model was evaluated, and its loss."""
        self.learning_rate = 0.0

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Measure one batch of validation."""
        began = self._clock()
        yield
        seconds = self._clock() - began
        self._evaluated_in_gap += seconds
        self._evaluated += seconds

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Measure the wait for a batch, which is part of its gap."""
        began = self._clock()
        yield
        self._read += self._clock() - began

    @contextmanager
    def step(self, busy: bool = False) -> Iterator[None]:
        """Measure a step with its emulated delay; the end of the block is a boundary.

        busy: the device had not finished the step before when this one was dispatched.
        """
        began = self._clock()
        self._first_unix = self._first_unix or time.time()
        yield
        now = self._clock()
        gap = now - self._boundary - self._evaluated_in_gap
        stepped = gap if busy else now - began
        self._stepped += stepped
        self._stalled += gap - stepped
        self._max_gap = max(self._max_gap, gap)
        self._gaps.append(gap)
        bisect.insort(self._sorted, gap)
        if len(self._gaps) > MEDIAN_STEPS:
            oldest = self._gaps.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
        self._boundary, self._evaluated_in_gap = now, 0.0
        self._steps += 1
        self._last_unix = time.time()

    def restart(self) -> None:
        """Begin a new gap at a boundary that no step precedes, such as a wait for the
        run's end.
        """
        self._boundary, self._evaluated_in_gap = self._clock(), 0.0

    def loss(
        self, value: float, predicted: float = 0.0, *, adopted: bool = False
    ) -> None:
        """Note the training loss of a step, in nats per token, and the sum of the
        weights of its predictions, 0 if it is not known. adopted: a fragment was
        adopted since the step before."""
        if adopted and self._losses:
            change = value - self._losses[-1]
            if math.isfinite(change):  # A step that was skipped has no loss.
                self._at_adoptions.append(change)
        self._losses.append(value)
        self._predicted += predicted

    def by_source(self, sums: Sequence[tuple[float, float]]) -> None:
        """Note the sums of losses and of weights of each source's rows in a step."""
        if not self._by_source:
            self._by_source = [collections.deque(maxlen=LOSS_STEPS) for _ in sums]
        for number, (loss, weight) in enumerate(sums):
            if weight > 0:
                self._by_source[number].append((loss, weight))

    def skipped(self) -> int:
        """Note a step that changed nothing; return how many have by now."""
        self._skipped += 1
        return self._skipped

    def measures(self) -> Measures:
        """Return the measures so far."""
        return Measures(
            steps=self._steps,
            skipped_steps=self._skipped,
            tokens_predicted=round(self._predicted),
            median_step_seconds=self._median(),
            max_step_gap_seconds=self._max_gap,
            step_seconds_total=self._stepped,
            stalled_seconds=self._stalled,
            data_seconds=self._read,
            eval_seconds=self._evaluated,
            compile_seconds=self._compile_seconds,
            loss=_mean_of(self._losses),
            losses_by_source=tuple(map(mean, self._by_source)),
            adoption_loss=_mean_of(self._at_adoptions),
            eval_loss=self.eval_loss,
            watched_cycle=self.watched[0],
            watched_loss=self.watched[1],
            learning_rate=self.learning_rate,
            first_step_unix=self._first_unix,
            last_step_unix=self._last_unix,
        )

    def _median(self) -> float:
        return statistics.median(self._sorted) if self._sorted else 0.0


def _mean_of(values: Collection[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def mean(sums: Collection[tuple[float, float]]) -> float:
    """Return the mean over sums of losses and of weights; NaN if there are none."""
    totals, weights = math.fsum(s for s, _ in sums), math.fsum(w for _, w in sums)
    return totals / weights if weights else math.nan
