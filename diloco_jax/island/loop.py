"""The train loop: one page, and it never waits for the network.

At each step boundary: act on what came in (`Stepping`), one batch of validation if it
is due, then the next step. Steps are dispatched ahead of the device by at most one: the
metrics of a step are read after the next one is dispatched, so the device always has
work.

`Stepping` is the time between two steps, whoever makes them: `Loop` makes the product's
own, `joined.py` leaves them to a train loop of the user's. Both ask `until_step` before
each one, which never waits for the network while there is data.

Validation goes batch by batch between steps, or over the whole text at once.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from diloco_jax.config import Config
from diloco_jax.data.reader import LeasedStream, ValidationBatches
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from diloco_jax.faults import Faults
from diloco_jax.island.checkpoints import Checkpoints
from diloco_jax.island.device.exchange import Replica, WatchedModel
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.mailbox import Decisions, Mailbox, log_refused
from diloco_jax.island.timing import Pace, Timing, mean
from diloco_jax.models.model import Metrics, Params
from diloco_jax.protocol.island.boundary import Boundary, Decision, Ending, Watching
from diloco_jax.protocol.messages import AnchorRequest, Version

logger = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """Losses of a validation, `loss` in nats per token.

    `bits_per_byte` is None if the bytes of text per token are not known.
    """

    loss: float
    bits_per_byte: float | None
    by_source: Mapping[str, float] | None = None
    """Losses of its parts: of the sources of a mixture."""


class Evaluator:
    """Run passes over part of the validation text, one batch per step boundary.

    The parameters move on during a pass; the mean is over all of its batches.
    """

    def __init__(
        self,
        trainer: Trainer,
        validation: ValidationBatches,
        every_steps: int,
        batches: int,
    ):
        """every_steps: steps between two passes, 0 = none. batches: batches of one
        pass, spread evenly over the text, the same in every pass."""
        self._trainer = trainer
        self._validation = validation
        self._every_steps = every_steps
        self._batches = validation.spread(batches)
        self._done: list[tuple[float, float]] = []

    def due(self, step: int) -> bool:
        """Tell if `advance` is to be called after `step` steps."""
        if self._every_steps < 1 or not self._batches:
            return False
        return bool(self._done) or (step > 0 and step % self._every_steps == 0)

    def advance(self, params: Params) -> float | None:
        """Evaluate one batch and wait for it, so that its time is not taken for a
        step's. Return the mean loss of a pass in nats per token after its last
        batch."""
        batch = self._validation[self._batches[len(self._done)]]
        total, weight = self._trainer.eval_step(params, batch)
        self._done.append((float(total), float(weight)))
        if len(self._done) < len(self._batches):
            return None
        sums, self._done = self._done, []
        return mean(sums)


class Watcher(NamedTuple):
    """Evaluates the copied anchors of a cycle, one batch per step boundary."""

    watching: Watching
    model: WatchedModel
    evaluator: Evaluator

    def advance(self, timing: Timing) -> None:
        """Evaluate one batch if all anchors are copied; after the last one, note the
        cycle's loss in the measures."""
        if not self.watching.evaluates:
            return
        with timing.validation():
            loss = self.evaluator.advance(self.model.params)
        if loss is not None:
            timing.watched = self.watching.cycle, loss
            self.watching.evaluated()


