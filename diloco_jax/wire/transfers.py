"""Bulk: payloads in parallel stripes over several connections; fetches that resume.

Stripes succeed or fail together, each with an idle deadline. Connections are made when
needed and kept for the next transfer. The one that was given back last is taken first,
so those that only a burst of transfers needed, as the start of an island is, are closed
after `rest_s`: each costs a descriptor at either end. Memory for fetched payloads is
lent again once nobody holds it: new memory costs a page fault per page, which takes as
long as deciphering the payload.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol.messages import Version
from diloco_jax.wire import bulk, errors
from diloco_jax.wire.bulk import PROGRESS_BYTES, BulkConnection, prepare
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    LocalProtocolError,
    RemoteProtocolError,
    VersionGone,
    WireError,
)
from diloco_jax.wire.peers import Backoff, DaemonPool, Guard, IdleWatch, Principal
from diloco_jax.wire.tls import Renewed, TlsFiles, dial


class Connections:
    """Connections of one client to one port. Any thread may take one."""

    def __init__(
        self,
        address: str,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        most: int,
        *answers: Principal,
        field: str = "the coordinator's address",
    ) -> None:
        """most: connections that are kept while nothing uses them. answers: principals
        one of which has to answer; none: whoever has this address in its certificate.
        field: the config's, with the address."""
        self.address, self._answers, self._field = address, answers, field
        self._deadlines, self._rest_s, self._most = deadlines, deadlines.rest_s, most
        # The certificate of an island names no machine.
        by_name = all(who.role != "island" for who in answers)
        make = TlsFiles.client_context if by_name else TlsFiles.peer_context
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
                return self._dial()
            if not found.spoken():
                return found
            found.close()  # The coordinator ended it, or was started again.

    def give(self, connection: BulkConnection) -> None:
        """Give a connection back; it is kept if its transfer ended well."""
        now = time.monotonic()
        ended = []
        with self._lock:
            while self._idle and now - self._idle[0][0] > self._rest_s:
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

    def _dial(self) -> BulkConnection:
        connection = dial(
            self.address,
            self._tls,
            self._deadlines.connect_s,
            *self._answers,
            field=self._field,
        )
        prepare(connection, self._deadlines)
        connection.settimeout(None)
        return BulkConnection(connection, self.address)


Answer = TypeVar("Answer")


def asked(connection: BulkConnection, request: Any, kind: type[Answer]) -> Answer:
    """Ask for something; return what comes before its bytes."""
    connection.send(request)
    return answer(connection, kind)


def answer(connection: BulkConnection, kind: type[Answer]) -> Answer:
    """Receive an answer of this kind; raise the error that comes instead."""
    reply = connection.receive(bulk.bulk_reply)
    if isinstance(reply, errors.Failure):
        raise errors.from_failure(reply, connection.peer)
    if not isinstance(reply, kind):
        raise RemoteProtocolError(
            f"{connection.peer} answered with {type(reply).__name__}, expected "
            f"{kind.__name__}; both ends must run the same version of diloco"
        )
    return reply


LEAST_BYTES = 1 << 20
"""Smaller payloads come from the allocator, which keeps their pages itself."""


class ReceiveBuffers:
    """Keep at most one buffer that was lent and is free again. Any thread may borrow
    it.
    """

    def __init__(self) -> None:
        # No lock: buffers come back when they are collected, which may be anywhere.
        self._free: collections.deque[npt.NDArray[np.uint8]] = collections.deque(
            maxlen=1
        )

    def lend(self, size: int) -> memoryview:
        """Return `size` bytes of writable memory, with any content. They are free again
        once the last view of them is gone.
        """
        if size < LEAST_BYTES:
            return np.empty(size, np.uint8).data
        try:
            held = self._free.pop()
        except IndexError:
            held = np.empty(0, np.uint8)
        if not size <= len(held) <= 2 * size:
            held = np.empty(size, np.uint8)
        lent = np.frombuffer(held, np.uint8, size)
        weakref.finalize(lent, self._free.append, held).atexit = False
        return lent.data


