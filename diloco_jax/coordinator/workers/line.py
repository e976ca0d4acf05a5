"""The line between a lead and a worker: messages over a connection with mutual TLS.

A message is its length (u32, little-endian) and MessagePack. Either process hears that
the other has died: at once if its machine lives, else after a silence.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from diloco_jax.protocol import holding
from diloco_jax.wire.duplex import End

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
        while True:
            try:
                message = self._waiting.get(timeout=self._alive_s)
            except queue.Empty:
                message = self.alive()
            if message is None:
                return
            try:
                write_frame(self._end, message)
            except OSError:
                self.part()  # The reader finds out too.
                return


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
