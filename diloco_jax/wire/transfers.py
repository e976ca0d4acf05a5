"""Bulk: payloads in parallel stripes over several connections; fetches that resume."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import msgspec

from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.protocol.values import Version
from diloco_jax.wire import frames
from diloco_jax.wire.bulk import (
    CycleRequest,
    FetchRequest,
    FetchStart,
    KeptStart,
    Question,
    UploadDone,
    UploadStart,
)
from diloco_jax.wire.calls import Answer, CallGroup, answer, asked
from diloco_jax.wire.dialing import Connections
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    LocalProtocolError,
    RemoteProtocolError,
    VersionGone,
)
from diloco_jax.wire.spare import SpareMemory
from diloco_jax.wire.threads import DaemonPool, IdleWatch

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
