"""Several transfers that succeed or fail together, each with an idle deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any, TypeVar

from diloco_jax.wire import encoding, errors
from diloco_jax.wire.connection import PROGRESS_BYTES, BulkConnection
from diloco_jax.wire.dialing import Connections
from diloco_jax.wire.errors import ConnectionLost, RemoteProtocolError
from diloco_jax.wire.threads import Guard, IdleWatch

Answer = TypeVar("Answer")
Result = TypeVar("Result")


class CallGroup:
    """The calls of one transfer."""

    def __init__(
        self, connections: Connections, watch: IdleWatch, idle_s: float
    ) -> None:
        self._connections, self._watch, self._idle_s = connections, watch, idle_s
        self._peer = connections.address
        self._lock = threading.Lock()
        self._open: set[BulkConnection] = set()
        self._cancelled = threading.Event()

    @contextlib.contextmanager
    def call(self) -> Iterator[tuple[BulkConnection, Guard]]:
        """Take a connection for the length of the block, which makes one call on it.

        The block touches the guard as bytes move. Without any for `idle_s`, or
        once the group is cancelled, the connection is cut and the block raises
        ConnectionLost.
        """
        connection = self._connections.take()
        with self._lock:
            self._open.add(connection)
        if self._cancelled.is_set():
            connection.cut()
        try:
            with self._watch.guard(self._idle_s, connection.cut) as guard:
                yield connection, guard
        except ConnectionLost as error:
            if guard.expired:
                raise ConnectionLost(
                    f"{self._peer}: not {PROGRESS_BYTES >> 10} KiB moved for "
                    f"{self._idle_s:g} s"
                ) from error
            if self._cancelled.is_set():
                raise ConnectionLost(
                    f"{self._peer}: the transfer was ended at this end ({error})"
                ) from error
            raise
        finally:
            with self._lock:
                self._open.discard(connection)
            self._connections.give(connection)

    def cancel(self) -> None:
        """Cancel all calls, including later ones."""
        self._cancelled.set()
        with self._lock:
            for connection in self._open:
                connection.cut()

    def pause(self, seconds: float) -> bool:
        """Wait; return early and True if the group is cancelled."""
        return self._cancelled.wait(seconds)

    def results(self, running: list[futures.Future[Result]]) -> list[Result]:
        """Return all results; on the first error end the other calls and raise it."""
        try:
            for done in futures.as_completed(running):
                done.result()
        except BaseException:
            self.cancel()
            futures.wait(running)
            raise
        return [done.result() for done in running]


def asked(connection: BulkConnection, request: Any, kind: type[Answer]) -> Answer:
    """Ask for something; return what comes before its bytes."""
    connection.send(request)
    return answer(connection, kind)


def answer(connection: BulkConnection, kind: type[Answer]) -> Answer:
    """Receive an answer of this kind; raise the error that comes instead."""
    reply = connection.receive(encoding.bulk_reply)
    if isinstance(reply, errors.Failure):
        raise errors.from_failure(reply, connection.peer)
    if not isinstance(reply, kind):
        raise RemoteProtocolError(
            f"{connection.peer} answered with {type(reply).__name__}, expected "
            f"{kind.__name__}; both ends must run the same version of diloco"
        )
    return reply