MIN_STRIPE_BYTES = 1 << 20
FIRST_STRIPE_BYTES = 2 << 20
"""Bytes of a fetch's first request, made before the size of the payload is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetched:
    """A complete and checked version of a fragment."""

    version: Version
    count: int
    """Number of encoded publishes, oldest first; 0: A_v in f32."""
    payload: memoryview
    wire_bytes: int
    """Bytes received, with headers and whole chunks that came again."""


class _Transfer:
    """One transfer: its stripes succeed or fail together, within its time."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what, self.seconds = what, seconds
        self.until = time.monotonic() + seconds
        self.over = threading.Event()
        """Set once it is cancelled."""


class Transfers:
    """Upload and fetch over bulk connections, with threads of their own."""

    def __init__(
        self,
        connections: Connections,
        channels: int,
        deadlines: Deadlines,
        watch: IdleWatch,
    ) -> None:
        """channels: stripes of one transfer that are under way at once."""
        self._connections, self._channels = connections, channels
        self.peer = connections.address
        self._budget_s, self._idle_s = deadlines.budget_s, deadlines.idle_s
        self._retries_s, self._pin_s = deadlines.retries_s, deadlines.pin_s
        self._watch = watch
        # Apart, so that neither direction waits for the other.
        self._upload_pool = DaemonPool(channels, "diloco-upload")
        self._fetch_pool = DaemonPool(channels, "diloco-fetch")
        self.memory = ReceiveBuffers()
        self._lock = threading.Lock()
        self._open: dict[BulkConnection, _Transfer] = {}
        """Connections with a call, and of what."""
        self._under_way: weakref.WeakSet[_Transfer] = weakref.WeakSet()
        self._closed = False

    def upload(
        self, start: bulk.UploadStart, payload: bytes | bytearray | memoryview
    ) -> int:
        """Send bytes `offset` to `offset + length` of a payload, in parallel stripes.

        Returns the bytes sent, headers included. Raises Refused, ConnectionLost,
        ProtocolError, or Busy if a stripe finds no slot for `budget_s`. The whole
        upload may be repeated then.
        """
        view = memoryview(payload).cast("B")
        if len(view) != start.length:
            raise LocalProtocolError(
                f"upload of fragment {start.fragment} announces {start.length} bytes "
                f"and has {len(view)}"
            )
        what = f"upload of fragment {start.fragment}"
        transfer = self._begin(what, self._budget_s)

        def send(low: int, size: int) -> int:
            stripe = replace(start, offset=start.offset + low, length=size)
            return self._send(transfer, stripe, view[low : low + size])

        return self._sum(transfer, self._upload_pool, send, len(view))

    def fetch(
        self,
        request: bulk.FetchRequest,
        *,
        max_bytes: int,
        within_s: float | None = None,
    ) -> Fetched:
        """Fetch one version of a fragment whole; the request's offset and length are
        set here.

        A stripe that breaks is resumed after its last good byte, until `pin_s` after
        the call. With `within_s`, it is that, and what moves is cut off then, too.
        Raises VersionGone if the version is not kept any more, Refused, ConnectionLost,
        or RemoteProtocolError. A payload of more than `max_bytes` is refused before
        anything is allocated.
        """
        seconds = self._pin_s if within_s is None else within_s
        transfer = self._begin(f"fetch of fragment {request.fragment}", seconds)
        fetch = _Fetch(request, max_bytes, self, transfer)
        limit_s = math.inf if within_s is None else within_s
        with self._watch.guard(limit_s, lambda: self._cut(transfer)):
            wire_bytes = fetch.run(0, FIRST_STRIPE_BYTES)
            start = fetch.start
            assert start is not None
            left = start.total - FIRST_STRIPE_BYTES

            def rest(low: int, size: int) -> int:
                return fetch.run(FIRST_STRIPE_BYTES + low, size)

            if left > 0:
                wire_bytes += self._sum(transfer, self._fetch_pool, rest, left)
        return Fetched(
            version=start.version,
            count=start.count,
            payload=fetch.payload,
            wire_bytes=wire_bytes,
        )

    def kept(self, request: bulk.CycleRequest) -> Iterator[memoryview]:
        """Yield the checked bytes of a file of a kept cycle, in their order.

        Each is valid until the next. Raises Refused, ConnectionLost, or
        RemoteProtocolError.
        """
        place = memoryview(bytearray(bulk.CHUNK_BYTES))
        with self.call(self._begin(request.name, math.inf)) as (connection, guard):
            start = asked(connection, request, bulk.KeptStart)
            position = 0
            while position < start.total:
                room = place[: start.total - position]
                length = connection.receive_chunk(room, position, guard)
                position += length
                yield place[:length]
            connection.between = True

    def cancel(self) -> None:
        """Cancel all transfers, including later ones."""
        with self._lock:
            self._closed = True
            under_way = list(self._under_way)
        for transfer in under_way:
            self._cut(transfer)
        self._connections.close()

    def close(self, timeout_s: float) -> None:
        """Wait for the threads, after `cancel`."""
        deadline = time.monotonic() + timeout_s
        for pool in (self._upload_pool, self._fetch_pool):
            pool.close(max(0.0, deadline - time.monotonic()))

    @contextlib.contextmanager
    def call(self, transfer: _Transfer) -> Iterator[tuple[BulkConnection, Guard]]:
        """Take a connection for the length of the block, which makes one call on it.

        The block touches the guard as bytes move. Without any for `idle_s`, or once the
        transfer is cancelled, the connection is cut and the block raises
        ConnectionLost.
        """
        connection, idle_s = self._connections.take(), self._idle_s
        with self._lock:
            self._open[connection] = transfer
        if transfer.over.is_set():
            connection.cut()
        try:
            with self._watch.guard(idle_s, connection.cut) as guard:
                yield connection, guard
        except ConnectionLost as error:
            if guard.expired:
                raise ConnectionLost(
                    f"{self.peer}: not {PROGRESS_BYTES >> 10} KiB moved for "
                    f"{idle_s:g} s"
                ) from error
            if transfer.over.is_set():
                raise ConnectionLost(
                    f"{self.peer}: the transfer was ended at this end ({error})"
                ) from error
            raise
        finally:
            with self._lock:
                del self._open[connection]
            self._connections.give(connection)

    def persist(
        self,
        transfer: _Transfer,
        attempt: Callable[[], object],
        position: Callable[[], int],
        *again: type[WireError],
    ) -> None:
        """Repeat an attempt upon these errors, with pauses, as long as the transfer may
        take; then raise the first of these errors. position: of the next byte; where it
        moves, pauses are short again."""
        backoff = Backoff(*self._retries_s)
        while True:
            before = position()
            try:
                attempt()
                return
            except again as error:
                if position() > before:
                    backoff.reset()
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > transfer.until:
                    raise again[0](
                        f"{transfer.what} given up at byte {position()}, "
                        f"{transfer.seconds:g} s after it began: {error}"
                    ) from error
                if transfer.over.wait(pause_s):
                    raise

    def _begin(self, what: str, seconds: float) -> _Transfer:
        transfer = _Transfer(what, seconds)
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"the client of {self.peer} is closed")
            self._under_way.add(transfer)
        return transfer

    def _send(
        self, transfer: _Transfer, start: bulk.UploadStart, view: memoryview
    ) -> int:
        """Upload a stripe, and repeat it alone while the peer is too busy for it.
        Return the bytes that all attempts sent."""
        sent = 0

        def attempt() -> None:
            nonlocal sent
            with self.call(transfer) as (connection, guard):
                before = connection.sent_bytes
                connection.send(start)
                connection.send_payload((view,), 0, len(view), guard, start.offset)
                sent += connection.sent_bytes - before
                answer(connection, bulk.UploadDone)
                connection.between = True

        self.persist(transfer, attempt, lambda: start.offset, Busy)
        return sent

    def _sum(
        self,
        transfer: _Transfer,
        pool: DaemonPool,
        move: Callable[[int, int], int],
        total: int,
    ) -> int:
        """Move all stripes (offset, length) of so many bytes at once, and return the
        sum of what that returns; on the first error end the others and raise it."""
        running = list[futures.Future[int]]()
        try:
            for stripe in stripes(total, self._channels):
                try:
                    running.append(pool.submit(move, *stripe))
                except RuntimeError as error:
                    closed = f"the client of {self.peer} is closed"
                    raise ConnectionLost(closed) from error
            for done in futures.as_completed(running):
                done.result()
        except BaseException:
            self._cut(transfer)
            futures.wait(running)
            raise
        return sum(done.result() for done in running)

    def _cut(self, transfer: _Transfer) -> None:
        """Cancel the calls of a transfer, including later ones."""
        transfer.over.set()
        with self._lock:
            for connection, of in self._open.items():
                if of is transfer:
                    connection.cut()


