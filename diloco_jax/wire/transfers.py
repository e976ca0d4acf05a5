"""Bulk: payloads in parallel stripes over several connections; fetches that resume.

Stripes succeed or fail together, each with an idle deadline. Connections are made when
needed and kept for the next transfer. The one that was given back last is taken first.
So those that only a burst of transfers needed, as the start of an island is, rest at
the bottom, and are closed after `rest_s`: each costs a descriptor at either end. Memory
for fetched payloads is lent again once nobody holds it: new memory costs a page fault
per page, which takes as long as deciphering the payload.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from cryptography import x509

from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses, encoding, errors, frames, principal
from diloco_jax.wire.bulk import (
    CycleRequest,
    FetchRequest,
    FetchStart,
    KeptStart,
    Question,
    UploadDone,
    UploadStart,
)
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    LocalProtocolError,
    RemoteProtocolError,
    SecurityError,
    VersionGone,
)
from diloco_jax.wire.frames import PROGRESS_BYTES, BulkConnection, prepare
from diloco_jax.wire.principal import principal_of
from diloco_jax.wire.threads import DaemonPool, Guard, IdleWatch
from diloco_jax.wire.tls import Renewed, TlsFiles, explain


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


Answer = TypeVar("Answer")
Result = TypeVar("Result")


class CallGroup:
    """The calls of one transfer."""

    def __init__(
        self, connections: Connections, watch: IdleWatch, idle_s: float
    ) -> None:
        self._connections, self._watch, self._idle_s = connections, watch, idle_s
        self._peer = connections.address
        self._lock = threading.Lock()
        self._open: set[BulkConnection] = set()
        self._cancelled = threading.Event()

    @contextlib.contextmanager
    def call(self) -> Iterator[tuple[BulkConnection, Guard]]:
        """Take a connection for the length of the block, which makes one call on it.

        The block touches the guard as bytes move. Without any for `idle_s`, or
        once the group is cancelled, the connection is cut and the block raises
        ConnectionLost.
        """
        connection = self._connections.take()
        with self._lock:
            self._open.add(connection)
        if self._cancelled.is_set():
            connection.cut()
        try:
            with self._watch.guard(self._idle_s, connection.cut) as guard:
                yield connection, guard
        except ConnectionLost as error:
            if guard.expired:
                raise ConnectionLost(
                    f"{self._peer}: not {PROGRESS_BYTES >> 10} KiB moved for "
                    f"{self._idle_s:g} s"
                ) from error
            if self._cancelled.is_set():
                raise ConnectionLost(
                    f"{self._peer}: the transfer was ended at this end ({error})"
                ) from error
            raise
        finally:
            with self._lock:
                self._open.discard(connection)
            self._connections.give(connection)

    def cancel(self) -> None:
        """Cancel all calls, including later ones."""
        self._cancelled.set()
        with self._lock:
            for connection in self._open:
                connection.cut()

    def pause(self, seconds: float) -> bool:
        """Wait; return early and True if the group is cancelled."""
        return self._cancelled.wait(seconds)

    def results(self, running: list[futures.Future[Result]]) -> list[Result]:
        """Return all results; on the first error end the other calls and raise it."""
        try:
            for done in futures.as_completed(running):
                done.result()
        except BaseException:
            self.cancel()
            futures.wait(running)
            raise
        return [done.result() for done in running]


def asked(connection: BulkConnection, request: Any, kind: type[Answer]) -> Answer:
    """Ask for something; return what comes before its bytes."""
    connection.send(request)
    return answer(connection, kind)


def answer(connection: BulkConnection, kind: type[Answer]) -> Answer:
    """Receive an answer of this kind; raise the error that comes instead."""
    reply = connection.receive(encoding.bulk_reply)
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


class SpareMemory:
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
    full: bool
    """True: A_v in f32; False: `count` encoded publishes, oldest first."""
    count: int
    payload: memoryview
    wire_bytes: int
    """Bytes received, with headers and whole chunks that came again."""


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
        self._peer = connections.address
        self._deadlines, self._watch = deadlines, watch
        # Apart, so that neither direction waits for the other.
        self._upload_pool = DaemonPool(channels, "diloco-upload")
        self._fetch_pool = DaemonPool(channels, "diloco-fetch")
        self._memory = SpareMemory()
        self._lock = threading.Lock()
        self._groups: set[CallGroup] = set()
        self._closed = False

    def upload(
        self, start: UploadStart, payload: bytes | bytearray | memoryview
    ) -> int:
        """Send bytes `offset` to `offset + length` of a payload, in parallel stripes.

        Returns the bytes sent, headers included. Raises Refused, ConnectionLost,
        ProtocolError, or Busy if a stripe finds no place for `budget_s`. The whole
        upload may be repeated then.
        """
        view = memoryview(payload).cast("B")
        if len(view) != start.length:
            raise LocalProtocolError(
                f"upload of {start.what} announces {start.length} bytes "
                f"and has {len(view)}"
            )
        with self._group() as calls:
            sending = [
                self._submit(
                    self._upload_pool,
                    self._send,
                    calls,
                    msgspec.structs.replace(
                        start, offset=start.offset + low, length=size
                    ),
                    view[low : low + size],
                )
                for low, size in stripes(len(view), self._channels)
            ]
            return sum(calls.results(sending))

    def ask(self, request: Question, kind: type[Answer]) -> Answer:
        """Return the answer, of this kind, to a request without payload. Raises
        Refused, ConnectionLost, or RemoteProtocolError."""
        with self._group() as calls, calls.call() as (connection, _):
            found = asked(connection, request, kind)
            connection.between = True
            return found

    def fetch(
        self,
        request: FetchRequest,
        *,
        max_bytes: int,
        within_s: float | None = None,
    ) -> Fetched:
        """Fetch one version of a fragment whole; the request's offset and length are
        set here.

        A stripe that breaks is resumed after its last good byte, until `within_s`, by
        default `pin_s`, after the call. Raises VersionGone if the version is not kept
        any more, Refused, ConnectionLost, or RemoteProtocolError. A payload of more
        than `max_bytes` is refused before anything is allocated.
        """
        rest: list[futures.Future[int]] = []
        with self._group() as calls:
            fetch = _Fetch(
                request,
                max_bytes,
                self._peer,
                self._deadlines,
                calls,
                self._memory,
                self._deadlines.pin_s if within_s is None else within_s,
            )

            def fetch_rest() -> None:
                left = len(fetch.payload) - FIRST_STRIPE_BYTES
                if left > 0:
                    for low, size in stripes(left, self._channels):
                        begin = FIRST_STRIPE_BYTES + low
                        stripe = _Stripe(begin, begin + size)
                        rest.append(self._submit(self._fetch_pool, fetch.run, stripe))

            first = _Stripe(0, FIRST_STRIPE_BYTES)
            try:
                wire_bytes = fetch.run(first, fetch_rest)
            except BaseException:
                calls.cancel()
                futures.wait(rest)
                raise
            wire_bytes += sum(calls.results(rest))
        return fetch.result(wire_bytes)

    def cancel(self) -> None:
        """Cancel all transfers, including later ones."""
        with self._lock:
            self._closed = True
            groups = list(self._groups)
        for group in groups:
            group.cancel()
        self._connections.close()

    def close(self, timeout_s: float) -> None:
        """Wait for the threads, after `cancel`."""
        deadline = time.monotonic() + timeout_s
        for pool in (self._upload_pool, self._fetch_pool):
            pool.close(max(0.0, deadline - time.monotonic()))

    def kept(self, request: CycleRequest) -> Iterator[memoryview]:
        """Yield the checked bytes of a file of a kept cycle, in their order.

        Each is valid until the next. Raises Refused, ConnectionLost, or
        RemoteProtocolError.
        """
        place = memoryview(bytearray(frames.CHUNK_BYTES))
        with self._group() as calls, calls.call() as (connection, guard):
            start = asked(connection, request, KeptStart)
            position = 0
            while position < start.total:
                room = place[: start.total - position]
                length = connection.receive_chunk(room, position, guard)
                position += length
                yield place[:length]
            connection.between = True

    def _send(self, calls: CallGroup, start: UploadStart, view: memoryview) -> int:
        """Upload a stripe, and repeat it alone while the peer is too busy for it.
        Return the bytes that all attempts sent."""
        backoff = Backoff(self._deadlines)
        deadline = time.monotonic() + self._deadlines.budget_s
        sent = 0
        while True:
            try:
                with calls.call() as (connection, guard):
                    before = connection.sent_bytes
                    connection.send(start)
                    connection.send_payload((view,), 0, len(view), guard, start.offset)
                    sent += connection.sent_bytes - before
                    answer(connection, UploadDone)
                    connection.between = True
                    return sent
            except Busy as error:
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > deadline:
                    raise Busy(
                        f"upload of {start.what} given up at byte "
                        f"{start.offset}, {self._deadlines.budget_s:g} s after it "
                        f"began: {error}"
                    ) from error
                if calls.pause(pause_s):
                    raise

    def _submit(
        self, pool: DaemonPool, work: Callable[..., int], *arguments: Any
    ) -> futures.Future[int]:
        try:
            return pool.submit(work, *arguments)
        except RuntimeError as error:
            raise self._is_closed() from error

    def _is_closed(self) -> ConnectionLost:
        return ConnectionLost(f"the client of {self._peer} is closed")

    @contextlib.contextmanager
    def _group(self) -> Iterator[CallGroup]:
        group = CallGroup(self._connections, self._watch, self._deadlines.idle_s)
        with self._lock:
            if self._closed:
                raise self._is_closed()
            self._groups.add(group)
        try:
            yield group
        finally:
            with self._lock:
                self._groups.discard(group)


@dataclasses.dataclass
class _Stripe:
    position: int
    """First byte of the payload that has not arrived yet."""
    end: int
    wire_bytes: int = 0


class _Fetch:
    """One fetch: what its stripes must agree on, and where they put their bytes."""

    payload: memoryview

    def __init__(
        self,
        request: FetchRequest,
        max_bytes: int,
        peer: str,
        deadlines: Deadlines,
        calls: CallGroup,
        memory: SpareMemory,
        within_s: float,
    ) -> None:
        self._request, self._max_bytes, self._memory = request, max_bytes, memory
        self._peer, self._deadlines, self._calls = peer, deadlines, calls
        self._within_s, self._deadline = within_s, time.monotonic() + within_s
        self._start: FetchStart | None = None

    def run(
        self, stripe: _Stripe, on_first_answer: Callable[[], None] | None = None
    ) -> int:
        """Fetch a stripe, attempt after attempt; return the bytes received."""
        backoff = Backoff(self._deadlines)
        while True:
            position = stripe.position
            try:
                self._attempt(stripe, on_first_answer)
                return stripe.wire_bytes
            except (ConnectionLost, Busy) as error:
                if stripe.position > position:
                    backoff.reset()
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > self._deadline:
                    raise ConnectionLost(
                        f"fetch of fragment {self._request.fragment} given up at byte "
                        f"{stripe.position}, {self._within_s:g} s after it began: "
                        f"{error}"
                    ) from error
                if self._calls.pause(pause_s):
                    raise

    def result(self, wire_bytes: int) -> Fetched:
        """Return the payload, once all stripes have arrived."""
        start = self._start
        assert start is not None
        return Fetched(
            version=start.version,
            full=start.full,
            count=start.count,
            payload=self.payload,
            wire_bytes=wire_bytes,
        )

    def _attempt(
        self, stripe: _Stripe, on_first_answer: Callable[[], None] | None
    ) -> None:
        wanted = self._start.version if self._start else self._request.want
        request = msgspec.structs.replace(
            self._request,
            want=wanted,
            offset=stripe.position,
            length=stripe.end - stripe.position,
        )
        with self._calls.call() as (connection, guard):
            before = connection.received_bytes
            try:
                start = asked(connection, request, FetchStart)
                if self._start is None:
                    self._begin(start, stripe)
                    if on_first_answer is not None:
                        on_first_answer()
                self._check_same(start, stripe)
                while stripe.position < stripe.end:
                    stripe.position += connection.receive_chunk(
                        self.payload[stripe.position : stripe.end],
                        stripe.position,
                        guard,
                    )
                connection.between = True
            finally:
                stripe.wire_bytes += connection.received_bytes - before

    def _begin(self, start: FetchStart, first: _Stripe) -> None:
        if not 0 <= start.total <= self._max_bytes:
            raise RemoteProtocolError(
                f"{self._peer} announced {start.total} bytes for fragment "
                f"{self._request.fragment}, at most {self._max_bytes} make sense; both "
                f"ends must run the same configuration"
            )
        self._start = start
        self.payload = self._memory.lend(start.total)
        first.end = min(first.end, start.total)

    def _check_same(self, start: FetchStart, stripe: _Stripe) -> None:
        agreed = self._start
        assert agreed is not None
        ours = (agreed.version, agreed.full, agreed.count, agreed.total)
        theirs = (start.version, start.full, start.count, start.total)
        if ours != theirs:
            raise VersionGone(
                f"fragment {self._request.fragment} changed during the fetch: "
                f"(version, full, count, bytes) was {ours}, is {theirs}; fetch it again"
            )
        expected = (stripe.position, stripe.end - stripe.position)
        if (start.offset, start.length) != expected:
            raise RemoteProtocolError(
                f"{self._peer} answered (offset, length) = "
                f"{(start.offset, start.length)}, expected {expected}"
            )


def stripes(total: int, most: int) -> list[tuple[int, int]]:
    """Cut `total` bytes into at most `most` stripes (offset, length) of equal size.

    A stripe has at least 1 MiB, unless it is the only one.
    """
    number = max(1, min(most, total // MIN_STRIPE_BYTES))
    edges = [total * i // number for i in range(number + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(edges)]
