"""Connections on which both ends speak at once: those of a lead and its workers.

`WorkerLine` carries messages of the two over a connection with mutual TLS. A message is
its length (u32, little-endian) and MessagePack. Either process hears that the other has
died: at once if its machine lives, else after a silence.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol import holding
from diloco_jax.wire import peers
from diloco_jax.wire.bulk import prepare
from diloco_jax.wire.tls import Renewed, dial

logger = logging.getLogger(__name__)

_PART_BYTES = 256 << 10
Given = TypeVar("Given")
Got = TypeVar("Got")


class TlsEnd:
    """A TLS connection for two threads: one may send while another receives, and any
    may shut it down. It has a socket's methods.

    OpenSSL's objects do not suit two threads at once: they take turns, and nobody has a
    turn while the socket waits.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """Take over a connection that has shaken hands."""
        self._socket, self._timeout_s = connection, connection.gettimeout()
        self._turn, self._descriptor = threading.Lock(), connection.fileno()
        connection.setblocking(False)

    def settimeout(self, value: float | None, /) -> None:
        """Set the seconds after which sending and receiving raise TimeoutError."""
        self._timeout_s = value

    def sendall(self, data: bytes, /) -> None:
        """Send bytes. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[self._taking_turns(self._socket.send, view[:_PART_BYTES]) :]

    def recv(self, bufsize: int, /) -> bytes:
        """Return the next bytes; none if the other end is closed. Raises OSError."""
        return self._taking_turns(self._socket.recv, bufsize)

    def shutdown(self, how: int, /) -> None:
        """End what other threads send and receive. Raises OSError if it has ended."""
        # Not TLS's own, which does not suit two threads.
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Close the connection."""
        with self._turn:  # Nobody reads or writes in what gets its number next.
            self._socket.close()

    def _taking_turns(self, act: Callable[[Given], Got], given: Given) -> Got:
        while True:
            try:
                with self._turn:
                    return act(given)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            ready = select.poll()
            ready.register(self._descriptor, event)
            if not ready.poll(self._timeout_s and 1000 * self._timeout_s):
                raise TimeoutError("timed out")


def for_two_threads(connection: socket.socket) -> End:
    """Return an end of a connection on which one thread may send while another
    receives."""
    return TlsEnd(connection) if isinstance(connection, ssl.SSLSocket) else connection


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
    as `tls.dial`.
    """
    who = peers.worker(worker)
    field = "placement.worker_addresses"
    connection = dial(address, tls, deadlines.connect_s, who, field=field)
    prepare(connection, deadlines)
    return for_two_threads(connection)


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
