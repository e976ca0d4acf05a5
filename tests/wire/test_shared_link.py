"""A slow link with one queue for control and bulk, as a router at home has: an upload
that fills it keeps no report away for a lease, and is not taken for one that stands
still."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from wire_support import Recorder, hello, report, upload_start

from diloco_jax.chaos.relay import Direction, Relay
from diloco_jax.config import Placement
from diloco_jax.wire import bulk
from diloco_jax.wire.bulk import PROGRESS_BYTES, UNSENT_BYTES, BulkConnection

DEADLINES = Placement().deadlines
BYTES_PER_S = 10e6 / 8
QUEUE_BYTES = 1 << 20
"""A large one: the last byte of a full one waits for 0.8 s."""
DELTA_BYTES = 10_000_000
"""More than half a lease on this link."""


class SharedQueue(Direction):
    """A direction whose bytes of all connections wait in one queue of bounded size, in
    the order in which they came to it."""

    def __init__(self, queue_bytes: float) -> None:
        super().__init__()
        self._queue_bytes = queue_bytes
        self._tickets, self._serves = itertools.count(), 0
        self._next = threading.Condition()

    def due(self, size: int, is_bulk: bool) -> float:
        with self._next:
            ticket = next(self._tickets)
            self._next.wait_for(lambda: ticket == self._serves)
        full_s = self._queue_bytes / self._bytes_per_s
        time.sleep(max(0.0, self._free_at[False] - time.monotonic() - full_s))
        due = super().due(size, is_bulk=False)
        with self._next:
            self._serves += 1
            self._next.notify_all()
        return due


class Punctual(Recorder):
    """Handlers that note when reports come."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: queue.SimpleQueue[float] = queue.SimpleQueue()

    def receive(self, session: Any, message: Any) -> None:
        self.heard.put(time.monotonic())


@pytest.fixture
def handlers() -> Punctual:
    return Punctual()


@pytest.mark.timing
def test_reports_come_while_an_upload_fills_the_queue_of_a_slow_link(
    serve: Callable[..., Any], connect: Callable[..., Any], handlers: Punctual
) -> None:
    _, address = serve(deadlines=DEADLINES)
    relay = Relay(address)
    relay.up = SharedQueue(QUEUE_BYTES)
    relay.set(bytes_per_s=BYTES_PER_S)
    with contextlib.ExitStack() as stack:
        stack.callback(relay.close)
        client = connect(
            relay.address,
            deadlines=DEADLINES,
            bulk_channels=Placement().bulk_channels,
        )
        stream = client.open_control(hello())
        ended = threading.Event()

        def reports() -> None:
            for steps in itertools.count():
                stream.send(report(steps))
                if ended.wait(DEADLINES.report_s):
                    return

        reporting = threading.Thread(target=reports)
        reporting.start()
        stack.callback(reporting.join)
        stack.callback(ended.set)
        handlers.heard.get(timeout=DEADLINES.lease_s)
        began = time.monotonic()
        client.transfers.upload(upload_start(DELTA_BYTES), bytes(DELTA_BYTES))
        over = time.monotonic()
    assert over - began > DEADLINES.lease_s / 2
    times = [began, *(handlers.heard.get() for _ in range(handlers.heard.qsize()))]
    during = [heard for heard in times if heard <= over] + [over]
    assert max(b - a for a, b in itertools.pairwise(during)) < DEADLINES.lease_s / 2


class Touched:
    """A guard that counts."""

    times = 0

    def touch(self) -> None:
        self.times += 1


def test_a_chunk_counts_as_moving_long_before_all_of_it_has() -> None:
    """Stripes that share 2 Mbit/s need 17 s for a chunk each, and the budget is 10."""
    one, other = socket.socketpair()
    sent, received = Touched(), Touched()
    payload = bytes(bulk.CHUNK_BYTES)
    with one, other:
        source, sink = BulkConnection(one, "a"), BulkConnection(other, "b")
        place = memoryview(bytearray(bulk.CHUNK_BYTES))
        work = threading.Thread(target=sink.receive_chunk, args=(place, 0, received))
        work.start()
        assert source.send_payload([payload], 0, len(payload), sent)
        work.join()
    assert sent.times == received.times == bulk.CHUNK_BYTES // PROGRESS_BYTES


def test_a_socket_sends_at_once_takes_little_more_and_notices_who_is_gone() -> None:
    with socket.socket() as one:
        bulk.prepare(one, DEADLINES)
        for level, option, wanted in (
            (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
            (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", UNSENT_BYTES),
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", DEADLINES.budget_s / 2),
        ):
            if hasattr(socket, option):  # Not every system has all of them.
                assert one.getsockopt(level, getattr(socket, option)) == wanted
