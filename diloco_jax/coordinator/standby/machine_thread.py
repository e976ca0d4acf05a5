"""Run a primary's or a standby's machine: one event at a time, from any thread, and its
requests to the object of the mandate beside it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from diloco_jax.coordinator.mandates.store import MandateStore
from diloco_jax.coordinator.sleeping import clock
from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.standby.events import (
    FromStore,
    MandateRead,
    MandateWritten,
    ReadMandate,
    StoreSilent,
    WriteMandate,
    WriteRefused,
)
from diloco_jax.protocol.standby.mandate import MandateTiming
from diloco_jax.wire.threads import DaemonPool

logger = logging.getLogger(__name__)

M = TypeVar("M")
"""State of the machine."""
CALLS_AT_ONCE = 4
"""Requests that may hang, as a shared folder lets them, before none is made."""
TOLD_EVERY_S = 60.0


def timing_of(deadlines: Deadlines) -> MandateTiming:
    """Return the times of the mandate, as they follow from the one time budget."""
    return MandateTiming(
        valid_s=deadlines.mandate_s,
        renew_s=deadlines.renew_s,
        patience_s=deadlines.renew_s,
    )


class MachineThread(Generic[M]):
    """Hand events to a machine; `act` carries out its effects, in order, under one
    lock, so it must neither block nor hand in an event."""

    def __init__(
        self,
        step: Callable[[M, Any, float], tuple[M, Any]],
        next_deadline: Callable[[M, float], float],
        state: M,
        store: MandateStore,
        timing: MandateTiming,
        act: Callable[[Any], None],
    ) -> None:
        self.state = state
        """One immutable value, which any thread may read."""
        self._step, self._next_deadline, self._act = step, next_deadline, act
        self._store, self._timeout_s = store, timing.renew_s
        self._changed = threading.Condition()
        self._calls = DaemonPool(CALLS_AT_ONCE, "diloco-mandate-call")
        self._asked, self._asked_until, self._hanging = 0, math.inf, 0
        self._told = -math.inf
        self._stepped = -math.inf
        """Time of the last step."""
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name="diloco-mandate", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def give(self, event: Any, only_if: Callable[[], bool] = lambda: True) -> None:
        """Let the machine handle an event now, if that holds then."""
        with self._changed:
            if only_if():
                self._give(event)
                self._changed.notify_all()

    def close(self, within_s: float) -> None:
        """Handle nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(within_s)
        self._calls.close(0.0)

    def wait_for(self, holds: Callable[[M], bool], within_s: float) -> bool:
        """Wait until the state is so; return False if it is not within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: holds(self.state), within_s)

    def _give(self, event: Any) -> None:
        if self._closed:
            return
        self._stepped = clock()
        self.state, effects = self._step(self.state, event, self._stepped)
        for effect in effects:
            if isinstance(effect, ReadMandate | WriteMandate):
                self._ask(effect)
            else:
                self._act(effect)

    def _run(self) -> None:
        with self._changed:
            self._give(Timer())
            while not self._closed:
                due = self._next_deadline(self.state, self._stepped)
                due, now = min(due, self._asked_until), clock()
                if now >= due:
                    silent = now >= self._asked_until
                    if silent:
                        self._asked_until, self._asked = math.inf, self._asked + 1
                        self._tell("it did not answer in time")
                    self._give(StoreSilent() if silent else Timer())
                    self._changed.notify_all()
                    continue
                # A clock that passes while the machine sleeps may be ahead of a wait.
                self._changed.wait(min(due - now, 1.0))

    def _ask(self, effect: ReadMandate | WriteMandate) -> None:
        self._asked += 1
        number = self._asked
        self._asked_until = clock() + self._timeout_s
        if self._hanging < CALLS_AT_ONCE:
            self._hanging += 1
            self._calls.submit(self._call, effect, number)

    def _call(self, effect: ReadMandate | WriteMandate, number: int) -> None:
        answer: FromStore
        error = ""
        try:
            answer = self._asked_for(effect)
        except Exception as failure:
            # Each kind of store has its own errors.
            answer, error = StoreSilent(), f"{type(failure).__name__}: {failure}"
        with self._changed:
            self._hanging -= 1
            if number != self._asked:
                return
            self._asked_until = math.inf
            if error:
                self._tell(error)
            self._give(answer)
            self._changed.notify_all()

    def _asked_for(self, effect: ReadMandate | WriteMandate) -> FromStore:
        if isinstance(effect, ReadMandate):
            generation, mandate = self._store.read(self._timeout_s)
            return MandateRead(generation=generation, mandate=mandate)
        written = self._store.write(effect.mandate, effect.generation, self._timeout_s)
        return WriteRefused() if written is None else MandateWritten(generation=written)

    def _tell(self, error: str) -> None:
        now = clock()
        if now - self._told > TOLD_EVERY_S:
            self._told = now
            logger.warning("the object of the mandate: %s; it is tried again", error)
