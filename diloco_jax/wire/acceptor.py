"""Connections to a bulk port without a transfer, and transfers without a place.

A connection without a transfer costs an open file and no thread: one thread holds all
of them. So a peer that shakes hands slowly, stays silent, or does not read why it is
refused, holds up nobody else. Connections are counted from the handshake to their end,
and by certificate as soon as it is known.

A transfer holds a thread, so there are at most `MOST_PLACES`, however many hosts
connect. A transfer that finds no place waits here for a while. Then its peer is told
Busy, pauses and asks again: an upload until `budget_s`, a fetch until `pin_s`
(`transfers.py`).
"""

from __future__ import annotations

import contextlib
import logging
import resource
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from diloco_jax.deadlines import Deadlines
from diloco_jax.errors import OUT_OF_FILES
from diloco_jax.wire import addresses, errors
from diloco_jax.wire.errors import Busy, WireError
from diloco_jax.wire.frames import BulkConnection, prepare

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_DRAIN_BYTES = 256 << 10
REFUSED_EACH = 4
"""Connections of a certificate that is refused: enough to be told why."""
TOLD_EVERY_S = 60.0
"""Seconds between two lines of the log about connections of strangers, which may be
many."""


class Acceptor:
    """Accept connections, shake hands, wait for requests on idle connections, and see
    off those that have had their last answer."""

    def __init__(
        self,
        listener: socket.socket,
        context: Callable[[], ssl.SSLContext | None],
        begin: Callable[[BulkConnection], None],
        deadlines: Deadlines,
        most: int,
        *,
        most_each: int,
        check: Callable[[BulkConnection], object],
    ) -> None:
        """Make the acceptor; `start` starts its thread.

        Args:
          context: returns the TLS context of the next connection; None = no TLS.
          begin: serves a connection on which a request arrives; it returns at once.
          most: largest number of connections; beyond it the oldest one is closed that
            shakes hands, is seen off, or is idle.
          most_each: largest number with one certificate; those beyond are closed.
          check: raises WireError if the peer's certificate does not count.
        """
        self._listener, self._context, self._begin = listener, context, begin
        self._deadlines, self._most = deadlines, most
        self._most_each, self._check = most_each, check
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
        self._leaving: dict[BulkConnection, float] = {}
        """When connections that have had their last answer are closed, oldest first."""
        self._known: set[BulkConnection] = set()
        """All that have shaken hands: idle, leaving, or served elsewhere."""
        self._own: Counter[bytes] = Counter()
        """How many those are, by certificate."""
        self._checked = time.monotonic()
        self._place = bytearray(_DRAIN_BYTES)
        self._told: dict[str, tuple[int, float]] = {}
        """By what failed: how often since the last line of the log, and its time."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Close the listener and all connections without a transfer."""
        with self._lock:
            self._stopping = True
        self._ring()
        self._thread.join(self._deadlines.stop_s)

    def give_back(self, connection: BulkConnection) -> None:
        """Take a connection whose transfer is done: wait for its next request, or see
        it off; after `stop`, close it. Any thread may call this.
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
        for connection in (*self._idle, *self._leaving, *self._returned()):
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
                if connection.between:
                    self._await(connection)
                elif connection.parted:
                    self._see_off(connection)
                else:
                    self._close(connection)
        elif isinstance(who, BulkConnection) and who in self._idle:
            self._selector.unregister(who)
            del self._idle[who]
            self._begin(who)
        elif isinstance(who, BulkConnection) and who in self._leaving:
            if not who.drain(self._place):
                self._close(who)
        elif isinstance(who, ssl.SSLSocket) and who in self._shaking:
            self._shake(who)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self._failed("a connection could not be accepted", error)
                if error.errno not in OUT_OF_FILES or not self._drop_oldest():
                    time.sleep(0.05)  # Those that end free some.
            return
        try:
            if not self._has_room():
                raise OSError(f"all {self._most} connections have transfers under way")
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

    def _let_in(self, accepted: socket.socket) -> None:
        """Keep a connection whose certificate is known, if it has its share left."""
        try:
            host, port, *_ = accepted.getpeername()
        except OSError:
            accepted.close()
            return
        accepted.settimeout(None)
        connection = BulkConnection(accepted, addresses.format_address(host, port))
        owner = connection.certificate()
        refused = self._refusal(connection)
        most = self._most_each if refused is None else REFUSED_EACH
        if owner and self._own[owner] >= most:
            connection.close()
            why = refused or Busy(f"{connection.peer} has {most} already")
            self._failed("a connection beyond its peer's share was closed", why)
            return
        self._known.add(connection)
        self._own[owner] += 1
        if refused is None:
            self._await(connection)
        else:
            self._failed("a connection was refused", refused)
            self._see_off(connection, refused)

    def _refusal(self, connection: BulkConnection) -> WireError | None:
        try:
            self._check(connection)
        except WireError as error:
            return error
        return None

    def _await(self, connection: BulkConnection) -> None:
        self._selector.register(connection, selectors.EVENT_READ)
        self._idle[connection] = None
        if connection.pending():
            self._ready(connection)

    def _see_off(
        self, connection: BulkConnection, refused: WireError | None = None
    ) -> None:
        """Close a connection once its peer has hung up, or after `retry_max_s`.

        refused: what the peer is still to be told.
        """
        if refused is not None:
            connection.part(errors.failure_of(refused))
        self._leaving[connection] = time.monotonic() + self._deadlines.retry_max_s
        self._selector.register(connection, selectors.EVENT_READ)

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

    def _close(self, connection: BulkConnection) -> None:
        """Close a connection without a transfer, and forget it."""
        for waiting in (self._idle, self._leaving):
            if connection in waiting:
                del waiting[connection]
                self._selector.unregister(connection)
        self._known.discard(connection)
        owner = connection.certificate()
        self._own[owner] -= 1
        if self._own[owner] <= 0:
            del self._own[owner]
        connection.close()

    def _close_late(self) -> None:
        now = time.monotonic()
        for secured in [s for s, end in self._shaking.items() if end <= now]:
            self._drop(secured)
        for connection in [c for c, end in self._leaving.items() if end <= now]:
            self._close(connection)
        if now >= self._checked + _POLL_S:
            self._checked = now
            self._end_refused()

    def _end_refused(self) -> None:
        """End what was let in before its certificate was revoked."""
        refused: dict[bytes, WireError | None] = {}
        for connection in list(self._known - self._leaving.keys()):
            owner = connection.certificate()
            if owner not in refused:
                refused[owner] = self._refusal(connection)
            why = refused[owner]
            if why is not None and connection in self._idle:
                del self._idle[connection]
                self._selector.unregister(connection)
                self._see_off(connection, why)
            elif why is not None:
                connection.cut()

    def _has_room(self) -> bool:
        """Tell if there is room for one connection more, or make it."""
        if len(self._shaking) + len(self._known) < self._most:
            return True
        return self._drop_oldest()

    def _drop_oldest(self) -> bool:
        """Close the oldest connection that shakes hands, is seen off, or is idle;
        return False if there is none."""
        if self._shaking:
            self._drop(next(iter(self._shaking)))
            return True
        for waiting in (self._leaving, self._idle):
            if waiting:
                self._close(next(iter(waiting)))
                return True
        return False


MOST_PLACES = 4096
"""Transfers at once. With waiting ones and sessions of 64 islands, their threads are
fewer than the 4,915 that a service of Linux may have (systemd's TasksMax)."""
MOST_WAITING = 256
"""Transfers that wait for a place. Those beyond are told Busy at once."""
OTHER_FILES = 512
"""Files that the process opens besides its connections."""


class Places:
    """The places of one server, for transfers in both directions or for calls."""

    def __init__(
        self,
        wanted: int,
        wait_s: float,
        each: int | None = None,
        what: str = "transfers",
    ) -> None:
        """wanted: transfers that all peers may begin together. wait_s: longest wait for
        a place. each: most transfers of one known peer; None = any number. what: them,
        in words."""
        self._what = what
        self.count = min(wanted, MOST_PLACES)
        self.threads = self.count + MOST_WAITING
        """Threads that hold or await a place."""
        self._free = threading.Semaphore(self.count)
        self._waiting = threading.Semaphore(MOST_WAITING)
        self._wait_s, self._each = wait_s, each
        self._own: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, who: Hashable = None) -> Iterator[None]:
        """Hold a place for the length of the block.

        Raises Busy if no place becomes free in time, or if the peer `who` has its share
        already. who: None = the peer is not known, and has no share of its own.
        """
        with self._counted(who):
            if not self._free.acquire(blocking=False):
                self._wait()
            try:
                yield
            finally:
                self._free.release()

    @contextlib.contextmanager
    def _counted(self, who: Hashable) -> Iterator[None]:
        if who is None or self._each is None:
            yield
            return
        with self._lock:
            if self._own[who] >= self._each:
                raise Busy(
                    f"{who} has {self._own[who]} {self._what} under way, the limit is "
                    f"{self._each} each"
                )
            self._own[who] += 1
        try:
            yield
        finally:
            with self._lock:
                self._own[who] -= 1
                if not self._own[who]:
                    del self._own[who]

    def _wait(self) -> None:
        if not self._waiting.acquire(blocking=False):
            raise Busy(
                f"all {self.count} places for {self._what} are taken, and "
                f"{MOST_WAITING} {self._what} wait for one"
            )
        try:
            if not self._free.acquire(timeout=self._wait_s):
                raise Busy(
                    f"all {self.count} places for {self._what} were taken for "
                    f"{self._wait_s:g} s"
                )
        finally:
            self._waiting.release()


def allow_connections(connections: int) -> int:
    """Raise this process's limit on open files as far as `connections` need it. Warn if
    the system's limit is lower. Return how many of them leave room for other files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        logger.warning(
            "islands may open %d connections, and this process may open %d files: "
            "the oldest idle ones make room for those beyond; "
            "raise the limit (ulimit -Hn, LimitNOFILE=), or lower "
            "placement.bulk_channels",
            connections,
            limit,
        )
    return min(connections, max(limit - OTHER_FILES, limit // 2))
