"""Ctrl-C, SIGTERM and SIGHUP as something to wait on."""

from __future__ import annotations

import contextlib
import operator
import os
import select
import signal
from collections.abc import Iterator
from types import TracebackType
from typing import Any

PIPE_BYTES = 1 << 16
NOTHING = operator.is_
"""As a handler: it is in C, so no other one can begin within it."""


def signals() -> tuple[signal.Signals, ...]:
    """What asks this process to end; SIGHUP not where it is ignored, as by `nohup`."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Counts requests to end this process while the `with` block runs.

    The first asks to end in order, a second one to end at once.
    """

    def __enter__(self) -> Interrupt:
        self._count, self._unwaited = 0, False
        self._previous: dict[int, Any] = {}
        self._ears, self._mouth = os.pipe()
        self._open = True
        for end in (self._ears, self._mouth):
            os.set_blocking(end, False)
        # The interpreter itself writes each signal's number here. A handler in Python
        # could be interrupted by itself: a lock would wait for itself, and signals
        # faster than the handler would go deeper until no frame is left.
        self._wakeup = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        for number in signals():
            self._previous[number] = signal.signal(number, NOTHING)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listen()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._ears)
        os.close(self._mouth)
        self._open = False

    @property
    def count(self) -> int:
        """Signals so far; after the block, those within it."""
        if self._open:
            self._listen()
        return self._count

    def wait(self, seconds: float) -> None:
        """Sleeps, less long if a signal comes that was not waited for before."""
        if not self._unwaited:
            poll = select.poll()
            poll.register(self._ears, select.POLLIN)
            poll.poll(seconds * 1000)
        self._listen()
        self._unwaited = False

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):  # Nothing came.
            heard = os.read(self._ears, PIPE_BYTES)
            self._count += sum(number in self._previous for number in heard)
            self._unwaited = True


@contextlib.contextmanager
def as_keyboard_interrupt() -> Iterator[None]:
    """Inside, all of `signals` raise `KeyboardInterrupt`.

    For the main thread, of work that cleans up behind itself when it is interrupted.
    """
    previous = {
        number: signal.signal(number, signal.default_int_handler)
        for number in signals()
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
