"""One thread of decisions: an engine, and a queue of events.

Everything that changes a run goes through the queue of this thread, so decisions need
no lock.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Generic

from diloco_jax.coordinator.engine import E, Engine, S

EVENTS_WAITING = 10_000
"""Events that may wait; beyond it, those who post wait too."""
LONGEST_WAIT_S = 0.5
"""The thread looks at its housekeeping at least this often."""

Before = Callable[[], None]


class EngineThread(Generic[S, E]):
    """Make it, `run` it on one thread, `post` from any."""

    def __init__(
        self,
        engine: Engine[S, E],
        next_deadline: Callable[[S, float], float | None],
        timer: E,
        housekeeping: Callable[[], None],
    ) -> None:
        """next_deadline: when time alone changes something, given the state and the
        time of the last step; a `timer` is the engine's event then. housekeeping:
        called on this thread at least twice a second."""
        self.engine = engine
        self._next_deadline, self._timer = next_deadline, timer
        self._housekeeping = housekeeping
        self._queue: queue.Queue[tuple[E | None, Before | None, float]] = queue.Queue(
            EVENTS_WAITING
        )
        self._now = time.monotonic()
        """Of the last step."""
        self._stopping = False
        self._failure: BaseException | None = None

    @property
    def state(self) -> S:
        """After the last step; one immutable value, to be read from any thread."""
        return self.engine.state

    def post(self, event: E | None, before: Before | None = None) -> None:
        """Queues an event of now; `before` is called on the engine's thread just
        ahead."""
        self._queue.put((event, before, time.monotonic()))

    def stop(self) -> None:
        """Ends `run` after what is queued. Safe in a signal handler."""
        self._stopping = True

    def fail(self, failure: BaseException) -> None:
        """Ends `run` with what went wrong on another thread."""
        self._failure = failure
        self.post(None)

    def run(self) -> None:
        """Decides until `stop`.

        Raises what went wrong elsewhere (`fail`) or while carrying out an effect: the
        process must end then, and start again from what is durable.
        """
        while not self._stopping:
            self._turn()
            if self._failure is not None:
                raise self._failure

    def _turn(self) -> None:
        due = self._next_deadline(self.state, self._now)
        wait = LONGEST_WAIT_S
        if due is not None:
            wait = min(wait, due - time.monotonic())
        event: E | None = None
        before: Before | None = None
        try:
            event, before, at = self._queue.get(timeout=max(wait, 0.0))
        except queue.Empty:
            event, at = self._timer, time.monotonic()
        if before is not None:
            before()
        if event is not None:
            # At the time at which it came: what waited here while this thread was held
            # up (by a disk, or with the whole machine) is not late.
            self._now = max(self._now, at)
            self.engine.step(event, self._now)
        self._housekeeping()
