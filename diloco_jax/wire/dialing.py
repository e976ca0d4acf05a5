"""Connections to a bulk port, made when needed and kept for the next transfer."""

from __future__ import annotations

import socket
import ssl
import threading

from cryptography import x509

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import addresses, principal
from diloco_jax.wire.connection import BulkConnection, prepare
from diloco_jax.wire.errors import ConnectionLost, SecurityError
from diloco_jax.wire.peers import principal_of
from diloco_jax.wire.reachability import explain
from diloco_jax.wire.tls import TlsFiles


class Connections:
    """Connections of one client to one port. Any thread may take one."""

    def __init__(
        self,
        address: str,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        most: int,
        worker: int | None = None,
    ) -> None:
        """most: connections that are kept while nothing uses them. worker: the
        coordinator's worker that has to answer; None: the coordinator."""
        self.address, self._worker = address, worker
        self._tls, self._deadlines, self._most = tls, deadlines, most
        self._context = tls.client_context() if tls is not None else None
        self._lock = threading.Lock()
        self._idle: list[BulkConnection] = []
        self._closed = False

    def take(self) -> BulkConnection:
        """Return a connection for one transfer: an idle one, or a new one.

        A new one takes at most about `connect_s`. Raises ConnectionLost or
        SecurityError, each with its remedy.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise ConnectionLost(f"the client of {self.address} is closed")
                found = self._idle.pop() if self._idle else None
            if found is None:
                return self._dial()
            if not found.spoken():
                return found
            found.close()  # The coordinator ended it, or was started again.

    def give(self, connection: BulkConnection) -> None:
        """Give a connection back; it is kept if its transfer ended well."""
        with self._lock:
            keep = connection.between and not self._closed
            if keep := keep and len(self._idle) < self._most:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def close(self) -> None:
        """Close the idle connections; later calls of `take` raise ConnectionLost."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _dial(self) -> BulkConnection:
        host, port = addresses.parse_address(self.address)
        limit_s = self._deadlines.connect_s
        try:
            connection = socket.create_connection((host, port), limit_s)
            try:
                prepare(connection, self._deadlines)
                if self._context is not None:
                    connection = secure = self._context.wrap_socket(
                        connection, server_hostname=host
                    )
                    if self._worker is not None:
                        self._require_worker(secure, self._worker)
                connection.settimeout(None)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            # As short as elsewhere: a socket answers at once or never.
            cause = explain(self.address, self._tls, limit_s / 4)
            raise cause or ConnectionLost(f"{self.address}: {error}") from error
        return BulkConnection(connection, self.address)

    def _require_worker(self, connection: ssl.SSLSocket, worker: int) -> None:
        """Raise SecurityError unless the worker that was dialled answers."""
        encoded = connection.getpeercert(binary_form=True)
        assert encoded is not None
        server = principal_of(x509.load_der_x509_certificate(encoded))
        if wrong := principal.not_worker(server, worker):
            raise SecurityError(f"{self.address}: {wrong}")
