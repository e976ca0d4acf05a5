"""The coordinator's lead: one thread of decisions, with everything that it is given.

Every change of a run goes through the queue of this thread, so decisions need no lock.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, cast

from diloco_jax.coordinator import journal
from diloco_jax.coordinator.engine import E, Engine, S, Sessions
from diloco_jax.coordinator.holding.holder import FragmentHolder
from diloco_jax.coordinator.journal import Journal
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.watchdog import Sleeps
from diloco_jax.faults import Faults
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.events import (
    Disconnected,
    Event,
    MachineSlept,
    Said,
    Timer,
)
from diloco_jax.protocol.coordinator.ledger import Tally
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.holding import (
    AnchorCompared,
    AnchorKept,
    CycleKept,
    DeltaArrived,
    FromHolder,
    HolderTroubled,
    MergeDigested,
    MergeMeasured,
    MergePrepared,
    MergesCompiled,
)
from diloco_jax.protocol.messages import Hello, Refused

logger = logging.getLogger(__name__)

EVENTS_WAITING = 10_000
"""Events that may wait; beyond it, `post` blocks."""
LONGEST_WAIT_S = 0.5
"""Longest interval between two calls of housekeeping, in seconds."""

Before = Callable[[], None]
_ToBeWritten = MergesCompiled | MergeMeasured | MergeDigested | HolderTroubled


class EngineThread(Generic[S, E]):
    """Run an engine on one thread; any thread may `post` events."""

    def __init__(
        self,
        engine: Engine[S, E],
        next_deadline: Callable[[S, float], float | None],
        timer: E,
        peer_of: Callable[[E | None], Disconnected | None],
        housekeeping: Callable[[], None],
    ) -> None:
        """next_deadline: the time at which time alone changes something, given the
        state and the time of the last step; `timer` is the engine's event then.
        peer_of: the end of the session that an event came from, if it came from one.
        housekeeping: called on this thread at least twice a second."""
        self.engine = engine
        self._next_deadline, self._timer = next_deadline, timer
        self._peer_of, self._housekeeping = peer_of, housekeeping
        self.touch: Callable[[], None] = lambda: None
        """Called on this thread after each turn; see `watchdog.TurnWatch`."""
        self._queue: queue.Queue[
            tuple[E | None, Before | None, Disconnected | None, float]
        ] = queue.Queue(EVENTS_WAITING)
        self._now = time.monotonic()
        """Time of the last step."""
        self._stopping = False
        self._ended = False
        """True once nothing takes events any more: those that come are dropped."""
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> S:
        """State after the last step; one immutable value, which any thread may read."""
        return self.engine.state

    @property
    def waiting(self) -> int:
        """Number of events that wait."""
        return self._queue.qsize()

    def post(
        self,
        event: E | None,
        before: Before | None = None,
        peer: Disconnected | None = None,
    ) -> None:
        """Queue an event with the present time.

        Args:
          before: called on the engine's thread just before the event is decided.
          peer: ends the session that caused the event, if the event does not name one.
        """
        queued = (event, before, peer, time.monotonic())
        while not self._ended:
            with contextlib.suppress(queue.Full):
                return self._queue.put(queued, timeout=LONGEST_WAIT_S)

    def stop(self) -> None:
        """End `run` after the events that are queued. Safe in a signal handler."""
        self._stopping = True

    def fail(self, failure: BaseException) -> None:
        """End `run` with the error of another thread."""
        self._failure = failure
        self.post(None)

    def run(self) -> None:
        """Decide until `stop`.

        If no decision can be made upon a peer's event, only that peer's session ends.
        An error of another thread (`fail`) or of an effect is raised: the process must
        then end, and start again from what is durable.
        """
        self._thread = threading.current_thread()
        try:
            while not self._stopping:
                self._turn()
                self.touch()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._ended = True

    def _turn(self) -> None:
        due = self._next_deadline(self.state, self._now)
        wait = LONGEST_WAIT_S
        if due is not None:
            wait = min(wait, due - time.monotonic())
        try:
            event, before, peer, at = self._queue.get(timeout=max(wait, 0.0))
        except queue.Empty:
            event, before, peer, at = self._timer, None, None, time.monotonic()
        # Use the time at which the event came. An event that waited while this thread
        # was held up (by a disk, or with the whole machine) is not late.
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
            # Decisions are pure, so the state is still the old one.
            logger.exception("%s of %s failed", type(event).__name__, peer)
            self._put_out(peer, error)
            if not isinstance(event, Disconnected):
                self._handle(cast(E, peer), None, peer)
            return
        # A failure from here on is this process's own and ends it: the state has the
        # event, a part of the effects may be durable, and the rest is not carried out.
        for effect in effects:
            self.engine.carry_out(effect)

    def _put_out(self, peer: Disconnected, error: Exception) -> None:
        refused = Refused(
            code="failed",
            message=f"the coordinator failed on what island {peer.island!r} said "
            f"({type(error).__name__}, see its log); start the island again",
        )
        self.engine.turn_away(peer.island, peer.session, refused)


class Lead(EngineThread[State, Event]):
    """Decide for one run. Its holder computes merges, on threads of its own or at
    workers."""

    def __init__(
        self,
        config: PolicyConfig,
        state: State,
        *,
        holder: FragmentHolder,
        log: RecordLog,
        tape: Tape,
        metrics: Metrics,
        sessions: Sessions,
        faults: Faults,
        slow_s: float,
        housekeeping: Callable[[Lead], None],
    ) -> None:
        """slow_s: see `Journal`. housekeeping: called on the engine's thread at least
        twice a second."""
        self.config = config
        self.tally = Tally()
        """Sums of the islands' accounts."""
        self._holder, self._metrics = holder, metrics
        self._unwritten: queue.SimpleQueue[_ToBeWritten] = queue.SimpleQueue()
        self._sleeps = Sleeps()
        self.journal = Journal(
            log,
            tape,
            faults=faults,
            merges=sum(fragment.merges for fragment in state.fragments),
            slow_s=slow_s,
        )
        engine: Engine[State, Event] = Engine(
            decide.step,
            config,
            state,
            log=self.journal,
            sender=sessions,
            holder=holder,
        )
        super().__init__(
            engine,
            decide.next_deadline,
            Timer(),
            self._peer,
            lambda: housekeeping(self),
        )
        holder.answer(self.hear, self.fail)

    @property
    def finished(self) -> bool:
        """True once the run is over."""
        return self.state.phase == "done"

    def _handle(
        self, event: Event | None, before: Before | None, peer: Disconnected | None
    ) -> None:
        # First: an island that goes on as this machine wakes up made steps meanwhile.
        if slept_s := self._sleeps.since_last_s():
            super()._handle(MachineSlept(seconds=slept_s), None, None)
        super()._handle(event, before, peer)

    def hear(self, message: FromHolder) -> None:
        """Take a holder's message on any thread."""
        match message:
            case AnchorKept() | AnchorCompared():
                pass  # The search for anchors was over before it came.
            case DeltaArrived() | MergePrepared() | CycleKept():
                self.post(message)
            case _:
                self._unwritten.put(message)
                # A full queue would never take it from the thread that empties it.
                if threading.current_thread() is self._thread:
                    self._write_down()
                else:
                    self.post(None, self._write_down)

    def _write_down(self) -> None:
        """Write what the holder had to tell people, on the lead's thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._write(self._unwritten.get_nowait())

    def _write(self, message: _ToBeWritten) -> None:
        match message:
            case MergesCompiled():
                self.journal.note(journal.Compiled())
            case MergeMeasured():
                self.journal.note(
                    journal.Measured(
                        fragment=message.fragment,
                        version=message.version,
                        directions=message.directions,
                        **message.measures,
                    )
                )
                self._metrics.append(merge_line(message))
            case MergeDigested():
                self.journal.note(
                    journal.Digested(
                        fragment=message.fragment,
                        version=message.version,
                        digest=message.digest,
                        anchor=message.anchor,
                    )
                )
            case HolderTroubled(text=text):
                self.journal.alert(text)

    def _peer(self, event: Event | None) -> Disconnected | None:
        match event:
            case Hello() | Said() | Disconnected():
                return Disconnected(island=event.island, session=event.session)
            case DeltaArrived():
                island = self.state.islands.get(event.island)
                current = island is not None and island.incarnation == event.incarnation
                session = island.session if island is not None and current else ""
                return Disconnected(island=event.island, session=session)
        return None

    def run(self) -> None:
        """Decide until `stop`, see EngineThread; compile what merges need at the same
        time."""
        self._holder.warm_up()
        try:
            super().run()
        finally:
            self._holder.close()
            self._write_down()


def merge_line(measured: MergeMeasured) -> dict[str, Any]:
    """Return a merge's line of metrics."""
    return {
        "kind": "merge",
        "time": time.time(),
        "fragment": measured.fragment,
        "version": measured.version.number,
        "islands": list(measured.islands),
        "tokens": measured.tokens,
        "share": measured.share,
        "norm": measured.norm,
        **measured.measures,
        "cosine_to_others": list(measured.directions) or None,
        "seconds": measured.seconds,
    }