def evaluate_all(
    trainer: Trainer,
    params: Params,
    parts: Mapping[str, ValidationBatches],
    report: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Return the loss over all parts of the validation text, each token predicted once,
    and that of each part.

    report: called with the share that is done, after each batch.
    """
    sums: dict[str, list[tuple[float, float]]] = {}
    for number, (name, part) in enumerate(parts.items()):
        found = sums[name] = []
        for index in range(len(part)):
            total, weight = trainer.eval_step(params, part[index])
            found.append((float(total), float(weight)))
            report((number + len(found) / len(part)) / len(parts))
    (per_token,) = {part.bytes_per_token for part in parts.values()}
    loss = mean([pair for found in sums.values() for pair in found])
    per_byte = loss / math.log(2) / per_token if per_token else None
    return Evaluation(loss, per_byte, {name: mean(s) for name, s in sums.items()})


DATA_POLL_S = 0.05
"""Longest wait for data in seconds before the mailbox is looked at again."""
LASTS_S = 600.0
"""Seconds from an incarnation's first step after which a crash is not of a loop."""


class Leased(Protocol):
    """Leased data, as far as the time of a step depends on it."""

    @property
    def ready(self) -> bool:
        """True if the leases fill another batch."""


@dataclasses.dataclass(kw_only=True)
class Stepping:
    """One incarnation's boundaries. Steps are counted in `done`."""

    config: Config
    name: str
    boundary: Boundary
    data: Leased
    mailbox: Mailbox
    decisions: Decisions
    pace: Pace
    timing: Timing
    send_anchor: Callable[[AnchorRequest, Version], None]
    """Sends a fragment's anchor, which has that version, to who asks for it."""
    patience_s: float
    """Longest wait for data, and for an end that was announced."""
    touch: Callable[[], None] = lambda: None
    """Called at every boundary: the loop goes on."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._deadlines = self.config.placement.deadlines
        self.done = 0
        """Steps made so far."""
        self._seen = Decision()
        """The last decision."""
        self._waiting: tuple[tuple[str, int], float] | None = None
        """Reason of the wait, answers seen when it began, and its start time."""

    def until_step(self) -> Ending | None:
        """Pass boundaries until the next step may be made; then return None.

        Return an Ending instead if the incarnation ends.
        """
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
                self._waiting = None
                return None
            if overdue is not None:
                return overdue

    def learning_rate(self) -> float:
        """Return the rate of the next step; call it once for each."""
        rate = self.pace.learning_rate(self.done, self.boundary.others_tokens)
        self.boundary.books.stepped(rate)
        self.timing.learning_rate = rate
        return rate

    @property
    def ended_together(self) -> bool:
        """True if all hosts of the island ended at this boundary, which was decided."""
        return self._seen.finished or self._seen.ending is not None

    def _read_metrics(self) -> None:
        """Read what is left of the last step, before a wait without steps."""

    def _save(self, *, final: bool = False) -> None:
        """Write a checkpoint. final: the incarnation ends with it."""

    # ---- a boundary -------------------------------------------------------------

    def _at_boundary(self) -> bool:
        """Act on what came in; return True if a step follows."""
        again = True
        while again:
            self.touch()
            self._post()
            stepping = self.boundary.may_step(self.done)
            self._seen = self.decisions.at(self.done, stepping=stepping)
            log_refused(self.boundary.act(self._seen, self.done))
            for asked in self._seen.anchors:
                version = self.boundary.books.version(asked.fragment)
                self.send_anchor(asked, version)
            if self._seen.save or self._seen.leaving:
                self._save(final=self._seen.leaving)
            again = self._seen.again
        self._post()
        return self.boundary.may_step(self.done)

    def in_doubt(self) -> list[int]:
        """Return the fragments whose take may still be merged after this incarnation's
        end.
        """
        books = self.boundary.books
        if self._seen.leaving:
            return list(range(len(books.versions())))  # All are about to be taken.
        return [take.fragment for take in books.outstanding()]

    def _post(self) -> None:
        status = self.boundary.status(self.done, self.timing.measures())
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
        if now - self._waiting[1] < self.patience_s:
            return None
        return Ending(
            EXIT_FAILED,
            f"{what} for {self.patience_s:g} s at step {self.done}; is the "
            f"coordinator running? Start it again, then this island",
        )


@dataclasses.dataclass(kw_only=True)
class Loop(Stepping):
    """Everything that one incarnation's training needs; `run` does it."""

    replica: Replica
    data: LeasedStream
    evaluator: Evaluator
    checkpoints: Checkpoints | None = None
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
        self._adopted = self._adoptions = 0
        """Adoptions before the last step, and before the one whose loss was read."""
        self._lasts_at = math.inf

    def run(self) -> Ending:
        """Train until the run is over, or something ends this incarnation."""
        while (ending := self.until_step()) is None:
            self._validate()
            with self.timing.reading():
                if late_s := self.faults.starved_s(self.done):
                    self.sleep(late_s)
                batch = self.data.next_batch(self.patience_s)
            self._train_step(batch)
        return ending

    def _save(self, *, final: bool = False) -> None:
        if self.checkpoints is not None:
            self._post()  # The records of this boundary are unheard, too.
            _, unheard = self.mailbox.report(0)
            self.checkpoints.save(
                self.replica.trees(),
                steps=self.done,
                versions=self.boundary.books.versions(),
                outstanding=self.in_doubt(),
                unheard=unheard,
                final=final,
            )

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
            self._last_metrics, self._adopted = metrics, self.replica.adoptions
            took = max(self._step_seconds, self.clock() - began)
            lasts = took * self.faults.slowdown(self.done)
            remaining = began + lasts - self.clock()
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
            adopted, self._adoptions = self._adopted > self._adoptions, self._adopted
            loss, predicted = float(metrics["loss"]), float(metrics["tokens"])
            # A gradient may not be finite where the loss is.
            told = math.nan if metrics["skipped"] else loss
            if predicted:  # A row may be all prompt.
                self.timing.loss(told, predicted, adopted=adopted)
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
