"""The connected control streams, by the session that said hello on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from diloco_jax.protocol.messages import FromCoordinator, Hello, Refused, Welcome
from diloco_jax.wire import errors


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
