"""Messages with every field filled in, and handlers that keep what they are given."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import Version
from diloco_jax.wire import addresses, bulk
from diloco_jax.wire.bulk import BulkConnection
from diloco_jax.wire.errors import VersionGone, WireError
from diloco_jax.wire.session import Handlers, Session

WAIT_S = 45.0
"""Less than the queues' poll and the budget: what only they end comes too late."""
BUDGET_S = 60.0
"""More than a busy machine stands still."""


ISLAND = "a"
"""The island of all messages here."""


def deadlines(**seconds: float) -> Deadlines:
    """Those of a generous budget, but for what the test is about."""
    assert seconds.keys() <= vars(Deadlines).keys(), seconds
    return type("Deadlines", (Deadlines,), seconds)(BUDGET_S)


def hello(island: str = ISLAND, **changes: Any) -> messages.Hello:
    fields: dict[str, Any] = {
        "run_id": "",
        "fingerprint": "f",
        "run": {},
        "plan": "p",
        "island": island,
        "island_config": {},
        "incarnation": 1,
        "session": "s",
        "environment": {},
        "tokens_per_step": 1,
        "sequences_per_step": 1,
        "phase": "joining",
        "steps": 0,
        "step_seconds": 0.0,
    }
    return messages.Hello(**(fields | changes))


def upload_start(total: int, **changes: Any) -> bulk.UploadStart:
    fields: dict[str, Any] = {
        "run_id": "r",
        "island": ISLAND,
        "incarnation": 1,
        "session": "s",
        "fragment": 3,
        "tick": 7,
        "offset": 0,
        "length": total,
        "total": total,
    }
    return bulk.UploadStart(**(fields | changes))


def fetch_request(**changes: Any) -> bulk.FetchRequest:
    fields: dict[str, Any] = {
        "run_id": "r",
        "island": ISLAND,
        "incarnation": 1,
        "session": "s",
        "fragment": 3,
        "want": Version(1, 5),
        "have": None,
    }
    return bulk.FetchRequest(**(fields | changes))


def report(steps: int) -> messages.Report:
    return messages.Report(phase="training", steps=steps, step_seconds=0.5)


class Clock:
    """Goes on when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Recorder(Handlers):
    """Handlers that welcome everyone and store every upload in one buffer."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.stored = bytearray()
        self.published = b""
        self.scattered: list[memoryview] = []
        """Served after `published`."""
        self.version = Version(1, 5)
        self.refusal: WireError | None = None
        self.requests: list[bulk.FetchRequest] = []
        self._lock = threading.Lock()
        self._complete = 0

    def connect(self, hello: messages.Hello, session: Session) -> None:
        if self.refusal:
            raise self.refusal
        self.events.put(("connect", hello.island, session))
        session.send(
            messages.Welcome(
                run_id="r", term=1, resumed=False, versions=(self.version,)
            )
        )

    def receive(self, session: Session, message: Any) -> None:
        self.events.put(("receive", session.hello.island, message))

    def disconnect(self, session: Session) -> None:
        self.events.put(("disconnect", session.hello.island, session))

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        if self.refusal:
            raise self.refusal
        with self._lock:
            if len(self.stored) != start.total:
                self.stored = bytearray(start.total)
        return memoryview(self.stored)[start.offset : start.offset + start.length]

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        with self._lock:
            self._complete += start.length
            complete = self._complete == start.total
        self.events.put(("stripe", start.offset, start.length))
        return complete

    def fetch(self, request: bulk.FetchRequest) -> bulk.FetchSource:
        self.requests.append(request)
        if request.want != self.version:
            raise VersionGone(f"want {request.want}, have {self.version}")
        middle = len(self.published) // 3
        view = memoryview(self.published)
        buffers = [view[:middle], view[middle:], *self.scattered]
        return bulk.FetchSource(version=self.version, count=0, buffers=buffers)

    def status(self) -> dict[str, Any]:
        return {"islands": {"a": {"state": "training"}}}

    def next(self, kind: str) -> tuple[Any, ...]:
        """The next event, which must be of this kind."""
        event = self.events.get(timeout=WAIT_S)
        assert event[0] == kind, event
        return event[1:]


def until(happened: Callable[[], Any], meanwhile: Callable[[], Any] = int) -> None:
    """Wait for something that other threads bring about."""
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline
        meanwhile()
        time.sleep(0.001)


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def framed(message: Any) -> bytes:
    """A message, or raw bytes in its stead, as the bulk port takes it."""
    raw = message if isinstance(message, bytes) else bulk.encode(message)
    return bulk.message_header(len(raw)) + raw


def framed_chunk(payload: bytes, offset: int = 0) -> bytes:
    return bulk.chunk_header(memoryview(payload), offset) + payload


def answer_to(address: str, *parts: bytes) -> Any:
    """Return the answer of the bulk port to a peer that sends just these bytes."""
    host, port = addresses.parse_address(addresses.bulk_address(address))
    with socket.create_connection((host, port), WAIT_S) as connection:
        connection.sendall(b"".join(parts))
        connection.shutdown(socket.SHUT_WR)
        return BulkConnection(connection, "coordinator").receive(bulk.bulk_reply)


class Dribble:
    """Serves the first `good` chunks of every stripe and then waits to be stopped."""

    def __init__(self, good: int) -> None:
        self.reached = threading.Semaphore(0)
        self.gone = threading.Event()
        self._good, self._chunks = good, bulk.chunks

    def chunks(self, *arguments):
        for number, frame in enumerate(self._chunks(*arguments)):
            if number == self._good:
                self.reached.release()
                self.gone.wait(3 * WAIT_S)
                return
            yield frame
