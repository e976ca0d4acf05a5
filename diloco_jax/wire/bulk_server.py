"""A bulk port: the coordinator's or a worker's, for uploads, fetches and kept files;
an island's, for fetches of others of its region.

A connection without a transfer costs an open file and no thread: one thread holds all
of them. So a peer that shakes hands slowly, stays silent, or does not read why it is
refused, holds up nobody else. Connections are counted from the handshake to their end,
and by certificate as soon as it is known. A worker's port for its lead, and that for
Prometheus, accept theirs in the same way.

A transfer holds a thread and a slot until it is done. A peer that sends no request
loses its slot after `connect_s`, and one that stops in the middle of a payload after
`idle_s`. A transfer that finds no slot waits for a while. Then its peer is told Busy,
pauses and asks again: an upload until `budget_s`, a fetch until `pin_s`
(`transfers.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from diloco_jax.config.placement import Deadlines
from diloco_jax.errors import OUT_OF_FILES
from diloco_jax.wire import addresses, bulk, errors, peers
from diloco_jax.wire.bulk import BulkConnection, prepare
from diloco_jax.wire.errors import Busy, ConnectionLost, RemoteProtocolError, WireError
from diloco_jax.wire.peers import (
    COORDINATOR,
    OPERATOR,
    DaemonPool,
    Guard,
    IdleWatch,
    Principal,
    Quota,
    RateLimitedLog,
    TransferSlots,
    island,
    require,
)
from diloco_jax.wire.session import Handlers, log_about
from diloco_jax.wire.tls import Peers, TlsFiles

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_DRAIN_BYTES = 256 << 10
REFUSED_EACH = 4
"""Connections of a certificate that is refused: enough to be told why."""


class Acceptor:
    """Accept connections, shake hands, wait for requests on idle connections, have them
    served, and see off those that have had their last answer."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        tls: TlsFiles | None,
        serve: Callable[[BulkConnection], None],
        deadlines: Deadlines,
        *,
        most: int,
        threads: int,
        most_each: int | None = None,
        idle_s: float = math.inf,
        check: Callable[[BulkConnection], object] = lambda _: None,
    ) -> None:
        """Make the acceptor; `start` starts its thread.

        Args:
          name: of its threads.
          listener: is closed at the end.
          serve: serves a connection on which a request arrives, on one of `threads`.
          most: largest number of connections; beyond it the oldest one is closed that
            shakes hands, is seen off, or is idle.
          most_each: largest number with one certificate; those beyond are closed.
          idle_s: time after which a connection without a request is closed.
          check: raises WireError if the peer's certificate does not count.
        """
        self._name, self._listener, self._serve = name, listener, serve
        self._context = tls.server_contexts() if tls is not None else lambda: None
        self._check, self._deadlines, self._idle_s = check, deadlines, idle_s
        self._most, self._most_each = most, most_each or most
        self._awake, self._alarm = socket.socketpair()
        self._changed = threading.Condition()
        self._back: list[BulkConnection] = []
        """Connections that were served."""
        self._serving: set[BulkConnection] = set()
        self._stopping = False
        self._pool = DaemonPool(threads, name)
        self._thread = threading.Thread(
            target=self._run, name=f"{name}-acceptor", daemon=True
        )
        self._selector = selectors.DefaultSelector()
        self._shaking: dict[BulkConnection, float] = {}
        """Connections that shake hands, and when they are closed, oldest first."""
        self._leaving: dict[BulkConnection, float] = {}
        """Likewise, connections that have had their last answer."""
        self._idle: dict[BulkConnection, float] = {}
        """Likewise, connections that may ask for something."""
        self._known: set[BulkConnection] = set()
        """All that have shaken hands: idle, leaving, or served elsewhere."""
        self._own: Counter[bytes] = Counter()
        """How many those are, by certificate."""
        self._checked = time.monotonic()
        self._place = bytearray(_DRAIN_BYTES)
        self._lines = RateLimitedLog(at_once=1)

    def start(self) -> None:
        """Serve what comes, until `stop`."""
        self._pool.submit(int)  # One thread stays, whatever the system refuses later.
        self._thread.start()

    def stop(self, grace_s: float = 0.0) -> None:
        """Accept nothing more, and close what is not served; cut off what still is
        after `grace_s`."""
        deadline = time.monotonic() + grace_s
        with self._changed:
            self._stopping = True
        self._ring()
        self._thread.join(self._deadlines.stop_s)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._serving, max(0.0, deadline - time.monotonic())
            )
            for connection in self._serving:
                connection.cut()
        self._pool.close(1.0)

    def failed(self, what: str, why: object, peer: str = "") -> None:
        """Log that a connection failed: one line a minute about strangers, who may be
        many. Any thread may call this."""
        text = ": ".join(filter(None, (self._name, what, peer, str(why))))
        self._lines.log(logger, logging.WARNING, what, text)

    def _begin(self, connection: BulkConnection) -> None:
        """Serve what a connection asks for, on a thread of the pool."""
        with self._changed:
            self._serving.add(connection)
        connection.between = False
        try:
            self._pool.submit(self._work, connection)
        except RuntimeError:  # The pool is closed, or the system out of threads.
            self._give_back(connection)

    def _work(self, connection: BulkConnection) -> None:
        try:
            self._serve(connection)
        except (OSError, WireError) as error:
            self.failed("a connection failed", error, connection.peer)
        except Exception:
            logger.exception("%s failed on a connection", self._name)
        finally:
            self._give_back(connection)

    def _give_back(self, connection: BulkConnection) -> None:
        """Wait for the next request of a connection that was served, or see it off;
        after `stop`, close it."""
        with self._changed:
            self._serving.discard(connection)
            self._changed.notify_all()
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
        ours = (self._listener, self._awake, self._alarm)
        for one in ours:
            one.setblocking(False)
        for one in ours[:2]:
            self._selector.register(one, selectors.EVENT_READ)
        while not self._stopping:
            for key, _ in self._selector.select(_POLL_S):
                try:
                    self._ready(key.fileobj)
                except Exception:
                    logger.exception("%s failed on a connection", self._name)
            self._close_late()
        self._selector.close()
        for one in ours:
            one.close()
        for waiting in (self._shaking, self._leaving, self._idle, self._returned()):
            for connection in waiting:
                connection.close()

    def _returned(self) -> list[BulkConnection]:
        with self._changed:
            back, self._back = self._back, []
        return back

    def _ready(self, who: object) -> None:
        if who is self._listener:
            self._accept()
        elif who is self._awake:
            self._awake.recv(4096)
            for connection in self._returned():
                if connection.between:
                    self._await_request(connection)
                elif connection.parted:
                    self._see_off(connection)
                else:
                    self._close(connection)
        elif not isinstance(who, BulkConnection):
            return
        elif who in self._idle:
            self._take(who)
            self._begin(who)
        elif who in self._leaving:
            if not who.drain(self._place):
                self._close(who)
        elif who in self._shaking:
            self._shake_hands(who)

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self.failed("a connection could not be accepted", error)
                if error.errno not in OUT_OF_FILES or not self._drop_oldest():
                    time.sleep(0.05)  # Those that end free some.
            return
        peer = addresses.format_address(address[0], address[1])
        try:
            full = len(self._shaking) + len(self._known) >= self._most
            if full and not self._drop_oldest():
                raise OSError(f"all {self._most} connections are served")
            prepare(accepted, self._deadlines)
            context = self._context()
            if context is not None:
                accepted.setblocking(False)
                accepted = context.wrap_socket(
                    accepted, server_side=True, do_handshake_on_connect=False
                )
        except BaseException as error:
            accepted.close()
            if not isinstance(error, OSError):
                raise
            self.failed("a connection broke off", error, peer)
            return
        connection = BulkConnection(accepted, peer)
        self._wait(connection, self._shaking, self._deadlines.connect_s)
        self._shake_hands(connection)

    def _shake_hands(self, connection: BulkConnection) -> None:
        try:
            awaits = connection.shake_hands()
        except (OSError, ValueError) as error:
            # Most who hang up ask only whether this process listens, as Kubernetes does
            # every few seconds.
            if isinstance(error, ssl.SSLEOFError | ConnectionResetError):
                logger.debug("%s hung up in a TLS handshake", connection.peer)
            else:
                self.failed("a TLS handshake failed", error, connection.peer)
            self._take(connection)
            connection.close()
            return
        if awaits:
            self._selector.modify(connection, awaits)
        else:
            self._take(connection)
            self._let_in(connection)

    def _let_in(self, connection: BulkConnection) -> None:
        """Keep a connection whose certificate is known, if it has its share left."""
        owner, refused = connection.certificate, self._refusal(connection)
        most = self._most_each if refused is None else REFUSED_EACH
        if owner and self._own[owner] >= most:
            connection.close()
            why = refused or f"it has {most} already"
            what = "a connection beyond its peer's share was closed"
            self.failed(what, why, connection.peer)
            return
        self._known.add(connection)
        self._own[owner] += 1
        if refused is None:
            self._await_request(connection)
        else:
            self.failed("a connection was refused", refused, connection.peer)
            self._see_off(connection, refused)

    def _refusal(self, connection: BulkConnection) -> WireError | None:
        try:
            self._check(connection)
        except WireError as error:
            return error
        return None

    def _await_request(self, connection: BulkConnection) -> None:
        self._wait(connection, self._idle, self._idle_s)
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
        self._wait(connection, self._leaving, self._deadlines.retry_max_s)

    def _wait(
        self,
        connection: BulkConnection,
        among: dict[BulkConnection, float],
        seconds: float,
    ) -> None:
        self._selector.register(connection, selectors.EVENT_READ)
        among[connection] = time.monotonic() + seconds

    def _take(self, connection: BulkConnection) -> None:
        """Wait for a connection no longer."""
        for waiting in (self._shaking, self._leaving, self._idle):
            if waiting.pop(connection, None) is not None:
                self._selector.unregister(connection)

    def _close(self, connection: BulkConnection) -> None:
        """Close a connection without a transfer, and forget it."""
        self._take(connection)
        if connection in self._known:
            self._known.remove(connection)
            owner = connection.certificate
            self._own[owner] -= 1
            if not self._own[owner]:
                del self._own[owner]
        connection.close()

    def _close_late(self) -> None:
        now = time.monotonic()
        for waiting in (self._shaking, self._leaving, self._idle):
            while waiting and next(iter(waiting.values())) <= now:
                self._close(next(iter(waiting)))
        if now >= self._checked + _POLL_S:
            self._checked = now
            self._end_refused()

    def _end_refused(self) -> None:
        """End what was let in before its certificate was revoked."""
        refused: dict[bytes, WireError | None] = {}
        for connection in list(self._known - self._leaving.keys()):
            owner = connection.certificate
            if owner not in refused:
                refused[owner] = self._refusal(connection)
            why = refused[owner]
            if why is not None and connection in self._idle:
                self._take(connection)
                self._see_off(connection, why)
            elif why is not None:
                connection.cut()

    def _drop_oldest(self) -> bool:
        """Close the oldest connection that shakes hands, is seen off, or is idle;
        return False if there is none."""
        waiting = itertools.chain(self._shaking, self._leaving, self._idle)
        oldest = next(waiting, None)
        if oldest is not None:
            self._close(oldest)
        return oldest is not None


