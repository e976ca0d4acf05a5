"""A link between one island and the coordinator that can be cut, slowed, delayed and
made to corrupt bulk.

Control and bulk pass through it. A cut link keeps its connections and holds their
bytes, as a network does that drops packets; nothing needs root.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time

from diloco_jax.wire import addresses

PIECE_BYTES = 1 << 16
IN_FLIGHT = 64
"""Pieces of one connection and direction that the link holds at most."""
LEAST_CORRUPT_BYTES = 1 << 12
"""Smallest piece that is corrupted: payload, while messages are shorter. They have no
checksum of their own on a link without TLS, and are left alone."""
DIAL_S = 5.0
LOOK_S = 0.2
"""Seconds between two looks whether the link is closed."""


Due = tuple[int, float]
"""Number of a direction's changes, and the monotonic time at which bytes are through if
there is no other."""


class Direction:
    """One direction of a link: whether bytes pass, how fast and how late. Threads share
    it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open, self._bytes_per_s, self._delay_s = True, math.inf, 0.0
        self._free_at, self._corrupt = [0.0, 0.0], False
        """Monotonic times from which control and bulk have the link."""
        self._changes = 0

    def set(
        self, *, opened: bool, bytes_per_s: float, delay_s: float, corrupt: bool
    ) -> None:
        """Change it, for all bytes that have not passed yet."""
        with self._changed:
            self._open, self._bytes_per_s = opened, bytes_per_s
            self._delay_s, self._free_at = delay_s, [0.0, 0.0]
            self._corrupt = corrupt
            self._changes += 1
            self._changed.notify_all()

    def due(self, size: int, is_bulk: bool) -> Due:
        """Return when these next `size` bytes are through, as it is now. Control does
        not wait behind bulk: queues of a network are fair."""
        with self._changed:
            begins = max(self._free_at[is_bulk], time.monotonic())
            self._free_at[is_bulk] = begins + size / self._bytes_per_s
            return self._changes, self._free_at[is_bulk] + self._delay_s

    def wait(self, due: Due, size: int, is_bulk: bool) -> None:
        """Wait until these bytes are through. If the direction has changed since they
        were due, they are due anew."""
        with self._changed:
            while True:
                changes, at = due
                left_s = at - time.monotonic()
                if changes != self._changes:
                    due = self.due(size, is_bulk)
                elif left_s > 0:
                    self._changed.wait(left_s)
                elif self._open:
                    return
                else:
                    self._changed.wait()

    def carried(self, octets: bytes) -> bytes:
        """Return what arrives of a piece of bulk."""
        if not self._corrupt or len(octets) < LEAST_CORRUPT_BYTES:
            return octets
        return octets[:-1] + bytes([octets[-1] ^ 1])


class Relay:
    """Forwards what comes to `address` to the coordinator, and the bulk port too."""

    def __init__(self, to: str, bytes_per_s: float = math.inf) -> None:
        """bytes_per_s: rate of the whole link in each direction."""
        self.up, self.down = Direction(), Direction()
        self._bytes_per_s = bytes_per_s
        self.set()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self.address, bulk = addresses.reserve("127.0.0.1:0")
        ports = (
            (addresses.listen(self.address), to, False),
            (bulk, addresses.bulk_address(to), True),
        )
        self._threads = [
            threading.Thread(
                target=self._accept, args=(near, addresses.parse_address(far), is_bulk)
            )
            for near, far, is_bulk in ports
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def set(
        self,
        *,
        up: bool = True,
        down: bool = True,
        bytes_per_s: float = math.inf,
        delay_s: float = 0.0,
        corrupt: bool = False,
    ) -> None:
        """Change the link; without arguments it is whole again."""
        rate = min(bytes_per_s, self._bytes_per_s)
        for way, opened in ((self.up, up), (self.down, down)):
            way.set(opened=opened, bytes_per_s=rate, delay_s=delay_s, corrupt=corrupt)

    def close(self) -> None:
        """End all connections, and accept no more."""
        self._closed.set()
        self.set()
        with self._lock:
            for end in self._ends:
                _shut(end, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DIAL_S + 2 * LOOK_S)

    def _accept(
        self, listener: socket.socket, to: tuple[str, int], is_bulk: bool
    ) -> None:
        with listener:
            listener.settimeout(LOOK_S)
            while not self._closed.is_set():
                try:
                    near, _ = listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return
                try:
                    far = socket.create_connection(to, DIAL_S)
                except OSError:
                    near.close()
                    continue
                self._join(near, far, is_bulk)

    def _join(self, near: socket.socket, far: socket.socket, is_bulk: bool) -> None:
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._ends |= {near, far}
            closed = self._closed.is_set()
        if closed:
            _shut(near, socket.SHUT_RDWR)
            _shut(far, socket.SHUT_RDWR)
        ends = (near, far, is_bulk)
        threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket, is_bulk: bool) -> None:
        """Carry one connection until both directions have ended."""
        works = []
        for source, sink, way in ((near, far, self.up), (far, near, self.down)):
            line: queue.Queue[tuple[Due, bytes]] = queue.Queue(IN_FLIGHT)
            works += [
                threading.Thread(
                    target=_read, args=(source, line, way, is_bulk), daemon=True
                ),
                threading.Thread(
                    target=_write, args=(source, sink, line, way, is_bulk), daemon=True
                ),
            ]
        for work in works:
            work.start()
        for work in works:
            work.join()
        with self._lock:
            self._ends -= {near, far}
        near.close()
        far.close()


def _read(
    source: socket.socket,
    line: queue.Queue[tuple[Due, bytes]],
    way: Direction,
    is_bulk: bool,
) -> None:
    octets = b"?"
    while octets:
        try:
            octets = source.recv(PIECE_BYTES)
        except OSError:
            octets = b""
        line.put((way.due(len(octets), is_bulk), octets))


def _write(
    source: socket.socket,
    sink: socket.socket,
    line: queue.Queue[tuple[Due, bytes]],
    way: Direction,
    is_bulk: bool,
) -> None:
    broken = False
    while True:
        due, octets = line.get()
        if not broken:
            way.wait(due, len(octets), is_bulk)
        if not octets:
            _shut(sink, socket.SHUT_WR)
            return
        try:
            if not broken:
                sink.sendall(way.carried(octets) if is_bulk else octets)
        except OSError:  # What still comes is thrown away, and the source told.
            broken = True
            _shut(source, socket.SHUT_RDWR)


def _shut(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)
