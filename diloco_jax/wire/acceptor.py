"""The thread that holds a bulk port's connections while they have no transfer.

An idle connection costs an open file and no thread. So a peer that shakes hands slowly,
or stays silent, holds up nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import addresses
from diloco_jax.wire.connection import BulkConnection, prepare

logger = logging.getLogger(__name__)

_POLL_S = 1.0
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
TOLD_EVERY_S = 60.0
"""Seconds between two lines of the log about connections of strangers, which may be
many."""


class Acceptor:
    """Accept connections, shake hands, and wait for requests on idle connections."""

    def __init__(
        self,
        listener: socket.socket,
        context: Callable[[], ssl.SSLContext | None],
        begin: Callable[[BulkConnection], None],
        deadlines: Deadlines,
        most: int,
    ) -> None:
        """Make the acceptor; `start` starts its thread.

        Args:
          context: returns the TLS context of the next connection; None = no TLS.
          begin: serves a connection on which a request arrives; it returns at once.
          most: largest number of idle connections; beyond it the oldest one is closed.
        """
        self._listener, self._context, self._begin = listener, context, begin
        self._deadlines, self._most = deadlines, most
        self._awake, self._alarm = socket.socketpair()
        self._lock = threading.Lock()
        self._back: list[BulkConnection] = []
        """Connections whose transfer is done."""
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name="diloco-bulk-acceptor", daemon=True
        )
        self._selector = selectors.DefaultSelector()
        self._shaking: dict[socket.socket, float] = {}
        """When connections that shake hands are closed, oldest first."""
        self._idle: dict[BulkConnection, None] = {}
        """Connections that may ask for something, longest silence first."""
        self._told: dict[str, tuple[int, float]] = {}
        """By what failed: how often since the last line of the log, and its time."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Close the listener and all idle connections."""
        with self._lock:
            self._stopping = True
        self._ring()
        self._thread.join(self._deadlines.stop_s)

    def give_back(self, connection: BulkConnection) -> None:
        """Wait for the next request on a connection whose transfer is done; after
        `stop`, close it. Any thread may call this.
        """
        with self._lock:
            if not self._stopping:
                self._back.append(connection)
                self._ring()
                return
        connection.close()

    def _ring(self) -> None:
        # A full socket wakes the thread as well.
        with contextlib.suppress(OSError):
            self._alarm.send(b"!")

    def _run(self) -> None:
        for one in (self._listener, self._awake, self._alarm):
            one.setblocking(False)
        for one in (self._listener, self._awake):
            self._selector.register(one, selectors.EVENT_READ)
        while not self._stopping:
            for key, _ in self._selector.select(_POLL_S):
                try:
                    self._ready(key.fileobj)
                except Exception:
                    logger.exception("the bulk port failed on a connection")
            self._close_late()
        self._listener.close()
        for connection in (*self._idle, *self._returned()):
            connection.close()
        for secured in self._shaking:
            secured.close()
        self._selector.close()
        self._awake.close()
        self._alarm.close()

    def _returned(self) -> list[BulkConnection]:
        with self._lock:
            back, self._back = self._back, []
        return back

    def _ready(self, who: object) -> None:
        if who is self._listener:
            self._accept()
        elif who is self._awake:
            self._awake.recv(4096)
            for connection in self._returned():
                self._await(connection)
        elif isinstance(who, BulkConnection) and who in self._idle:
            self._selector.unregister(who)
            del self._idle[who]
            self._begin(who)
        elif isinstance(who, ssl.SSLSocket) and who in self._shaking:
            self._shake(who)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self._failed("a connection could not be accepted", error)
                if error.errno in OUT_OF_FILES and self._shaking:
                    self._drop(next(iter(self._shaking)))
                else:
                    time.sleep(0.05)  # Those that end free some.
            return
        try:
            self._make_room()
            prepare(accepted, self._deadlines)
            context = self._context()
            if context is None:
                self._let_in(accepted)
                return
            accepted.setblocking(False)
            secured = context.wrap_socket(
                accepted, server_side=True, do_handshake_on_connect=False
            )
        except BaseException as error:
            accepted.close()
            if not isinstance(error, OSError):
                raise
            self._failed("a connection broke off", error)
            return
        self._shaking[secured] = time.monotonic() + self._deadlines.connect_s
        self._selector.register(secured, selectors.EVENT_READ)
        self._shake(secured)

    def _shake(self, secured: ssl.SSLSocket) -> None:
        try:
            secured.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(secured, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(secured, selectors.EVENT_WRITE)
        except (OSError, ValueError) as error:
            self._failed("a TLS handshake failed", error)
            self._drop(secured)
        else:
            self._selector.unregister(secured)
            del self._shaking[secured]
            self._let_in(secured)

    def _let_in(self, connection: socket.socket) -> None:
        try:
            host, port, *_ = connection.getpeername()
        except OSError:
            connection.close()
            return
        connection.settimeout(None)
        peer = addresses.format_address(host, port)
        self._await(BulkConnection(connection, peer))

    def _await(self, connection: BulkConnection) -> None:
        self._selector.register(connection, selectors.EVENT_READ)
        self._idle[connection] = None
        if connection.pending():
            self._ready(connection)

    def _failed(self, what: str, error: Exception) -> None:
        """Log that a connection failed, now and then."""
        now = time.monotonic()
        others, told = self._told.get(what, (0, -TOLD_EVERY_S))
        if now - told >= TOLD_EVERY_S:
            logger.warning("%s: %s, and %d more before it", what, error, others)
            others, told = -1, now
        self._told[what] = others + 1, told

    def _drop(self, secured: socket.socket) -> None:
        self._selector.unregister(secured)
        del self._shaking[secured]
        secured.close()

    def _close_late(self) -> None:
        now = time.monotonic()
        for secured in [s for s, end in self._shaking.items() if end <= now]:
            self._drop(secured)

    def _make_room(self) -> None:
        """Close the oldest connection that shakes hands or is idle, if there are too
        many."""
        if len(self._shaking) + len(self._idle) < self._most:
            return
        if self._shaking:
            self._drop(next(iter(self._shaking)))
            return
        connection = next(iter(self._idle))
        self._selector.unregister(connection)
        del self._idle[connection]
        connection.close()
