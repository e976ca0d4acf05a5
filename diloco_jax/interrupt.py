"""Ctrl-C, SIGTERM and SIGHUP: something to wait on, or the end of a command in order.

Either way a second request ends what goes on at once.
"""

from __future__ import annotations

import contextlib
import operator
import os
import select
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from diloco_jax.exit_codes import EXIT_FAILED

PIPE_BYTES = 1 << 16
NOTHING = operator.is_
"""As a handler: it is in C, so no other one can begin within it."""
RAISES = signal.SIGURG
"""Nobody sends it, and who does not know it ignores it."""
UNASKED_S = 3600.0
AGAIN_S = 0.05
"""Until a request that was raised nowhere is tried again."""
STDERR = 2
SHOW_CURSOR = "\x1b[?25h"
"""Progress bars hide it."""


def signals() -> tuple[signal.Signals, ...]:
    """What asks this process to end; SIGHUP not where it is ignored, as by `nohup`."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Counts requests to end this process while the `with` block runs.

    For who looks at the count: the first asks to end in order, a second one to end at
    once.
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

    def wake(self) -> None:
        """Ends a `wait`, from another thread."""
        os.write(self._mouth, b"\0")

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):  # Nothing came.
            heard = os.read(self._ears, PIPE_BYTES)
            self._count += sum(number in self._previous for number in heard)
            self._unwaited = True


class Interruptible:
    """While the `with` block runs, the first request raises `KeyboardInterrupt` in the
    main thread, which the block is in; a second one ends the process with code 1.

    Python's own handler raises wherever the main thread is, and there are places that
    discard it: callbacks of the garbage collector, of which jax has one. Here it is
    raised again until it is not discarded; and never in the middle of an import, which
    not every library survives.
    """

    def __enter__(self) -> Interruptible:
        self._due, self._over = False, False
        self._interrupt = Interrupt().__enter__()
        self._previous = signal.signal(RAISES, self._raise)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        self._interrupt.wake()
        self._watcher.join()
        if self._interrupt.count > 1:
            _end_at_once()
        sys.unraisablehook = self._hook
        signal.signal(RAISES, self._previous)
        self._interrupt.__exit__(kind, error, traceback)

    def _watch(self) -> None:
        """In a thread of its own, which acts while the main one is in a library."""
        main, asked = threading.main_thread().ident, 0
        assert main is not None
        while not self._over:
            before, asked = asked, self._interrupt.count
            if asked > 1:
                _end_at_once()
            if asked > before:
                self._due = True
            if self._due:
                # It may come a moment before a system call, which waits all the same.
                signal.pthread_kill(main, RAISES)
            self._interrupt.wait(AGAIN_S if asked else UNASKED_S)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """In Python, since only the watcher sends this signal, and now and then."""
        if self._due and not self._over and not _imports(frame):
            self._due = False
            raise KeyboardInterrupt

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Of an exception that cannot be raised where it came up."""
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
