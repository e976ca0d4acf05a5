"""One thread of decisions: an engine, and a queue of events.

Everything that changes a run goes through the queue of this thread, so decisions need
no lock.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Generic, cast

from diloco_jax.coordinator.engine import E, Engine, S
from diloco_jax.protocol.coordinator.events import Disconnected
from diloco_jax.protocol.messages import Refused

logger = logging.getLogger(__name__)

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
        peer_of: Callable[[E | None], Disconnected | None],
        housekeeping: Callable[[], None],
    ) -> None:
        """next_deadline: when time alone changes something, given the state and the
        time of the last step; a `timer` is the engine's event then. peer_of: the
        end of the session that an event came from, if it came from one. housekeeping:
        called on this thread at least twice a second."""
        self.engine = engine
        self._next_deadline, self._timer = next_deadline, timer
        self._peer_of, self._housekeeping = peer_of, housekeeping
        self._queue: queue.Queue[
            tuple[E | None, Before | None, Disconnected | None, float]
        ] = queue.Queue(EVENTS_WAITING)
        self._now = time.monotonic()
        """Of the last step."""
        self._stopping = False
        self._failure: BaseException | None = None

    @property
    def state(self) -> S:
        """After the last step; one immutable value, to be read from any thread."""
        return self.engine.state

    def post(
        self,
        event: E | None,
        before: Before | None = None,
        peer: Disconnected | None = None,
    ) -> None:
        """Queue an event of now; `before` is called on the engine's thread just
        ahead. peer: the end of the session whose doing it is, where the event does
        not tell."""
        self._queue.put((event, before, peer, time.monotonic()))

    def stop(self) -> None:
        """End `run` after what is queued. Safe in a signal handler."""
        self._stopping = True

    def fail(self, failure: BaseException) -> None:
        """End `run` with what went wrong on another thread."""
        self._failure = failure
        self.post(None)

    def run(self) -> None:
        """Decide until `stop`.

        Raises what went wrong elsewhere (`fail`) or while carrying out an effect: the
        process must end then, and start again from what is durable. An event of a peer
        upon which nothing can be decided ends that peer's session only.
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
        try:
            event, before, peer, at = self._queue.get(timeout=max(wait, 0.0))
        except queue.Empty:
            event, before, peer, at = self._timer, None, None, time.monotonic()
        # At the time at which it came: what waited here while this thread was held up
        # (by a disk, or with the whole machine) is not late.
        self._now = max(self._now, at)
        self._handle(event, before, peer or self._peer_of(event))
        self._housekeeping()

    def _handle(
        self, event: E | None, before: Before | None, peer: Disconnected | None
    ) -> None:
        try:
            if before is not None:
                before()
            effects = [] if event is None else self.engine.decide(event, self._now)
        except OSError:
            raise  # The disk has failed, not the peer.
        except Exception as error:
            if peer is None:
                raise
            # The state is still that of before: decisions are pure.
            logger.exception("%s of %s failed", type(event).__name__, peer)
            self._put_out(peer, error)
            if not isinstance(event, Disconnected):
                self._handle(cast(E, peer), None, peer)
            return
        # From here on a failure is nobody's fault but this process's, and ends it: the
        # state has the event, a part of it may be durable, and the rest is not told.
        for effect in effects:
            self.engine.carry_out(effect)

    def _put_out(self, peer: Disconnected, error: Exception) -> None:
        refused = Refused(
            code="failed",
            message=f"the coordinator failed on what island {peer.island!r} said "
            f"({type(error).__name__}, see its log); start the island again",
        )
        self.engine.turn_away(peer.island, peer.session, refused)
