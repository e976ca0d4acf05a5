"""The train loop: one page, and it never waits for the network.

At each step boundary: act on what came in (`stepping.py`), one batch of validation if
it is due, then the next step. Steps are dispatched ahead of the device by at most one:
the metrics of a step are read after the next one is dispatched, so the device always
has work.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from diloco_jax.data.batches import LeasedStream
from diloco_jax.faults import Faults
from diloco_jax.island.device.replica import Replica
from diloco_jax.island.evaluate import Evaluator, Watcher
from diloco_jax.island.stepping import Stepping
from diloco_jax.models.model import Metrics
from diloco_jax.protocol.island.boundary import Ending

logger = logging.getLogger(__name__)

LASTS_S = 600.0
"""Seconds from an incarnation's first step after which a crash is not of a loop."""


@dataclasses.dataclass(kw_only=True)
class Loop(Stepping):
    """Everything that one incarnation's training needs; `run` does it."""

    replica: Replica
    data: LeasedStream
    evaluator: Evaluator
    watcher: Watcher | None = None
    """None: the island takes no turns at the merged model."""
    faults: Faults = dataclasses.field(default_factory=Faults)
    sleep: Callable[[float], None] = time.sleep
    lasts: Callable[[], None] = lambda: None
    """Called once, when steps have been made for LASTS_S."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._step_seconds = self.config.island(self.name).step_seconds
        self._last_metrics: Metrics | None = None
        self._lasts_at = math.inf

    def run(self) -> Ending:
        """Train until the run is over, or something ends this incarnation."""
        while (ending := self.until_step()) is None:
            self._validate()
            self._train_step(self.data.next_batch(self.patience_s))
        return ending

    # ---- one step ---------------------------------------------------------------

    def _train_step(self, batch: Any) -> None:
        last = self._last_metrics
        busy = last is not None and not last["loss"].is_ready()  # type: ignore[attr-defined]
        traced = jax.profiler.StepTraceAnnotation("train", step_num=self.done)
        with self.timing.step(busy), traced:
            began = self.clock()
            metrics = self.replica.step(batch, self.learning_rate())
            # One step late: the device has the next one to do by now.
            self._read_metrics()
            self._last_metrics = metrics
            remaining = began + self._step_seconds - self.clock()
            if remaining > 0:
                self.sleep(remaining)
        self.done += 1
        if self.done == 1:
            self._lasts_at = self.clock() + LASTS_S
        elif self.clock() >= self._lasts_at:
            self._lasts_at = math.inf
            self.lasts()
        self.faults.fire(self.done)
        if (factor := self.faults.factor(self.done)) is not None:
            self.replica.spoil(factor)

    def _read_metrics(self) -> None:
        if self._last_metrics is not None:
            metrics = {name: np.asarray(v) for name, v in self._last_metrics.items()}
            self.timing.loss(float(metrics["loss"]), float(metrics["tokens"]))
            if metrics["skipped"]:
                self._tell_skipped(self.timing.skipped())
            elif "by_source" in metrics:
                self.timing.by_source(metrics["by_source"].tolist())
            self._last_metrics = None

    def _tell_skipped(self, count: int) -> None:
        """Warn of skipped steps, in ever longer intervals."""
        if count.bit_count() == 1:
            logger.warning(
                "%d of %d steps had a loss or gradient that is not finite: they "
                "changed nothing, and their tokens count as computed; lower "
                "inner.learning_rate, or look at the data",
                count,
                self.done,
            )

    def _validate(self) -> None:
        if self.watcher is not None:
            self.watcher.advance(self.timing)
        if not self.evaluator.due(self.done):
            return
        with self.timing.validation():
            loss = self.evaluator.advance(self.replica.params)
        if loss is not None:
            self.timing.eval_loss = loss
