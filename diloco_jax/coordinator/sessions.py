"""Which control stream serves which island."""

from __future__ import annotations

import threading

from diloco_jax.protocol.messages import FromCoordinator
from diloco_jax.wire.errors import Refused
from diloco_jax.wire.session import Session


class Sessions:
    """Streams by the session name of their Hello, and the one that serves an island.

    A stream says hello first and serves its island once the policy has welcomed it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Session] = {}
        self._serving: dict[str, Session] = {}

    def arrived(self, session: Session) -> None:
        """A stream said hello. A newer stream of one session replaces the older."""
        with self._lock:
            self._waiting[session.hello.session] = session

    def welcomed(self, island: str, name: str) -> None:
        """The policy let a session in: its newest stream serves the island."""
        with self._lock:
            session = self._waiting.pop(name, None)
            before = self._serving.get(island)
            if session is not None:
                self._serving[island] = session
        if before is not None and session is not None and before is not session:
            before.close()

    def refuse(self, island: str, name: str, refused: Refused) -> None:
        """Ends the streams of a session with a reason."""
        with self._lock:
            ended = [self._waiting.pop(name, None)]
            serving = self._serving.get(island)
            if serving is not None and serving.hello.session == name:
                ended.append(self._serving.pop(island))
        for session in ended:
            if session is not None:
                session.close(refused)

    def gone(self, session: Session) -> bool:
        """A stream ended; returns whether it was the one that served its island."""
        hello = session.hello
        with self._lock:
            if self._waiting.get(hello.session) is session:
                del self._waiting[hello.session]
            if self._serving.get(hello.island) is not session:
                return False
            del self._serving[hello.island]
            return True

    def serves(self, session: Session) -> bool:
        """Whether this stream is the one that serves its island."""
        with self._lock:
            return self._serving.get(session.hello.island) is session

    def send(self, island: str, message: FromCoordinator) -> None:
        """Queues a message for an island; nothing happens if it is not connected."""
        with self._lock:
            session = self._serving.get(island)
        if session is not None:
            session.send(message)

    def connected(self) -> list[str]:
        """Names of the islands that are served."""
        with self._lock:
            return sorted(self._serving)
