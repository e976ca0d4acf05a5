"""Connections to a bulk port, made when needed and kept for the next transfer.

The one that was given back last is taken first. So those that only a burst of transfers
needed, as the start of an island is, rest at the bottom, and are closed after `rest_s`:
each costs a descriptor at either end.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time

from cryptography import x509

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import addresses, principal
from diloco_jax.wire.connection import BulkConnection, prepare
from diloco_jax.wire.errors import ConnectionLost, SecurityError
from diloco_jax.wire.peers import principal_of
from diloco_jax.wire.reachability import explain
from diloco_jax.wire.tls import Renewed, TlsFiles


class Connections:
    """Connections of one client to one port. Any thread may take one."""

    def __init__(
        self,
        address: str,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        most: int,
        worker: int | None = None,
        island: str | None = None,
    ) -> None:
        """most: connections that are kept while nothing uses them. worker, island: the
        coordinator's worker, or the island, that has to answer; None: the
        coordinator."""
        self.address, self._worker, self._island = address, worker, island
        self._deadlines, self._most = deadlines, most
        make = TlsFiles.client_context if island is None else TlsFiles.peer_context
        self._tls = Renewed(tls, make) if tls is not None else None
        self._context: ssl.SSLContext | None = None
        """That of the idle connections."""
        self._lock = threading.Lock()
        self._idle: list[tuple[float, BulkConnection]] = []
        """With the time since which each rests, longest rest first."""
        self._closed = False

    def take(self) -> BulkConnection:
        """Return a connection for one transfer: an idle one, or a new one.

        A new one takes at most about `connect_s`. Once certificates are renewed, idle
        connections of the old ones are closed. Raises ConnectionLost or SecurityError,
        each with its remedy.
        """
        context = self._tls.current() if self._tls is not None else None
        if context is not self._context:
            self._end_idle(context)
        while True:
            with self._lock:
                if self._closed:
                    raise ConnectionLost(f"the client of {self.address} is closed")
                found = self._idle.pop()[1] if self._idle else None
            if found is None:
                return self._dial(context)
            if not found.spoken():
                return found
            found.close()  # The coordinator ended it, or was started again.

    def give(self, connection: BulkConnection) -> None:
        """Give a connection back; it is kept if its transfer ended well."""
        now = time.monotonic()
        ended = []
        with self._lock:
            while self._idle and now - self._idle[0][0] > self._deadlines.rest_s:
                ended.append(self._idle.pop(0)[1])
            keep = connection.between and not self._closed
            if keep and len(self._idle) < self._most:
                self._idle.append((now, connection))
            else:
                ended.append(connection)
        for one in ended:
            one.close()

    def close(self) -> None:
        """Close the idle connections; later calls of `take` raise ConnectionLost."""
        with self._lock:
            self._closed = True
        self._end_idle(None)

    def _end_idle(self, context: ssl.SSLContext | None) -> None:
        """Close the idle connections. context: that of later ones."""
        with self._lock:
            idle, self._idle, self._context = self._idle, [], context
        for _, connection in idle:
            connection.close()

    def _dial(self, context: ssl.SSLContext | None) -> BulkConnection:
        host, port = addresses.parse_address(self.address)
        limit_s = self._deadlines.connect_s
        try:
            connection = socket.create_connection((host, port), limit_s)
            try:
                prepare(connection, self._deadlines)
                if context is not None:
                    connection = secure = context.wrap_socket(
                        connection, server_hostname=host
                    )
                    self._require_known(secure)
                connection.settimeout(None)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            # As short as elsewhere: a socket answers at once or never.
            files = self._tls.files if self._tls is not None else None
            cause = explain(self.address, files, limit_s / 4)
            raise cause or ConnectionLost(f"{self.address}: {error}") from error
        return BulkConnection(connection, self.address)

    def _require_known(self, connection: ssl.SSLSocket) -> None:
        """Raise SecurityError unless the worker or island that was dialled answers."""
        if self._worker is None and self._island is None:
            return
        encoded = connection.getpeercert(binary_form=True)
        assert encoded is not None
        server = principal_of(x509.load_der_x509_certificate(encoded))
        if self._island is not None:
            wrong = principal.not_island(server, self._island)
        else:
            wrong = principal.not_worker(server, self._worker or 0)
        if wrong:
            raise SecurityError(f"{self.address}: {wrong}")
