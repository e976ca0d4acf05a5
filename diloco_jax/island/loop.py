"""The train loop: one page, and it never waits for the network.

At each step boundary: act on what came in, one batch of validation if it is due, then
the next step. Steps are dispatched ahead of the device by at most one: the metrics of a
step are read after the next one is dispatched, so the device always has work.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from diloco_jax.config import Config
from diloco_jax.data.stream import LeasedStream
from diloco_jax.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from diloco_jax.faults import Faults
from diloco_jax.island.checkpoints import Checkpoints
from diloco_jax.island.device.replica import Replica
from diloco_jax.island.evaluate import Evaluator
from diloco_jax.island.mailbox import Decisions, Mailbox
from diloco_jax.island.pace import Pace
from diloco_jax.island.timing import Timing
from diloco_jax.models.model import Metrics
from diloco_jax.observability.logs import log_refused
from diloco_jax.protocol.island.boundary import Boundary
from diloco_jax.protocol.island.decision import Decision, Ending
from diloco_jax.protocol.values import Version

logger = logging.getLogger(__name__)

DATA_POLL_S = 0.05
"""Longest wait for data in seconds before the loop looks at its mailbox again."""


@dataclasses.dataclass(kw_only=True)
class Loop:
    """Everything that one incarnation's training needs; `run` does it."""

    config: Config
    name: str
    replica: Replica
    boundary: Boundary
    data: LeasedStream
    mailbox: Mailbox
    decisions: Decisions
    pace: Pace
    timing: Timing
    evaluator: Evaluator
    send_anchor: Callable[[int, Version], None]
    """Sends a fragment's anchor at that version to a coordinator that lost its
    state."""
    checkpoints: Checkpoints | None = None
    faults: Faults = dataclasses.field(default_factory=Faults)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._deadlines = self.config.placement.deadlines
        self._step_seconds = self.config.island(self.name).step_seconds
        self._patience_s = self.config.placement.patience_s
        self._step = 0
        self._seen = Decision()
        """The last decision."""
        self._last_metrics: Metrics | None = None
        self._waiting: tuple[tuple[str, int], float] | None = None
        """Reason of the wait, answers seen when it began, and its start time."""

    def run(self) -> Ending:
        """Train until the run is over, or something ends this incarnation."""
        while True:
            stepping = self._at_boundary()
            if self._seen.ending is not None:
                if self._seen.ending.exit_code != EXIT_REFUSED:
                    self._save(final=True)
                return self._seen.ending
            if self._seen.finished:
                return Ending(EXIT_DONE, "the run is over", "finished")
            if not stepping:
                overdue = self._wait_for_end()
            elif not self.data.ready:
                overdue = self._wait_for_data()
            else:
                self._waiting = overdue = None
                self._validate()
                self._train_step(self.data.next_batch(self._patience_s))
            if overdue is not None:
                return overdue

    @property
    def ended_together(self) -> bool:
        """True if all hosts of the island ended at this boundary, which was decided."""
        return self._seen.finished or self._seen.ending is not None

    # ---- one step ---------------------------------------------------------------

    def _train_step(self, batch: Any) -> None:
        with self.timing.step():
            began = self.clock()
            rate = self.pace.learning_rate(self._step, self.boundary.others_tokens)
            self.timing.learning_rate = rate
            metrics = self.replica.step(batch, rate)
            # One step late: the device has the next one to do by now.
            self._read_metrics()
            self._last_metrics = metrics
            remaining = began + self._step_seconds - self.clock()
            if remaining > 0:
                self.sleep(remaining)
        self._step += 1
        self.faults.fire(self._step)

    def _read_metrics(self) -> None:
        if self._last_metrics is not None:
            self.timing.loss(float(self._last_metrics["loss"]))
            if self._last_metrics["skipped"]:
                self._tell_skipped(self.timing.skipped())
            self._last_metrics = None

    def _tell_skipped(self, count: int) -> None:
        """Warn of skipped steps, in ever longer intervals."""
        if count.bit_count() == 1:
            logger.warning(
                "%d of %d steps had a loss or gradient that is not finite: they "
                "changed nothing, and their tokens count as computed; lower "
                "inner.learning_rate, or look at the data",
                count,
                self._step,
            )

    def _validate(self) -> None:
        if not self.evaluator.due(self._step):
            return
        with self.timing.validation():
            loss = self.evaluator.advance(self.replica.params)
        if loss is not None:
            self.timing.eval_loss = loss

    # ---- a boundary -------------------------------------------------------------

    def _at_boundary(self) -> bool:
        """Act on what came in; return True if a step follows."""
        again = True
        while again:
            self._post()
            stepping = self.boundary.may_step(self._step)
            self._seen = self.decisions.at(self._step, stepping=stepping)
            log_refused(self.boundary.act(self._seen, self._step))
            for fragment in self._seen.anchors:
                self.send_anchor(fragment, self.boundary.books.version(fragment))
            if self._seen.save or self._seen.leaving:
                self._save(final=self._seen.leaving)
            again = self._seen.again
        self._post()
        return self.boundary.may_step(self._step)

    def _save(self, *, final: bool = False) -> None:
        if self.checkpoints is None:
            return
        self.checkpoints.save(
            self.replica.trees(),
            steps=self._step,
            versions=self.boundary.books.versions(),
            outstanding=self._in_doubt(),
            sequences=self.data.consumed,
            final=final,
        )

    def _in_doubt(self) -> list[int]:
        """Return fragments with a take that may be merged after this incarnation's
        end."""
        books = self.boundary.books
        if self._seen.leaving:
            return list(range(len(books.versions())))  # All are about to be taken.
        return [take.fragment for take in books.outstanding()]

    def _post(self) -> None:
        status = self.boundary.status(self._step, self.timing.measures())
        self.mailbox.post(status, self.boundary.books.drain())

    # ---- ends and waits ---------------------------------------------------------

    def _wait_for_data(self) -> Ending | None:
        self.decisions.wait(DATA_POLL_S)
        return self._overdue("no data was granted")

    def _wait_for_end(self) -> Ending | None:
        self._read_metrics()
        self.decisions.wait(self._deadlines.report_s)
        self.timing.restart()
        if self._seen.leaving:
            return None  # What made it leave ends it in time.
        waits = "the run did not finish" if self._seen.stop else "no end was announced"
        return self._overdue(waits, self._seen.heard)

    def _overdue(self, what: str, heard: int = 0) -> Ending | None:
        """End once it has waited longer than the patience. heard: the coordinator's
        answers, if they make the time begin anew: its last merges may take long."""
        now, waiting = self.clock(), (what, heard)
        if self._waiting is None or self._waiting[0] != waiting:
            self._waiting = waiting, now
        if now - self._waiting[1] < self._patience_s:
            return None
        return Ending(
            EXIT_FAILED,
            f"{what} for {self._patience_s:g} s at step {self._step}; is the "
            f"coordinator running? Start it again, then this island",
        )
