"""Bulk: payloads in parallel stripes over several channels; fetches that resume."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import msgspec
import numpy as np

from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.protocol.values import Version
from diloco_jax.wire import encoding, frames
from diloco_jax.wire.bulk import FetchRequest, FetchStart, UploadStart
from diloco_jax.wire.calls import CallGroup
from diloco_jax.wire.encoding import decoded, encode
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    LocalProtocolError,
    RemoteProtocolError,
    VersionGone,
)
from diloco_jax.wire.threads import DaemonPool, Guard, IdleWatch

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
    """Bytes received, with headers and repeated bytes."""


class Transfers:
    """Upload and fetch over the bulk channels, with threads of their own."""

    def __init__(
        self,
        channels: Sequence[Any],
        service: str,
        peer: str,
        deadlines: Deadlines,
        watch: IdleWatch,
    ) -> None:
        self._uploads = [c.stream_unary(f"/{service}/Upload") for c in channels]
        self._fetches = [c.unary_stream(f"/{service}/Fetch") for c in channels]
        self._peer, self._deadlines, self._watch = peer, deadlines, watch
        self._turns = itertools.count()
        # Apart, so that neither direction waits for the other.
        self._upload_pool = DaemonPool(len(channels), "diloco-upload")
        self._fetch_pool = DaemonPool(len(channels), "diloco-fetch")
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
                f"upload of fragment {start.fragment} announces {start.length} bytes "
                f"and has {len(view)}"
            )
        turn = next(self._turns)
        with self._group() as calls:
            sending = [
                self._submit(
                    self._upload_pool,
                    self._send,
                    self._uploads[(turn + i) % len(self._uploads)],
                    calls,
                    msgspec.structs.replace(
                        start, offset=start.offset + low, length=size
                    ),
                    view[low : low + size],
                )
                for i, (low, size) in enumerate(stripes(len(view), len(self._uploads)))
            ]
            return sum(calls.results(sending))

    def fetch(self, request: FetchRequest, *, max_bytes: int) -> Fetched:
        """Fetch one version of a fragment whole; the request's offset and length are
        set here.

        A stripe that breaks is resumed after its last good byte, until `pin_s` after
        the call. Raises VersionGone if the version is not kept any more, Refused,
        ConnectionLost, or RemoteProtocolError. A payload of more than `max_bytes` is
        refused before anything is allocated.
        """
        turn = next(self._turns)
        rest: list[futures.Future[int]] = []
        with self._group() as calls:
            fetch = _Fetch(request, max_bytes, self._peer, self._deadlines, calls)

            def fetch_rest() -> None:
                left = len(fetch.payload) - FIRST_STRIPE_BYTES
                if left > 0:
                    for i, (low, size) in enumerate(stripes(left, len(self._fetches))):
                        begin = FIRST_STRIPE_BYTES + low
                        method = self._fetches[(turn + 1 + i) % len(self._fetches)]
                        stripe = _Stripe(begin, begin + size)
                        rest.append(
                            self._submit(self._fetch_pool, fetch.run, method, stripe)
                        )

            method = self._fetches[turn % len(self._fetches)]
            first = _Stripe(0, FIRST_STRIPE_BYTES)
            try:
                wire_bytes = fetch.run(method, first, fetch_rest)
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

    def close(self, timeout_s: float) -> None:
        """Wait for the threads, after `cancel`."""
        deadline = time.monotonic() + timeout_s
        for pool in (self._upload_pool, self._fetch_pool):
            pool.close(max(0.0, deadline - time.monotonic()))

    def _send(
        self, method: Any, calls: CallGroup, start: UploadStart, view: memoryview
    ) -> int:
        """Upload a stripe, and repeat it alone while the peer is too busy for it.
        Return the bytes that all attempts sent."""
        backoff = Backoff(self._deadlines)
        deadline = time.monotonic() + self._deadlines.budget_s
        sent = 0

        def requests(guard: Guard) -> Iterator[bytes]:
            nonlocal sent
            parts = frames.chunks(view, start.offset)
            for raw in itertools.chain((encode(start),), parts):
                guard.touch()
                sent += len(raw) + frames.MESSAGE_PREFIX_BYTES
                yield raw

        while True:
            try:
                with calls.call() as (slot, guard):
                    reply = slot.fill(method.future(requests(guard))).result()
            except Busy as error:
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > deadline:
                    raise Busy(
                        f"upload of fragment {start.fragment} given up at byte "
                        f"{start.offset}, {self._deadlines.budget_s:g} s after it "
                        f"began: {error}"
                    ) from error
                if calls.pause(pause_s):
                    raise
            else:
                decoded(encoding.upload_done, reply, self._peer)
                return sent

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
        group = CallGroup(self._peer, self._watch, self._deadlines.idle_s)
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
    ) -> None:
        self._request, self._max_bytes = request, max_bytes
        self._peer, self._deadlines, self._calls = peer, deadlines, calls
        self._deadline = time.monotonic() + deadlines.pin_s
        self._start: FetchStart | None = None

    def run(
        self,
        method: Any,
        stripe: _Stripe,
        on_first_answer: Callable[[], None] | None = None,
    ) -> int:
        """Fetch a stripe, attempt after attempt; return the bytes received."""
        backoff = Backoff(self._deadlines)
        while True:
            position = stripe.position
            try:
                self._attempt(method, stripe, on_first_answer)
                return stripe.wire_bytes
            except (ConnectionLost, Busy) as error:
                if stripe.position > position:
                    backoff.reset()
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > self._deadline:
                    raise ConnectionLost(
                        f"fetch of fragment {self._request.fragment} given up at byte "
                        f"{stripe.position}, {self._deadlines.pin_s:g} s after it "
                        f"began: {error}"
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
        self, method: Any, stripe: _Stripe, on_first_answer: Callable[[], None] | None
    ) -> None:
        wanted = self._start.version if self._start else self._request.want
        request = msgspec.structs.replace(
            self._request,
            want=wanted,
            offset=stripe.position,
            length=stripe.end - stripe.position,
        )
        with self._calls.call() as (slot, guard):
            answers = slot.fill(method(encode(request)))
            raw = next(answers, None)
            if raw is None:
                raise RemoteProtocolError(f"{self._peer} answered a fetch with nothing")
            stripe.wire_bytes += len(raw) + frames.MESSAGE_PREFIX_BYTES
            start = decoded(encoding.fetch_start, raw, self._peer)
            if self._start is None:
                self._begin(start, stripe)
                if on_first_answer is not None:
                    on_first_answer()
            self._check_same(start, stripe)
            view = memoryview(self.payload)
            for frame in answers:
                guard.touch()
                stripe.wire_bytes += len(frame) + frames.MESSAGE_PREFIX_BYTES
                room = stripe.end - stripe.position
                part = frames.check(
                    frame, offset=stripe.position, room=room, peer=self._peer
                )
                view[stripe.position : stripe.position + len(part)] = part
                stripe.position += len(part)
            if stripe.position != stripe.end:
                raise RemoteProtocolError(
                    f"{self._peer} ended a stripe at byte {stripe.position}, "
                    f"expected {stripe.end}"
                )

    def _begin(self, start: FetchStart, first: _Stripe) -> None:
        if not 0 <= start.total <= self._max_bytes:
            raise RemoteProtocolError(
                f"{self._peer} announced {start.total} bytes for fragment "
                f"{self._request.fragment}, at most {self._max_bytes} make sense; both "
                f"ends must run the same configuration"
            )
        self._start = start
        self.payload = np.empty(start.total, np.uint8).data
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
    """Cut `total` bytes into at most `most` (offset, length) of equal size, each of at
    least 1 MiB unless there is only one."""
    number = max(1, min(most, total // MIN_STRIPE_BYTES))
    edges = [total * i // number for i in range(number + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(edges)]
