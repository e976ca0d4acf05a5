"""The coordinator's lead: the engine that carries out decisions, on one thread.

Every change of a run goes through the queue of this thread, so decisions need no lock.

There is one engine for every clock. Three shells construct it: the lead, a coordinator
in virtual time, and one that searches islands for lost anchors. They give it different
deciding halves of the protocol, and different logs and holders.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

from diloco_jax.coordinator import journal
from diloco_jax.coordinator.holding.holder import FragmentHolder
from diloco_jax.coordinator.journal import Journal, RecordLog
from diloco_jax.coordinator.watchdog import Sleeps
from diloco_jax.faults import Faults
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.search import FoundTerm, GiveUp, Offered, Postpone
from diloco_jax.protocol.coordinator.state import (
    Alert,
    Disconnected,
    Effect,
    Event,
    Ignored,
    MachineSlept,
    Note,
    Outdated,
    Persist,
    PolicyConfig,
    Said,
    State,
    Tell,
    Timer,
)
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
    RestoredFragment,
    ToHolder,
)
from diloco_jax.protocol.messages import FromCoordinator, Hello, Refused, Welcome
from diloco_jax.protocol.records import Durable, Noted, TurnedAway
from diloco_jax.wire import errors

logger = logging.getLogger(__name__)


S = TypeVar("S")
"""State of the deciding half."""
E = TypeVar("E")
"""Events of the deciding half."""

AnyEffect = Effect | Postpone | FoundTerm | GiveUp

Decide = Callable[[PolicyConfig, S, E, float], tuple[S, Any]]
"""`step(config, state, event, now) -> (state, effects)`."""


class Log(Protocol):
    """The written record of the coordinator. A search writes none: it
    tells people, and does nothing else of this."""

    def persist(self, record: Durable) -> None:
        """Write a record; durable when this returns."""
        return

    def note(self, record: Noted) -> None:
        """Write a record to the tape."""
        return

    def ignored(self, ignored: Ignored) -> None:
        """Count a message that made no move."""
        return

    def alert(self, text: str, island: str = "") -> None:
        """Report something that a person should look at. island: see `Alert`."""


class Holder(Protocol):
    """Keeps the fragments and the deltas that wait for their merge."""

    def hold(self, message: ToHolder) -> None:
        """Carry out a message. Messages come in order, and may name deltas that are
        unknown here.

        The answer comes later, as an event.
        """


class Engine(Generic[S, E]):
    """The deciding half of the protocol, with the objects that carry out its
    effects."""

    def __init__(
        self,
        decide: Decide[S, E],
        config: PolicyConfig,
        state: S,
        *,
        sessions: Sessions,
        log: Log,
        holder: Holder,
        over: Callable[[FoundTerm | GiveUp], None] = lambda end: None,
    ) -> None:
        """over: called at the end of a search."""
        self.config, self.state = config, state
        self.dead = False
        """Set by an effect that ends this engine; no later effect is carried out."""
        self._decide, self._sessions = decide, sessions
        self._log, self._holder, self._over = log, holder, over

    def step(self, event: E, now: float) -> None:
        """Apply one event at time `now`: decide, then act, in order."""
        for effect in self.decide(event, now):
            self.carry_out(effect)
            if self.dead:
                return

    def decide(self, event: E, now: float) -> list[AnyEffect]:
        """Decide upon an event; return the effects, none of which is visible yet."""
        effects: list[AnyEffect]
        self.state, effects = self._decide(self.config, self.state, event, now)
        return effects

    def turn_away(self, island: str, session: str, refused: Refused) -> None:
        """End a session by a decision of the service, not of the protocol. The tape
        notes it.
        """
        note = TurnedAway(island=island, code=refused.code, message=refused.message)
        self._log.note(note)
        self._sessions.tell(session, refused)

    def carry_out(self, effect: AnyEffect) -> None:
        """Carry out one effect."""
        match effect:
            case Tell(session=session, message=message):
                self._sessions.tell(session, message)
            case Note(record=noted):
                self._log.note(noted)
            case Persist(record=durable):
                self._log.persist(durable)
            case Ignored():
                self._log.ignored(effect)
            case Postpone(session=session, message=reason):
                self._sessions.postpone(session, reason)
            case Alert(text=text, island=island):
                self._log.alert(text, island)
            case Outdated(text=text):
                raise errors.Refused("outdated", text)
            case FoundTerm() | GiveUp():
                self._over(effect)
            case _:
                self._holder.hold(effect)


class Stream(Protocol):
    """One control stream: a `wire.session.Session`, or one in virtual time."""

    @property
    def hello(self) -> Hello:
        """The first message on the stream."""

    def send(self, message: FromCoordinator) -> None:
        """Queue a message; do nothing if the stream has ended."""

    def close(self, refused: errors.Refused | None = None) -> None:
        """End the stream. An island that is refused is told why."""

    def fail(self, error: errors.WireError) -> None:
        """End the stream with an error; the island connects again."""


class Sessions:
    """Streams by session name. An engine tells them what was decided.

    A stream first says hello. It serves its session once the coordinator has answered
    with a Welcome. A newer stream of a session then replaces the older one.
    """

    def __init__(self) -> None:
        self.completed: Callable[[Hello, FromCoordinator], FromCoordinator] = (
            lambda hello, message: message
        )
        """Completes a message for the island that said hello."""
        self._lock = threading.Lock()
        self._waiting: dict[str, Stream] = {}
        self._serving: dict[str, Stream] = {}

    def arrived(self, session: Stream) -> None:
        """Keep a stream that said hello.

        Raises Refused if a stream of another island has the same session: each island
        would receive the other's messages.
        """
        with self._lock:
            for streams in (self._waiting, self._serving):
                other = streams.get(session.hello.session)
                if other is not None and other.hello.island != session.hello.island:
                    raise errors.Refused("session", session_in_use(session.hello))
            self._waiting[session.hello.session] = session

    def tell(self, session: str, message: FromCoordinator) -> None:
        """Send a message to a session; nothing happens if it is not connected.

        A Welcome makes the session's newest stream serve it; a Refused ends all its
        streams.
        """
        if isinstance(message, Refused):
            for stream in self._removed(session):
                stream.close(errors.Refused(message.code, message.message))
            return
        if isinstance(message, Welcome):
            self._welcome(session)
        with self._lock:
            served = self._serving.get(session)
        if served is not None:
            served.send(self.completed(served.hello, message))

    def postpone(self, session: str, message: str) -> None:
        """End a session for this reason; the island tries again later."""
        for stream in self._removed(session):
            stream.fail(errors.Busy(message))

    def gone(self, stream: Stream) -> bool:
        """Forget a stream that ended; return True if its session has no stream now."""
        name = stream.hello.session
        with self._lock:
            if self._waiting.get(name) is stream:
                del self._waiting[name]
            if self._serving.get(name) is not stream:
                return False
            del self._serving[name]
            return name not in self._waiting

    def serves(self, stream: Stream) -> bool:
        """Tell if this stream serves its session."""
        with self._lock:
            return self._serving.get(stream.hello.session) is stream

    def connected(self) -> list[str]:
        """Return the names of the islands that are served."""
        with self._lock:
            return sorted({s.hello.island for s in self._serving.values()})

    def _welcome(self, name: str) -> None:
        with self._lock:
            stream = self._waiting.pop(name, None)
            if stream is None:
                return
            island, served = stream.hello.island, list(self._serving.items())
            before = [(n, old) for n, old in served if old.hello.island == island]
            for other, _ in before:
                del self._serving[other]
            self._serving[name] = stream
        for _, old in before:
            if old is not stream:
                old.close()

    def _removed(self, name: str) -> list[Stream]:
        with self._lock:
            found = (self._waiting.pop(name, None), self._serving.pop(name, None))
        return [stream for stream in found if stream is not None]


def session_in_use(hello: Hello) -> str:
    """Return the message for an island whose session name another island has."""
    return (
        f"the session of island {hello.island!r} is that of another island; start it "
        f"again, since each process draws a session of its own"
    )


EVENTS_WAITING = 10_000
"""Events that may wait; beyond it, `post` blocks."""
LONGEST_WAIT_S = 0.5
"""Longest interval between two calls of housekeeping, in seconds."""

Before = Callable[[], None]
_ToBeWritten = (
    MergesCompiled | MergeMeasured | MergeDigested | RestoredFragment | HolderTroubled
)


class EngineThread(Generic[S, E]):
    """Run an engine on one thread; any thread may `post` events."""

    def __init__(
        self,
        engine: Engine[S, E],
        next_deadline: Callable[[S, float], float | None],
        timer: E,
        housekeeping: Callable[[], None],
    ) -> None:
        """next_deadline: the time at which time alone changes something, given the
        state and the time of the last step; `timer` is the engine's event then.
        housekeeping: called on this thread at least twice a second."""
        self.engine = engine
        self._next_deadline, self._timer = next_deadline, timer
        self._housekeeping = housekeeping
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
          before: called on this object's thread just before the event is decided.
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
        self._handle(event, before, peer or self._peer(event))
        self._housekeeping()

    def _peer(self, event: E | None) -> Disconnected | None:
        """Return the end of the session that an event came from, if it came from
        one."""
        said = event.hello if isinstance(event, Offered) else event
        if not isinstance(said, Hello | Said | Disconnected):
            return None
        return Disconnected(island=said.island, session=said.session)

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
        """slow_s: see `Journal`. housekeeping: called on this thread at least twice a
        second."""
        self.config = config
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
            sessions=sessions,
            holder=holder,
        )
        super().__init__(
            engine,
            decide.next_deadline,
            Timer(),
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
            self.journal.alert(
                f"this machine slept for {slept_s:.0f} s, or its clock was put "
                f"forward; no deadline goes by that, but certificates and incarnations "
                f"do: look at its time service"
            )
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
            case MergesCompiled() | MergeDigested() | RestoredFragment():
                self.journal.note(journal.noted(message))
            case MergeMeasured():
                self.journal.note(
                    journal.Measured(
                        fragment=message.fragment,
                        version=message.version,
                        directions=message.directions,
                        experts=message.experts,
                        expert_loads=message.expert_loads,
                        **message.measures,
                    )
                )
                self._metrics.append(merge_line(message))
            case HolderTroubled(text=text):
                self.journal.alert(text)

    def _peer(self, event: Event | None) -> Disconnected | None:
        if not isinstance(event, DeltaArrived):
            return super()._peer(event)
        island = self.state.islands.get(event.island)
        current = island is not None and island.incarnation == event.incarnation
        session = island.session if island is not None and current else ""
        return Disconnected(island=event.island, session=session)

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
        "experts": measured.experts or None,
        "expert_loads": measured.expert_loads or None,
        "seconds": measured.seconds,
    }
