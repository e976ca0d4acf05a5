"""Connections on which both ends speak at once: those of a lead and its workers.

`WorkerLine` carries messages of the two over a connection with mutual TLS. A message is
its length (u32, little-endian) and MessagePack. Either process hears that the other has
died: at once if its machine lives, else after a silence.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from cryptography import x509

from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol import holding
from diloco_jax.wire import peers
from diloco_jax.wire.addresses import parse_address
from diloco_jax.wire.bulk import prepare
from diloco_jax.wire.errors import ConnectionLost, SecurityError
from diloco_jax.wire.tls import Renewed, TlsFiles, principal_of

logger = logging.getLogger(__name__)

_PART_BYTES = 256 << 10


class TlsEnd:
    """A TLS connection for two threads: one may send while another receives, and any
    may shut it down. It has a socket's methods.

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
        """Set the seconds after which sending and receiving raise TimeoutError."""
        self._socket.settimeout(value)

    def sendall(self, data: bytes, /) -> None:
        """Send bytes. Raises OSError."""
        view = memoryview(data)
        while view:
            with self._order:
                with self._state:
                    view = view[self._tls.write(view[:_PART_BYTES]) :]
                    unsent = self._unsent.read()
                self._socket.sendall(unsent)

    def recv(self, bufsize: int, /) -> bytes:
        """Return the next bytes; none if the other end is closed. Raises OSError."""
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
        """End what other threads send and receive. Raises OSError if it has ended."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the connection."""
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


End = socket.socket | TlsEnd
"""One end of a connection."""


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
        whose, field = principal_of(found), "placement.worker_addresses"
        if wrong := peers.mismatch(whose, field, peers.worker(worker)):
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


_LENGTH = struct.Struct("<I")


class WorkerLine:
    """One end. `send`, from any thread, never waits for the other process."""

    def __init__(
        self,
        end: End,
        decode: Callable[[bytes], Any],
        alive: Callable[[], msgspec.Struct],
        alive_s: float,
        silence_s: float,
        start_s: float = 0.0,
    ) -> None:
        """Begin to send, and to receive what `messages` yields later.

        Args:
          decode: turns the bytes of a message into it.
          alive: makes the sign of life that is sent after `alive_s` without a message.
          silence_s: seconds without a message after which the other process counts as
            gone. It also counts as gone if it takes no message for so
            long: it takes them while it restores or saves for minutes, too.
          start_s: seconds until its first message, if they may be more.
        """
        end.settimeout(max(silence_s, start_s))
        self._silence_s = silence_s
        self._end, self._decode, self._alive_s = end, decode, alive_s
        self.alive = alive
        # It holds few: a sign of life, and messages of merges that are under way.
        self._waiting: queue.SimpleQueue[msgspec.Struct | None] = queue.SimpleQueue()
        self._writer = threading.Thread(
            target=self._write, name="diloco-line", daemon=True
        )
        self._writer.start()
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Frames, and None once the line broke."""
        threading.Thread(target=self._read, name="diloco-heard", daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, after those before it; nothing happens if the line broke."""
        self._waiting.put(message)

    def messages(self) -> Iterator[Any]:
        """Yield the messages that arrive, until the line breaks. Raises
        msgspec.DecodeError.
        """
        while (frame := self._arrived.get()) is not None:
            yield self._decode(frame)

    def part(self) -> None:
        """Break the line at once; both processes notice."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break the line. Messages that wait are sent first, if the other process reads
        them.
        """
        self._waiting.put(None)
        self._writer.join(1.0)
        self.part()
        self._end.close()

    def _read(self) -> None:
        frame: bytes | None = b""
        while frame is not None:
            frame = read_frame(self._end)
            with contextlib.suppress(OSError):  # It may be closed by now.
                self._end.settimeout(self._silence_s)
            self._arrived.put(frame)

    def _write(self) -> None:
        message: msgspec.Struct | None = None
        try:
            while (message := self._next()) is not None:
                write_frame(self._end, message)
        except OSError:
            self.part()  # The reader finds out too.
        except Exception:  # Without this thread, the process would be silent.
            logger.exception(
                "%s cannot be sent, so the line to the other process is broken; report "
                "the cause below as a defect",
                type(message).__name__,
            )
            self.part()

    def _next(self) -> msgspec.Struct | None:
        """Return what is sent next; None: nothing ever."""
        try:
            return self._waiting.get(timeout=self._alive_s)
        except queue.Empty:
            return self.alive()


def write_frame(end: End, message: msgspec.Struct) -> None:
    """Send one message. Raises OSError if the line is broken."""
    frame = holding.encode(message)
    end.sendall(_LENGTH.pack(len(frame)) + frame)


def read_frame(end: End) -> bytes | None:
    """Return the bytes of the next message; None if the line is broken."""
    head = _read(end, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    return None if length > holding.MAX_FRAME_BYTES else _read(end, length)


def _read(end: End, nbytes: int) -> bytes | None:
    got = bytearray()
    while len(got) < nbytes:
        try:
            part = end.recv(nbytes - len(got))
        except OSError:
            return None
        if not part:
            return None
        got += part
    return bytes(got)
