"""Ctrl-C, SIGTERM and SIGHUP as something to wait on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


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
        self._event = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
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

    def wait(self, seconds: float) -> None:
        """Sleeps, less long if a signal comes that was not waited for before."""
        self._event.wait(seconds)
        self._event.clear()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._event.set()


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
