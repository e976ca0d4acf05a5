"""Ctrl-C, SIGTERM and SIGHUP as something to wait on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

PIPE_BYTES = 1 << 16


def signals() -> tuple[signal.Signals, ...]:
    """What asks this process to end; SIGHUP not where it is ignored, as by `nohup`."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Counts requests to end this process while the `with` block runs.

    The first asks to end in order, a second one to end at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        # A handler runs wherever this thread is, in the middle of another one too: a
        # lock, as threading.Event has, would wait for itself.
        self._ears, self._mouth = os.pipe()
        for end in (self._ears, self._mouth):
            os.set_blocking(end, False)
        for number in signals():
            self._previous[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._ears)
        os.close(self._mouth)

    def wait(self, seconds: float) -> None:
        """Sleeps, less long if a signal comes that was not waited for before."""
        poll = select.poll()
        poll.register(self._ears, select.POLLIN)
        if poll.poll(seconds * 1000):
            os.read(self._ears, PIPE_BYTES)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):  # It is full: heard all the same.
            os.write(self._mouth, b"!")


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
