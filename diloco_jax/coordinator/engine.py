"""Carry out what the coordinator decides: one engine for every clock.

Three shells construct it: the service (`lead.py`), a coordinator in virtual time, and
one that searches islands for lost anchors. They give it different deciding
halves of the protocol, and different logs, messengers and holders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from diloco_jax.protocol.coordinator.events import (
    Alert,
    Effect,
    Ignored,
    Note,
    Outdated,
    Persist,
    Tell,
)
from diloco_jax.protocol.coordinator.search import GiveUp, Postpone
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.coordinator.terms import FoundTerm
from diloco_jax.protocol.holding import (
    AwaitAnchor,
    Commit,
    Drop,
    Forget,
    KeepFragment,
    Merge,
    ToHolder,
)
from diloco_jax.protocol.messages import FromCoordinator, Hello, Refused, Welcome
from diloco_jax.protocol.records import Durable, Noted, TurnedAway
from diloco_jax.wire import errors

S = TypeVar("S")
"""State of the deciding half."""
E = TypeVar("E")
"""Events of the deciding half."""

AnyEffect = Effect | Postpone | FoundTerm | GiveUp

Decide = Callable[[PolicyConfig, S, E, float], tuple[S, Any]]
"""`step(config, state, event, now) -> (state, effects)`."""


class Log(Protocol):
    """The written record of the coordinator. A search writes nothing."""

    def persist(self, record: Durable) -> None:
        """Write a record; durable when this returns."""

    def note(self, record: Noted) -> None:
        """Write a record to the tape."""

    def ignored(self, ignored: Ignored) -> None:
        """Count a message that made no move."""

    def alert(self, text: str, island: str = "") -> None:
        """Report something that a person should look at. island: see `Alert`."""


class Messenger(Protocol):
    """The connected sessions."""

    def tell(self, session: str, message: FromCoordinator) -> None:
        """Send a message; nothing happens if the session is not connected."""

    def postpone(self, session: str, message: str) -> None:
        """End a session for this reason; the island tries again later."""


class Holder(Protocol):
    """Keeps the fragments and the deltas that wait for their merge."""

    def hold(self, message: ToHolder) -> None:
        """Carry out a message. Messages come in order, and may name deltas that are
        unknown here.

        The answer comes later, as an event.
        """


class Searcher(Protocol):
    """The shell of a search."""

    def alert(self, text: str, island: str = "") -> None:
        """Report something that a person should look at. There is no tape yet."""

    def over(self, end: FoundTerm | GiveUp) -> None:
        """End the search."""


class Engine(Generic[S, E]):
    """The deciding half of the protocol, with the objects that carry out its
    effects."""

    def __init__(
        self,
        decide: Decide[S, E],
        config: PolicyConfig,
        state: S,
        *,
        sender: Messenger,
        log: Log | None = None,
        holder: Holder | None = None,
        searcher: Searcher | None = None,
    ) -> None:
        """log: for the usual half; searcher: for a search."""
        self.config, self.state = config, state
        self.dead = False
        """Set by an effect that ends this engine; no later effect is carried out."""
        self._decide = decide
        self._sender = sender
        self._log, self._holder, self._searcher = log, holder, searcher

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
        if self._log is not None:
            note = TurnedAway(island=island, code=refused.code, message=refused.message)
            self._log.note(note)
        self._sender.tell(session, refused)

    def carry_out(self, effect: AnyEffect) -> None:
        """Carry out one effect."""
        match effect:
            case Tell(session=session, message=message):
                self._sender.tell(session, message)
            case Note(record=noted):
                assert self._log is not None
                self._log.note(noted)
            case Persist(record=durable):
                assert self._log is not None
                self._log.persist(durable)
            case Ignored():
                assert self._log is not None
                self._log.ignored(effect)
            case Postpone(session=session, message=reason):
                self._sender.postpone(session, reason)
            case Alert(text=text, island=island):
                told = self._log or self._searcher
                assert told is not None
                told.alert(text, island)
            case Outdated(text=text):
                raise errors.Refused("outdated", text)
            case (
                Merge() | Commit() | KeepFragment() | Drop() | Forget() | AwaitAnchor()
            ):
                assert self._holder is not None
                self._holder.hold(effect)
            case FoundTerm() | GiveUp():
                assert self._searcher is not None
                self._searcher.over(effect)


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
    """Streams by session name; the `Messenger` of an engine.

    A stream first says hello. It serves its session once the coordinator has answered
    with a Welcome. A newer stream of a session then replaces the older one.
    """

    def __init__(self) -> None:
        self.completed: Callable[[Hello, FromCoordinator], FromCoordinator] = _as_it_is
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
                    raise errors.Refused("session", taken(session.hello))
            self._waiting[session.hello.session] = session

    def tell(self, session: str, message: FromCoordinator) -> None:
        """Send a message to a session; see `engine.Messenger`.

        A Welcome makes the session's newest stream serve it; a Refused ends all its
        streams.
        """
        if isinstance(message, Refused):
            self._refuse(session, errors.Refused(message.code, message.message))
            return
        if isinstance(message, Welcome):
            self._welcome(session)
        with self._lock:
            stream = self._serving.get(session)
        if stream is not None:
            stream.send(self.completed(stream.hello, message))

    def postpone(self, session: str, message: str) -> None:
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
            island = stream.hello.island
            replaced = [
                other
                for other, served in self._serving.items()
                if served.hello.island == island
            ]
            before = [self._serving.pop(other) for other in replaced]
            self._serving[name] = stream
        for old in before:
            if old is not stream:
                old.close()

    def _refuse(self, name: str, refused: errors.Refused) -> None:
        for stream in self._removed(name):
            stream.close(refused)

    def _removed(self, name: str) -> list[Stream]:
        with self._lock:
            found = (self._waiting.pop(name, None), self._serving.pop(name, None))
        return [stream for stream in found if stream is not None]


def _as_it_is(hello: Hello, message: FromCoordinator) -> FromCoordinator:
    return message


def taken(hello: Hello) -> str:
    """Return the message for an island whose session name another island has."""
    return (
        f"the session of island {hello.island!r} is that of another island; start it "
        f"again, since each process draws a session of its own"
    )
