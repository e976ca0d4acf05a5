"""A bulk port: connections, threads and places, whatever is asked for there.

A transfer holds a thread and a place (`places.py`) until it is done. A peer that sends
no request loses its place after `connect_s`, and one that stops in the middle of a
payload after `idle_s`. Connections without a transfer wait in `acceptor.py`, those
that are refused included. It bounds them, and so the transfers that wait for a thread.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import encoding, errors, frames, quota
from diloco_jax.wire.acceptor import Acceptor
from diloco_jax.wire.bulk import FetchRequest, FetchStart, Request
from diloco_jax.wire.connection import BulkConnection
from diloco_jax.wire.errors import Busy, ConnectionLost, RemoteProtocolError, WireError
from diloco_jax.wire.fetch_source import FetchSource
from diloco_jax.wire.few_lines import FewLines
from diloco_jax.wire.peers import Peers
from diloco_jax.wire.places import Places
from diloco_jax.wire.principal import Principal
from diloco_jax.wire.quota import Quota
from diloco_jax.wire.session import internal_error
from diloco_jax.wire.threads import DaemonPool, Guard, IdleWatch
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

_SPARE_CONNECTIONS = 64


class BulkPort(abc.ABC):
    """One bulk port. It listens and serves from `start` to `stop`."""

    def __init__(
        self,
        *,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        max_hosts: int,
        bulk_channels: int,
        max_hosts_each: int | None = None,
        lines: FewLines | None = None,
    ) -> None:
        """Arguments are those of `server.Server`. lines: of its log about peers; None =
        lines of this port alone."""
        self._lines = lines or FewLines()
        self._contexts = tls.server_contexts() if tls is not None else lambda: None
        self._peers = Peers(tls.folder) if tls is not None else None
        self._deadlines = deadlines
        # A host may send and fetch on all of its channels at once.
        wanted = 2 * bulk_channels * max_hosts
        each = 2 * bulk_channels * (max_hosts_each or max_hosts)
        self._places = Places(wanted, deadlines.retry_max_s, each)
        self._each = each
        self._quotas: dict[Principal, Quota] = {}
        self.connections = 2 * wanted + _SPARE_CONNECTIONS
        """Most connections: twice what all hosts need, since a lost host may be back
        before its old ones are known to be dead."""
        self._watch = IdleWatch("diloco-bulk-watch")
        self._pool = DaemonPool(self._places.threads, "diloco-bulk")
        self._acceptor: Acceptor | None = None
        self._changed = threading.Condition()
        self._serving: set[BulkConnection] = set()

    def start(self, listener: socket.socket) -> None:
        """Serve what comes to a socket that listens, which is closed at the end."""
        self._pool.submit(int)  # One thread stays, whatever the system refuses later.
        self._acceptor = Acceptor(
            listener,
            self._contexts,
            self._begin,
            self._deadlines,
            self.connections,
            most_each=2 * self._each,
            check=self._identify,
        )
        self._acceptor.start()

    def stop(self, grace_s: float) -> None:
        """Accept nothing more; cut off transfers that still run after `grace_s`."""
        deadline = time.monotonic() + grace_s
        if self._acceptor is not None:
            self._acceptor.stop()
        with self._changed:
            self._changed.wait_for(
                lambda: not self._serving, max(0.0, deadline - time.monotonic())
            )
            for connection in self._serving:
                connection.cut()
        self._pool.close(1.0)
        self._watch.close(1.0)

    def _begin(self, connection: BulkConnection) -> None:
        """Serve what a connection asks for, on a thread of the pool."""
        with self._changed:
            self._serving.add(connection)
        connection.between = False
        try:
            self._pool.submit(self._serve, connection)
        except RuntimeError:  # The pool is closed, or the system out of threads.
            self._done(connection)

    def _serve(self, connection: BulkConnection) -> None:
        try:
            self.answer(connection)
        finally:
            self._done(connection)

    def _done(self, connection: BulkConnection) -> None:
        with self._changed:
            self._serving.discard(connection)
            self._changed.notify_all()
        assert self._acceptor is not None
        self._acceptor.give_back(connection)

    def answer(self, connection: BulkConnection) -> None:
        """Receive one request and carry it out. If it fails, tell the peer why."""
        try:
            with contextlib.ExitStack() as held:
                self._answer(connection, held)
        except ConnectionLost as error:
            self._log(logging.INFO, connection, f"a transfer broke off: {error}")
        except WireError as error:
            # Who is told to come again does so many times.
            level = logging.DEBUG if isinstance(error, Busy) else logging.INFO
            self._log(level, connection, f"answered {connection.peer}: {error}")
            connection.part(errors.failure_of(error))
        except Exception as error:
            text = f"a transfer with {connection.peer} failed"
            self._log(logging.ERROR, connection, text)
            connection.part(errors.failure_of(internal_error(error)))

    def _log(self, level: int, connection: BulkConnection, text: str) -> None:
        who = None
        with contextlib.suppress(WireError):
            who = self._identify(connection)
        self._lines.log(logger, level, who, text, trace=level >= logging.ERROR)

    def _answer(self, connection: BulkConnection, held: contextlib.ExitStack) -> None:
        who = self._identify(connection)
        held.enter_context(self._places.taken(who))
        if who is not None:
            time.sleep(self._quota(who).wait_s(1))
        with self._watch.guard(self._deadlines.connect_s, connection.cut):
            request = connection.receive(encoding.bulk_request)
        guard = held.enter_context(
            self._watch.guard(self._deadlines.idle_s, connection.cut)
        )
        self.carry_out(connection, who, request, guard)
        connection.between = True

    @abc.abstractmethod
    def carry_out(
        self,
        connection: BulkConnection,
        who: Principal | None,
        request: Request,
        guard: Guard,
    ) -> None:
        """Carry out a request of `who`, None without TLS."""

    def send_fetched(
        self,
        connection: BulkConnection,
        wanted: FetchRequest,
        source: FetchSource,
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
            FetchStart(
                version=source.version,
                full=source.full,
                count=source.count,
                total=source.total,
                offset=wanted.offset,
                length=length,
            )
        )
        self.send_payload(connection, source.buffers, wanted.offset, length, guard)

    def send_payload(
        self,
        connection: BulkConnection,
        buffers: Sequence[frames.Payload],
        offset: int,
        length: int,
        guard: Guard,
    ) -> None:
        """Send a part of a payload; ConnectionLost if the peer ends it."""
        if not connection.send_payload(buffers, offset, length, guard):
            raise ConnectionLost(f"{connection.peer} ended a fetch")

    def _identify(self, connection: BulkConnection) -> Principal | None:
        """Return who calls, None without TLS. Raises WireError."""
        if self._peers is None:
            return None
        return self._peers.identify(connection.certificate())

    def _quota(self, who: Principal) -> Quota:
        """Return the quota of one peer's requests, over all of its connections."""
        rate = max(quota.REQUESTS_PER_SECOND * self._each, quota.LEAST_REQUESTS)
        fresh = Quota(str(who), rate, quota.BURST_S * rate, "requests for bulk")
        return self._quotas.setdefault(who, fresh)
