"""Signals that ask an island's process to end."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ended_by_signals(end_island: Callable[[str], None]) -> Iterator[None]:
    """End the island at its next step boundary on SIGTERM or Ctrl-C, with a goodbye; a
    second Ctrl-C ends it at once. A signal that was ignored before still is, as in a
    script's background processes.

    end_island: called with the name of the signal, on a thread of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: types.FrameType | None) -> None:
        name = signal.Signals(number).name
        # Not from the handler itself: the main thread may hold the mailbox's lock.
        threading.Thread(target=end_island, args=(name,), daemon=True).start()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGINT)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