_SPARE_CONNECTIONS = 64


class BulkServer:
    """One bulk port. It listens and serves from `start` to `stop`."""

    def __init__(
        self,
        handlers: Handlers,
        *,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        max_hosts: int,
        bulk_channels: int,
        max_hosts_each: int | None = None,
        log: RateLimitedLog | None = None,
    ) -> None:
        """Arguments are those of `server.Server`. log: its lines about peers; None =
        lines of this port alone."""
        self.handlers = handlers
        """May be replaced at any time; transfers under way end with the old ones."""
        self._lines = log or RateLimitedLog()
        self._tls = tls
        self._peers = Peers(tls.folder if tls is not None else None)
        self._deadlines = deadlines
        self._connect_s, self._idle_s = deadlines.connect_s, deadlines.idle_s
        # A host may send and fetch on all of its channels at once.
        wanted = 2 * bulk_channels * max_hosts
        self._each = 2 * bulk_channels * (max_hosts_each or max_hosts)
        self._slots = TransferSlots(wanted, deadlines.retry_max_s, self._each)
        self._quotas: dict[Principal, Quota] = {}
        self.connections = 2 * wanted + _SPARE_CONNECTIONS
        """Most connections: twice what all hosts need, since a lost host may be back
        before its old ones are known to be dead."""
        self._watch = IdleWatch("diloco-bulk-watch")
        self._acceptor: Acceptor | None = None

    def start(self, listener: socket.socket) -> None:
        """Serve what comes to a socket that listens, which is closed at the end."""
        acceptor = Acceptor(
            "diloco-bulk",
            listener,
            self._tls,
            self.answer,
            self._deadlines,
            most=self.connections,
            threads=self._slots.threads,
            most_each=2 * self._each,
            check=self._identify,
        )
        acceptor.start()
        self._acceptor = acceptor

    def stop(self, grace_s: float) -> None:
        """Accept nothing more; cut off transfers that still run after `grace_s`."""
        if self._acceptor is not None:
            self._acceptor.stop(grace_s)
        self._watch.close(1.0)

    def answer(self, connection: BulkConnection) -> None:
        """Receive one request and carry it out. If it fails, tell the peer why."""
        received = connection.received_bytes
        try:
            with contextlib.ExitStack() as held:
                self._answer(connection, held)
        except ConnectionLost as error:
            if connection.received_bytes > received:  # Else it asked for nothing more.
                self._log(logging.INFO, connection, f"a transfer broke off: {error}")
        except Exception as error:
            level, telling = errors.told(error)
            # Who is told to come again does so many times.
            level = logging.DEBUG if isinstance(error, Busy) else level
            self._log(level, connection, f"answered {connection.peer}: {telling}")
            connection.part(errors.failure_of(telling))

    def _log(self, level: int, connection: BulkConnection, text: str) -> None:
        identify = functools.partial(self._identify, connection)
        log_about(self._lines, logger, level, identify, text)

    def _identify(self, connection: BulkConnection) -> Principal | None:
        """Return who calls, None without TLS. Raises WireError."""
        return self._peers.identify(connection.certificate)

    def _answer(self, connection: BulkConnection, held: contextlib.ExitStack) -> None:
        who = self._identify(connection)
        held.enter_context(self._slots.taken(who))
        if who is not None:
            fresh = peers.requests_quota(who, self._each)
            time.sleep(self._quotas.setdefault(who, fresh).wait_s(1))
        with self._watch.guard(self._connect_s, connection.cut):
            request = connection.receive(bulk.bulk_request)
        guard = held.enter_context(self._watch.guard(self._idle_s, connection.cut))
        self._carry_out(connection, who, request, guard)
        connection.between = True

    def _carry_out(
        self,
        connection: BulkConnection,
        who: Principal | None,
        request: bulk.Request,
        guard: Guard,
    ) -> None:
        handlers = self.handlers
        if isinstance(request, bulk.UploadStart | bulk.FetchRequest):
            of_lead = isinstance(request, bulk.FetchRequest) and request.theta
            require(who, COORDINATOR if of_lead else island(request.island))
        match request:
            case bulk.UploadStart():
                self._upload(connection, request, guard)
            case bulk.FetchRequest():
                self._fetch(connection, request, handlers.fetch(request), guard)
            case bulk.CycleRequest():
                require(who, OPERATOR)
                view = handlers.kept(request.cycle, request.name)
                connection.send(bulk.KeptStart(total=view.nbytes))
                _send(connection, [view], 0, view.nbytes, guard)

    def _fetch(
        self,
        connection: BulkConnection,
        wanted: bulk.FetchRequest,
        source: bulk.FetchSource,
        guard: Guard,
    ) -> None:
        """Send the stripe of the payload that is asked for."""
        if not (0 <= wanted.offset <= source.total and wanted.length >= -1):
            raise RemoteProtocolError(
                f"{connection.peer} asked for {wanted.length} bytes from "
                f"{wanted.offset} on, of a payload of {source.total}"
            )
        length = source.total - wanted.offset
        if wanted.length >= 0:
            length = min(length, wanted.length)
        connection.send(
            bulk.FetchStart(
                version=source.version,
                count=source.count,
                total=source.total,
                offset=wanted.offset,
                length=length,
            )
        )
        _send(connection, source.buffers, wanted.offset, length, guard)
        source.sent(length)

    def _upload(
        self, connection: BulkConnection, start: bulk.UploadStart, guard: Guard
    ) -> None:
        if not 0 <= start.offset <= start.offset + start.length <= start.total:
            raise RemoteProtocolError(
                f"{connection.peer} announced bytes {start.offset} to "
                f"{start.offset + start.length} of a payload of {start.total}"
            )
        handlers = self.handlers
        with handlers.upload_begin(start) as place:
            with place.cast("B") as view:
                # A shorter place takes chunk after chunk, and they go nowhere.
                stored, wanted = 0, len(view) == start.length
                while left := start.length - stored:
                    room = view[stored:] if wanted else view[:left]
                    at = start.offset + stored
                    stored += connection.receive_chunk(room, at, guard)
            complete = handlers.upload_end(start, place)
        connection.send(bulk.UploadDone(complete=complete))


def _send(
    connection: BulkConnection,
    buffers: Sequence[bulk.Payload],
    offset: int,
    length: int,
    guard: Guard,
) -> None:
    """Send a part of a payload; ConnectionLost if the peer ends it."""
    if not connection.send_payload(buffers, offset, length, guard):
        raise ConnectionLost(f"{connection.peer} ended a fetch")
