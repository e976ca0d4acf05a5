"""Signals that ask an island's process to end."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Callable, Iterator

from diloco_jax.process import heeding_signals


@contextlib.contextmanager
def ended_by_signals(end_island: Callable[[str], None]) -> Iterator[None]:
    """End the island at its next step boundary when it is asked to end, with a goodbye;
    a second Ctrl-C ends it at once.

    end_island: called with the name of the signal, on a thread of its own.
    """

    def end(number: int, frame: types.FrameType | None) -> None:
        name = signal.Signals(number).name
        # Not from the handler itself: the main thread may hold the mailbox's lock.
        threading.Thread(target=end_island, args=(name,), daemon=True).start()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    with heeding_signals(end):
        yield
