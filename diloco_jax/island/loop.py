"""The train loop: one page, and it never waits for the network.

At each step boundary: act on what came in, one batch of validation if it is due, then
the next step. Steps are dispatched ahead of the device by at most one: the metrics of
a step are read after the next one is dispatched, so the device always has work.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from diloco_jax.config import Config
from diloco_jax.core.inner import learning_rate
from diloco_jax.data.stream import LeasedStream
from diloco_jax.deadlines import Deadlines
from diloco_jax.faults import Faults
from diloco_jax.island.books import Books
from diloco_jax.island.decisions import Decisions
from diloco_jax.island.evaluate import Evaluator
from diloco_jax.island.exchange import Exchange
from diloco_jax.island.mailbox import (
    EXIT_DONE,
    EXIT_FAILED,
    Arrival,
    Ending,
    Inbox,
    Mailbox,
    Status,
)
from diloco_jax.island.step import Trainer, TrainState
from diloco_jax.island.timing import Timing
from diloco_jax.models.model import Metrics
from diloco_jax.policy.events import Phase
from diloco_jax.wire.messages import TakeVerdict

logger = logging.getLogger(__name__)

DATA_POLL_S = 0.05
"""Longest wait for a batch before the loop looks at its mailbox again."""


class Outgoing(Protocol):
    """What the loop needs of the sender; neither call waits."""

    def put(self, fragment: int, tick: int, encoded: tuple[Any, ...]) -> None:
        """Sends an encoded delta."""

    def forget(self, fragment: int, tick: int) -> None:
        """The verdict on a take is final."""


@dataclasses.dataclass(kw_only=True)
class Loop:
    """Everything that one incarnation's training needs; `run` does it."""

    config: Config
    name: str
    trainer: Trainer
    state: TrainState
    exchange: Exchange
    books: Books
    data: LeasedStream
    mailbox: Mailbox
    decisions: Decisions
    outgoing: Outgoing
    timing: Timing
    evaluator: Evaluator
    faults: Faults = dataclasses.field(default_factory=Faults)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        run, island = self.config.run, self.config.island(self.name)
        self._deadlines = Deadlines(self.config.placement.time_budget_s)
        self._tokens_per_step = island.batch_size * run.sequence_length
        self._step_seconds = island.step_seconds
        self._adopts_first = run.sync.adopt == "rebase"
        self._step = 0
        self._others_tokens = 0
        self._progress = 0.0
        self._late_takes: dict[int, int] = {}
        self._last_metrics: Metrics | None = None
        self._waiting_since: float | None = None

    def run(self) -> Ending:
        """Trains until the run is over, or something ends this incarnation."""
        while True:
            stepping = self._may_step()
            self._boundary(stepping)
            if self.mailbox.ending is not None:
                return self.mailbox.ending
            if self.mailbox.finished:
                return Ending(EXIT_DONE, "finished")
            if not stepping:
                overdue = self._wait_for_end()
            elif (batch := self.data.next_batch(DATA_POLL_S)) is None:
                overdue = self._overdue(
                    3 * self.config.placement.outage_budget_s,
                    "no data was granted",
                )
            else:
                self._waiting_since = overdue = None
                self._validate()
                self._train_step(batch)
            if overdue is not None:
                return overdue

    # ---- one step ---------------------------------------------------------------

    def _train_step(self, batch: Any) -> None:
        with self.timing.step():
            began = self.clock()
            self.timing.learning_rate = rate = self._learning_rate()
            placed = self.trainer.put_batch(batch)
            self.state, metrics = self.trainer.step(self.state, placed, rate)
            # One step late: by now the device has the next one to do.
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
            self._last_metrics = None

    def _learning_rate(self) -> float:
        inner = self.config.run.inner
        # Monotone, though tokens may be lost elsewhere.
        self._progress = max(self._progress, self._share_done())
        rewarm = (self._step + 1) / inner.rewarm_steps if inner.rewarm_steps else 1.0
        return learning_rate(
            peak=inner.learning_rate,
            schedule=inner.schedule,
            warmup_fraction=inner.warmup_fraction,
            final_fraction=inner.final_fraction,
            progress=self._progress,
            rewarm=rewarm,
        )

    def _share_done(self) -> float:
        tokens = self._others_tokens + self._step * self._tokens_per_step
        return tokens / self.config.run.total_tokens

    def _validate(self) -> None:
        if not self.evaluator.due(self._step):
            return
        with self.timing.validation():
            loss = self.evaluator.advance(self.state.params)
        if loss is not None:
            self.timing.eval_loss = loss

    # ---- a boundary -------------------------------------------------------------

    def _boundary(self, stepping: bool) -> None:
        phase: Phase = "training" if stepping else "stopped"
        again = True
        while again:
            self._post(phase)
            inbox = self.decisions.at(self._step, stepping=stepping)
            self._act(inbox)
            again = inbox.again
        self._post(phase)

    def _act(self, inbox: Inbox) -> None:
        for span in inbox.grants:
            self.books.granted(span, self._step)
        if inbox.others_tokens != self._others_tokens:
            self._others_tokens = inbox.others_tokens
            self.books.progress(self._others_tokens, self._step)
        # A refusal known before an adoption resets the base that it goes by.
        for verdict in inbox.verdicts:
            self._settle(verdict)
        takes = {**self._late_takes, **inbox.takes}
        self._late_takes = {}
        if self._adopts_first:
            self._adopt(inbox.arrivals)
            self._take(takes)
        else:
            self._take(takes)
            self._adopt(inbox.arrivals)

    def _take(self, takes: dict[int, int]) -> None:
        for fragment, tick in takes.items():
            if self.books.must_wait(fragment):
                self._late_takes[fragment] = tick
            elif self.books.take(fragment, tick, self._step) is not None:
                encoded = self.exchange.take(fragment, self.state.params)
                self.outgoing.put(fragment, tick, encoded)

    def _adopt(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            if self.books.adopt(arrival.fragment, arrival.version, self._step):
                params = self.exchange.adopt(arrival, self.state.params)
                self.state = self.state._replace(params=params)

    def _settle(self, verdict: TakeVerdict) -> None:
        fragment, tick = verdict.fragment, verdict.tick
        outcome = self.books.settle(
            fragment, tick, verdict.verdict, verdict.reason, self._step
        )
        if outcome == "none":
            return
        self.outgoing.forget(fragment, tick)
        if outcome == "settled":
            self.exchange.settle(fragment)
            return
        logger.warning(
            "take of fragment %d at tick %d was refused (%s): its steps are %s",
            fragment,
            tick,
            verdict.reason,
            "open again" if outcome == "reopened" else "lost",
        )
        if outcome == "reopened":
            self.exchange.reopen(fragment)
        elif outcome == "dropped":
            self.exchange.drop(fragment)
        else:
            params = self.exchange.reset(fragment, self.state.params)
            self.state = self.state._replace(params=params)

    def _post(self, phase: Phase) -> None:
        status = Status(
            phase=phase,
            steps=self._step,
            outstanding=self.books.outstanding(),
            measures=self.timing.measures(),
        )
        self.mailbox.post(status, self.books.drain())

    # ---- ends and waits ---------------------------------------------------------

    def _may_step(self) -> bool:
        """Until the run has its tokens, by the coordinator's count or by ours. Ours
        can be too high for a moment, when another island's steps were lost."""
        return not self.mailbox.stop_asked and self._share_done() < 1

    def _wait_for_end(self) -> Ending | None:
        self._read_metrics()
        self.mailbox.wait(self._deadlines.report_s)
        self.timing.restart()
        if self.mailbox.stop_asked:
            return self._overdue(2 * self._deadlines.flush_s, "the run did not finish")
        return self._overdue(
            3 * self.config.placement.outage_budget_s, "nobody said that the run ends"
        )

    def _overdue(self, patience_s: float, what: str) -> Ending | None:
        now = self.clock()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < patience_s:
            return None
        return Ending(
            EXIT_FAILED,
            f"{what} for {patience_s:g} s at step {self._step}; is the coordinator "
            f"running? Start it again, then this island",
        )
