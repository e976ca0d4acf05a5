"""Connections on which both ends speak at once: those of a lead and its workers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import Protocol

from cryptography import x509

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import principal
from diloco_jax.wire.addresses import parse_address
from diloco_jax.wire.errors import ConnectionLost, SecurityError
from diloco_jax.wire.frames import prepare
from diloco_jax.wire.tls import Renewed, TlsFiles

_PART_BYTES = 256 << 10


class End(Protocol):
    """One end of a connection. One thread may send while another receives; any may
    shut it down. A socket is one, and so is a `TlsEnd`."""

    def settimeout(self, value: float | None, /) -> None:
        """Set the seconds after which sending and receiving raise TimeoutError."""

    def sendall(self, data: bytes, /) -> None:
        """Send bytes. Raises OSError."""

    def recv(self, bufsize: int, /) -> bytes:
        """Return the next bytes; none if the other end is closed. Raises OSError."""

    def shutdown(self, how: int, /) -> None:
        """End what other threads send and receive. Raises OSError if it has ended."""

    def close(self) -> None:
        """Close the connection."""


class TlsEnd:
    """A TLS connection for two threads.

    OpenSSL's objects do not suit two threads at once. Here they see memory alone, under
    a lock that nobody holds while the socket waits.
    """

    def __init__(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        server_hostname: str | None = None,
    ) -> None:
        """Wrap a connection; `shake_hands` comes next. server_hostname: the name that
        the server's certificate must have; None: this is the server."""
        self._socket = connection
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._received,
            self._unsent,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        self._state = threading.Lock()
        self._order = threading.Lock()
        """Held while bytes go to the socket, so that records keep their order."""

    def shake_hands(self) -> None:
        """Prove who is who. Raises OSError; ssl.SSLError if that fails."""
        try:
            while True:
                try:
                    return self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    self._flush()
                    self._fill()
        finally:
            with contextlib.suppress(OSError):
                self._flush()  # The other end hears why.

    def certificate(self) -> bytes:
        """Return the certificate of the other end, DER."""
        return self._tls.getpeercert(binary_form=True) or b""

    def settimeout(self, value: float | None, /) -> None:
        """See `End`."""
        self._socket.settimeout(value)

    def sendall(self, data: bytes, /) -> None:
        """See `End`."""
        view = memoryview(data)
        while view:
            with self._order:
                with self._state:
                    view = view[self._tls.write(view[:_PART_BYTES]) :]
                    unsent = self._unsent.read()
                self._socket.sendall(unsent)

    def recv(self, bufsize: int, /) -> bytes:
        """See `End`."""
        while True:
            with self._state:
                try:
                    return self._tls.read(bufsize)
                except ssl.SSLWantReadError:
                    answers = bool(self._unsent.pending)
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return b""
            if answers:
                self._flush()
            self._fill()

    def shutdown(self, how: int, /) -> None:
        """See `End`."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """See `End`."""
        self._socket.close()

    def _flush(self) -> None:
        with self._order:
            with self._state:
                unsent = self._unsent.read()
            if unsent:
                self._socket.sendall(unsent)

    def _fill(self) -> None:
        found = self._socket.recv(_PART_BYTES)
        with self._state:
            if found:
                self._received.write(found)
            else:
                self._received.write_eof()


def dial_worker(
    address: str,
    worker: int,
    tls: Renewed[ssl.SSLContext] | None,
    deadlines: Deadlines,
) -> End:
    """Connect to a worker on another machine, which proves that it is this one.

    tls: the context of a client with the lead's files; None = without TLS. Raises
    ConnectionLost if it cannot be reached, or does not answer with TLS; SecurityError
    if its certificate is not of an authority that the lead trusts, not for this
    address, or not this worker's. Whether the worker lets the lead in shows only as it
    says its first word.
    """
    host, port = parse_address(address)
    try:
        connection = socket.create_connection((host, port), deadlines.connect_s)
    except OSError as error:
        raise ConnectionLost(
            f"{address}: no connection ({error}); check that `diloco worker` runs "
            f"there, the address in placement.worker_addresses, and firewalls"
        ) from error
    try:
        prepare(connection, deadlines)
        connection.settimeout(deadlines.connect_s)
        if tls is None:
            return connection
        end = TlsEnd(connection, tls.current(), host)
        _shake_hands(end, address, tls.files)
        found = x509.load_der_x509_certificate(end.certificate())
        whose, field = principal.principal_of(found), "placement.worker_addresses"
        if wrong := principal.mismatch(whose, field, principal.worker(worker)):
            raise SecurityError(f"{address}: {wrong}")
        return end
    except BaseException:
        connection.close()
        raise


def _shake_hands(end: TlsEnd, address: str, tls: TlsFiles) -> None:
    try:
        end.shake_hands()
    except ssl.SSLCertVerificationError as error:
        raise SecurityError(
            f"{address}: the certificate there does not fit {tls.folder / 'ca.pem'} or "
            f"this address: {error.verify_message}; use certificates of one authority, "
            f"and add the address with `diloco certs --add --hosts`"
        ) from error
    except OSError as error:
        raise ConnectionLost(
            f"{address} does not answer with TLS ({error}); check that `diloco worker` "
            f"listens there, with --certificates"
        ) from error
