"""A process of the `diloco` command: its start, its end, the signals between.

Standard streams may be closed, or their reader may go away while a command runs: a run
does not depend on who reads what it says, its logs, tape and summary have it all.

Ctrl-C, SIGTERM and SIGHUP are a count to wait on, or an orderly end of a command.
Either way a second request ends the work at once. A process whose threads may be in
C++ is ended by `end_process`. `HangDetector` notices that a thread which says regularly
that it goes on has stopped saying so; `crashes_in_a_row` limits the restarts of a
process that crashes.

The logs of all processes have one format (`setup_logging`).
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import faulthandler
import gc
import io
import logging
import operator
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Self, TextIO, cast

from diloco_jax.errors import EXIT_FAILED

logger = logging.getLogger(__name__)


def hold_streams(*, unread: bool) -> None:
    """Open the standard streams that are closed, on nothing, and let standard error
    lose its reader. unread: standard output may lose its reader, too.

    Call it before anything else opens a file, which would get the number of a stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free. Children get the streams, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = _lasting(sys.stderr or os.fdopen(2, "w", closefd=False), OSError)
    if unread:
        # A full disk still is an error: only a reader may be missing.
        sys.stdout = _lasting(sys.stdout, BrokenPipeError)


def _lasting(stream: Any, unheard: type[OSError]) -> TextIO:
    """Return a stream to the same file that does not raise this error of writes."""
    raw, unbuffered = _Lasting(stream.fileno(), unheard), stream.write_through
    return io.TextIOWrapper(
        cast(Any, raw if unbuffered else io.BufferedWriter(raw)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=unbuffered,
    )


class _Lasting(io.FileIO):
    def __init__(self, number: int, unheard: type[OSError]) -> None:
        super().__init__(number, "w", closefd=False)
        self._unheard = unheard

    def write(self, octets: Any) -> int:
        try:
            return super().write(octets)
        except self._unheard:
            return memoryview(octets).nbytes


@contextlib.contextmanager
def gc_pause() -> Iterator[None]:
    """Collect nothing inside, and never look again at what there is at its end.

    A start makes a third of a million objects that stay: modules, and traces of
    programs. The collector looks at all of them again whenever they have grown by a
    quarter, which took about a sixth of the start of a small island; later they would
    be looked at in every full collection, amid a boundary.

    For imports and compilations of our own processes: a cycle of what was made before
    the end of it is never freed. If the collector is off, it stays so, and nothing
    happens.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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


def end_when_asked() -> None:
    """End this process at SIGINT and SIGTERM until it handles these itself, also where
    a script ignores SIGINT for what it starts with `&`. The first process of a
    container must say so: the kernel brings it no signal that it does not handle, and a
    notice during its first seconds, as it imports jax, would be lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _asked_to_end)


def _asked_to_end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def end_process(exit_code: int) -> NoReturn:
    """End this process without the end of Python: run what was registered for the exit,
    then leave. Other threads are stopped wherever they are.

    As Python ends it stops daemon threads where they next ask for the interpreter. One
    that does so from within JAX or gRPC aborts the process, which hides its exit code.
    """
    atexit._run_exitfuncs()
    leave_at_once(exit_code)


def leave_at_once(exit_code: int) -> NoReturn:
    """End this process with its output written, and nothing else done. At an exit JAX
    would wait for the other hosts of an island, and abort when they are gone."""
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # Nobody reads it, or closed.
            stream.flush()
    os._exit(exit_code)


LOOK_S = 1.0
"""Seconds between two looks."""


class HangDetector(abc.ABC):
    """Watches one thread, which calls `touch`, from a thread of its own.

    hangs: called once, on the watch's thread, with what people are to know. A machine
    or process that stands still, as while it is suspended, counts as two looks at most.
    """

    def __init__(
        self,
        limit_s: float,
        hangs: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit_s: longest time between two touches; 0 = any."""
        self.hangs = hangs
        self._limit_s, self._clock = limit_s, clock
        self._touches = 0
        self._seen, self._quiet_s, self._looked = -1, 0.0, clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def start(self) -> None:
        """Watch from now on."""
        self.touch()
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """End the watch."""
        self._ended.set()

    def touch(self) -> None:
        """Note that the thread goes on."""
        self._touches += 1

    def look(self) -> bool:
        """Count the time without a touch; return True if it is over the limit."""
        now, touches = self._clock(), self._touches
        passed_s, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._quiet_s = self._quiet_s + passed_s if touches == self._seen else 0.0
        self._seen = touches
        return 0 < self._limit_s <= self._quiet_s

    @abc.abstractmethod
    def words(self, quiet_s: float) -> str:
        """Return what people are to know after such a silence."""

    def _run(self) -> None:
        self._looked = self._clock()
        while not self._ended.wait(LOOK_S):
            if self.look():
                self._tell()
                return

    def _tell(self) -> None:
        text = self.words(self._quiet_s)
        logger.error("%s; its threads are at:", text)
        try:
            faulthandler.dump_traceback(sys.stderr)
        except (OSError, ValueError, AttributeError) as error:  # It has no file.
            logger.error("no stack could be written: %s", error)
        self.hangs(text)


STEADY_S = 600.0
"""Seconds of running after which the cause of earlier crashes counts as over, and
restarts are counted anew. Over weeks, every machine fails."""


def crashes_in_a_row(before: int, ran_s: float) -> int:
    """Return the number of crashes in a row, including the present one.

    Args:
      before: the number before this crash.
      ran_s: seconds for which the process ran; a long life starts the count anew.
    """
    return 1 if ran_s >= STEADY_S else before + 1


def setup_logging(level: str = "INFO") -> None:
    """Send the package's log to standard error, times in UTC; others' from WARNING on.

    Calling it again replaces what it did before.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("diloco_jax").setLevel(level)
