"""Bounded queues, waits that end, and threads that hold up no process.

gRPC's synchronous interface has no deadline on one message of a stream; `IdleWatch`
adds it. Its threads, and those of the standard library's pools, outlive their owner.
The threads of `DaemonPool` do not keep a process from ending.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from diloco_jax.wire.errors import WireError

KEPT_IDLE = 8
"""Threads of a pool that wait for tasks; one that is done when there are as many ends.
A thread that is started again costs far less than a transfer."""
_ITEM_OVERHEAD_BYTES = 64
_POLL_S = 60.0


class QueueClosed(Exception):  # noqa: N818
    """The queue is closed and, for its reader, empty. `error` says why, if anything."""

    def __init__(self, error: WireError | None) -> None:
        super().__init__(error)
        self.error = error


class ByteQueue:
    """First-in-first-out queue, bounded by the bytes it holds; it ends when closed."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        """Bytes that the items take, with a little extra for each."""
        self._items: collections.deque[bytes] = collections.deque()
        self._condition = threading.Condition()
        self._closed = False
        self._error: WireError | None = None

    def put(self, item: bytes, *, wait: bool = False) -> bool:
        """Add an item; return False if there is no room, or wait for room with `wait`.

        Raises QueueClosed if the queue is closed.
        """
        size = len(item) + _ITEM_OVERHEAD_BYTES
        with self._condition:
            while True:
                if self._closed:
                    raise QueueClosed(self._error)
                if not self._items or self.held_bytes + size <= self._limit_bytes:
                    break
                if not wait:
                    return False
                self._condition.wait(_POLL_S)
            self._items.append(item)
            self.held_bytes += size
            self._condition.notify_all()
            return True

    def get(self, timeout_s: float = _POLL_S) -> bytes | None:
        """Return the next item; None after `timeout_s` without one; QueueClosed after
        the last."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not self._items:
                if self._closed:
                    raise QueueClosed(self._error)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._condition.wait(left_s)
            item = self._items.popleft()
            self.held_bytes -= len(item) + _ITEM_OVERHEAD_BYTES
            self._condition.notify_all()
            return item

    def items(self) -> Iterator[bytes]:
        """Yield what is put, until the queue is closed."""
        with contextlib.suppress(QueueClosed):
            while True:
                if (item := self.get()) is not None:
                    yield item

    def close(self, error: WireError | None = None, *, discard: bool = False) -> None:
        """Accept no more items; what is held is still read unless `discard`. The first
        call's error stays."""
        with self._condition:
            if not self._closed:
                self._closed, self._error = True, error
            if discard:
                self._items.clear()
                self.held_bytes = 0
            self._condition.notify_all()


class Guard:
    """One wait or transfer under an `IdleWatch`."""

    def __init__(self, limit_s: float, on_expiry: Callable[[], Any]) -> None:
        self.limit_s = limit_s
        self.expired = False
        self.on_expiry = on_expiry
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Note progress: the limit starts anew."""
        self._touched = time.monotonic()

    @property
    def expires(self) -> float:
        """Time on the monotonic clock at which the guard expires unless touched."""
        return self._touched + self.limit_s


class IdleWatch:
    """End what makes no progress: one daemon thread for any number of guards."""

    def __init__(self, name: str) -> None:
        self._guards: set[Guard] = set()
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def guard(self, limit_s: float, on_expiry: Callable[[], Any]) -> Iterator[Guard]:
        """Call `on_expiry`, which must not block, if nothing touches the guard for
        `limit_s` inside the block. It is never called, or at work, after the block."""
        guard = Guard(limit_s, on_expiry)
        with self._condition:
            self._guards.add(guard)
            self._condition.notify()
        try:
            yield guard
        finally:
            with self._condition:
                self._guards.discard(guard)

    def close(self, timeout_s: float) -> None:
        """End the thread; guards expire no more."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                now = time.monotonic()
                expired = [guard for guard in self._guards if guard.expires <= now]
                self._guards.difference_update(expired)
                # With the lock, so that no guard is over meanwhile: what it guarded
                # may serve another.
                for guard in expired:
                    guard.expired = True
                    guard.on_expiry()
                if not expired:
                    first = min(
                        (g.expires for g in self._guards), default=now + _POLL_S
                    )
                    self._condition.wait(first - now)


class DaemonPool(futures.Executor):
    """At most `limit` daemon threads, started when needed, and ended when idle.

    If the system has no more threads, tasks wait for those that there are.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._condition = threading.Condition()
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count()
        self._idle = 0
        self._closed = False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Submit a task like `concurrent.futures.Executor.submit`; RuntimeError after
        `close`, or if the system refuses the first thread."""
        future: futures.Future[Any] = futures.Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        with self._condition:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._idle <= len(self._tasks) and len(self._threads) < self._limit:
                name = f"{self._name}-{next(self._numbers)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    thread.start()
                    self._threads.add(thread)
                except RuntimeError:  # "can't start new thread"
                    if not self._threads:
                        raise
            self._tasks.append(task)
            self._condition.notify()
        return future

    def close(self, timeout_s: float) -> None:
        """Take no more tasks and wait for those under way, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._condition:
                if self._idle >= KEPT_IDLE and not self._tasks:
                    self._threads.discard(threading.current_thread())
                    return
                self._idle += 1
                while not self._tasks and not self._closed:
                    self._condition.wait(_POLL_S)
                self._idle -= 1
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
            del task  # an idle thread would hold its arguments, a whole payload