class _Fetch:
    """One fetch: what its stripes must agree on, and where they put their bytes."""

    def __init__(
        self,
        request: bulk.FetchRequest,
        max_bytes: int,
        transfers: Transfers,
        transfer: _Transfer,
    ) -> None:
        self._request, self._max_bytes = request, max_bytes
        self._transfers, self._transfer = transfers, transfer
        self.start: bulk.FetchStart | None = None
        """Answer to the first stripe."""
        self.payload = memoryview(b"")

    def run(self, offset: int, length: int) -> int:
        """Fetch a stripe, attempt after attempt; return the bytes received."""
        position, wire_bytes = offset, 0

        def attempt() -> None:
            nonlocal position, wire_bytes
            with self._transfers.call(self._transfer) as (connection, guard):
                before = connection.received_bytes
                try:
                    end = self._asked(connection, position, offset + length)
                    while position < end:
                        room = self.payload[position:end]
                        position += connection.receive_chunk(room, position, guard)
                    connection.between = True
                finally:
                    wire_bytes += connection.received_bytes - before

        again = ConnectionLost, Busy
        self._transfers.persist(self._transfer, attempt, lambda: position, *again)
        return wire_bytes

    def _asked(self, connection: BulkConnection, position: int, end: int) -> int:
        """Ask for the bytes from a position to an end; return where they end."""
        request = replace(
            self._request,
            want=self.start.version if self.start else self._request.want,
            offset=position,
            length=end - position,
        )
        start = asked(connection, request, bulk.FetchStart)
        if self.start is None:
            if not 0 <= start.total <= self._max_bytes:
                raise RemoteProtocolError(
                    f"{connection.peer} announced {start.total} bytes for fragment "
                    f"{request.fragment}, at most {self._max_bytes} make sense; both "
                    f"ends must run the same configuration"
                )
            self.start = start
            self.payload = self._transfers.memory.lend(start.total)
        end = min(end, self.start.total)
        ours, theirs = ((of.version, of.count, of.total) for of in (self.start, start))
        if ours != theirs:
            raise VersionGone(
                f"fragment {request.fragment} changed during the fetch: (version, "
                f"count, bytes) was {ours}, is {theirs}; fetch it again"
            )
        if (start.offset, start.length) != (expected := (position, end - position)):
            raise RemoteProtocolError(
                f"{connection.peer} answered (offset, length) = "
                f"{(start.offset, start.length)}, expected {expected}"
            )
        return end


def stripes(total: int, most: int) -> list[tuple[int, int]]:
    """Cut `total` bytes into at most `most` stripes (offset, length) of equal size.

    A stripe has at least 1 MiB, unless it is the only one.
    """
    number = max(1, min(most, total // MIN_STRIPE_BYTES))
    edges = [total * i // number for i in range(number + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(edges)]
