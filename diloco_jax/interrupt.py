"""Ctrl-C, SIGTERM and SIGHUP: a count to wait on, or an orderly end of a command.

Either way a second request ends the work at once.
"""

from __future__ import annotations

import contextlib
import operator
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from diloco_jax.exit_codes import EXIT_FAILED

PIPE_BYTES = 1 << 16
NOTHING = operator.is_
"""Handler that does nothing. It is in C, so no other handler can begin within it."""
RAISES = signal.SIGURG
"""Signal that raises in the main thread. No other program sends it, and a process
without a handler ignores it."""
UNASKED_S = 3600.0
AGAIN_S = 0.05
"""Seconds until a request whose exception was discarded is raised again."""
STDERR = 2
SHOW_CURSOR = "\x1b[?25h"
"""Terminal code that shows the cursor, which progress bars hide."""


Handler = Callable[[int, FrameType | None], None]


def signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process of a run, or a command, to end.

    SIGHUP is left out where it is ignored, as under `nohup`. SIGINT is not: scripts
    ignore it for all that they start with `&`, and nobody asked for that."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heed_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Handle these signals, if this is the main thread; return the handlers before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in signals()}


@contextlib.contextmanager
def heeding_signals(handler: Handler) -> Iterator[None]:
    """Handle them so while the block runs."""
    before = heed_signals(handler)
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


class Interrupt:
    """Count requests to end this process while the `with` block runs.

    The first request asks for an orderly end, a second one for an end at once.
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
        # faster than the handler would nest until no frame is left.
        self._wakeup = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        for number in signals():
            self._previous[number] = signal.signal(number, NOTHING)
        return self

    def __exit__(self, *error: object) -> None:
        self._listen()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._ears)
        os.close(self._mouth)
        self._open = False

    @property
    def count(self) -> int:
        """Number of signals so far; after the block, of those within it."""
        if self._open:
            self._listen()
        return self._count

    def wait(self, seconds: float) -> None:
        """Sleep, but end early for a signal that no `wait` has returned for yet."""
        if not self._unwaited:
            poll = select.poll()
            poll.register(self._ears, select.POLLIN)
            poll.poll(seconds * 1000)
        self._listen()
        self._unwaited = False

    def wake(self) -> None:
        """End a `wait`, from another thread."""
        os.write(self._mouth, b"\0")

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):  # Nothing came.
            heard = os.read(self._ears, PIPE_BYTES)
            self._count += sum(number in self._previous for number in heard)
            self._unwaited = True


class Interruptible:
    """Raise `KeyboardInterrupt` at the first request while the `with` block runs.

    The block runs in the main thread; a second request ends the process with code 1.

    Python's own handler raises wherever the main thread is, and some places discard the
    exception: callbacks of the garbage collector, for example, of which jax has one.
    This class raises it again until it is not discarded. It never raises in the middle
    of an import, which not every library survives.
    """

    def __enter__(self) -> Interruptible:
        self._due, self._over = False, False
        self._interrupt = Interrupt().__enter__()
        self._previous = signal.signal(RAISES, self._raise)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._interrupt.wake()
        self._watcher.join()
        if self._interrupt.count > 1:
            _end_at_once()
        sys.unraisablehook = self._hook
        signal.signal(RAISES, self._previous)
        self._interrupt.__exit__(*error)

    def _watch(self) -> None:
        """Watch for requests, in a thread of its own: the main one may be blocked."""
        main, asked = threading.main_thread().ident, 0
        assert main is not None
        while not self._over:
            before, asked = asked, self._interrupt.count
            if asked > 1:
                _end_at_once()
            if asked > before:
                self._due = True
            if self._due:
                # It may come just before a system call, which then waits all the same.
                signal.pthread_kill(main, RAISES)
            self._interrupt.wait(AGAIN_S if asked else UNASKED_S)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Handle RAISES. Python is safe here: only the watcher sends it, and rarely."""
        if self._due and not self._over and not _imports(frame):
            self._due = False
            raise KeyboardInterrupt

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Note an interrupt that was discarded where it was raised."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._due = True
        else:
            self._hook(unraisable)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end_at_once() -> None:
    cursor = SHOW_CURSOR if os.isatty(STDERR) else ""
    with contextlib.suppress(OSError):
        os.write(STDERR, f"{cursor}error: interrupted twice, ended at once\n".encode())
    os._exit(EXIT_FAILED)
