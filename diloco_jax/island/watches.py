"""Watches over an island's process: who asks it to end, and what may end it.

The notice that this machine will be taken away comes as SIGTERM, or as a value of the
cloud's metadata server. The loop then makes no more steps, and the coordinator asks for
everything that is open, whatever tick is due. Once it has that, or after
`placement.notice_s`, the island says goodbye: a delta that has arrived is merged
without the island, one that is on its way is lost.

A device, a compiler or a collective that hangs holds the main thread for ever, while
the thread that reports goes on: to the coordinator, such an island is alive. So a
process whose start or loop hangs says where, and ends. Its supervisor then starts it
again.

Where the machine is short of memory or disk, the log says how much is left; the
island's reports say what is short, so that people hear of it who do not read its log.
Host 0 hears of the others as they answer it.

An operator may ask for a trace of the next steps. Host 0 alone makes it: its devices
run the same program as all others, and where it waits for another host its trace shows
the collective that waits. The train loop takes no part in it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import threading
import time
import types
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax

from diloco_jax import machine
from diloco_jax.island import world
from diloco_jax.island.loop import Loop
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.process import HangDetector, heeding_signals, leave_at_once
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.messages import ProfileRequest, Short

logger = logging.getLogger(__name__)

LONG_POLL_S = 60
"""Seconds after which the metadata server answers at the latest, changed or not."""
AWAY_S = 5.0
"""Seconds between questions to a server that is away."""
LOOK_S = 1.0
"""Seconds between two looks."""
LITTLE_LEFT = 0.03
"""Share of the machine's memory below which little is left."""
GIVE_BACK_LOOKS = 10
"""Looks from one `give_memory_back` to the next, at most. Arrays of takes and adoptions
come from a step's temporary memory and leave holes in it: a CPU island of 87 M
parameters grew by 0.6 GB within a cycle. Each time takes some tens of milliseconds of
this thread."""
GROWN = 1.005
"""Growth of this process's peak memory at which the next one comes at once. In a run's
first cycle each take leaves a residual between holes: with ten looks to the next one,
the peak was up to 9 % above what an island needs."""
IN_FLIGHT = 1
"""Steps that are dispatched, and perhaps not done, when the loop posts one."""


@contextlib.contextmanager
def ended_by_signals(end_island: Callable[[str], None]) -> Iterator[None]:
    """End the island at its next step boundary when it is asked to end, with a goodbye;
    a second Ctrl-C ends it at once.

    end_island: called with the name of the signal, on a thread of its own.
    """

    def end(number: int, frame: types.FrameType | None) -> None:
        name = signal.Signals(number).name
        # Not from the handler itself: the main thread may hold the mailbox's lock.
        _thread("asked to end", end_island, name)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    with heeding_signals(end):
        yield


def leave(mailbox: Mailbox, within_s: float, ending: Ending) -> threading.Thread:
    """End the loop, on a thread of its own, once the open takes have been sent, or
    after `within_s`; at once if it has not begun.

    Do not call it from a signal handler: the mailbox has a lock.
    """

    def end() -> None:
        if mailbox.status().phase in ("training", "stopped"):
            began = time.monotonic()
            mailbox.leave()
            sent = mailbox.wait_to_leave(within_s)
            logger.info(
                "%s of what was open has arrived after %.1f s",
                "all" if sent else "not all",
                time.monotonic() - began,
            )
        mailbox.end(*ending)

    return _thread("leaving", end)


def watch_metadata(noticed: Callable[[str], None]) -> threading.Thread:
    """Start waiting for the metadata server's notice, beside the loop.

    noticed: called with the name of the source. Where no server answers, the thread
    ends and nothing else happens.
    """

    def watch() -> None:
        tag, known = "", False
        while True:
            try:
                value, tag = _ask(tag)
            except (OSError, ValueError) as error:
                if not known:
                    logger.debug("no metadata server: %s", error)
                    return
                # The server is away for moments now and then.
                time.sleep(AWAY_S)
                continue
            known = True
            if value.strip().upper() == "TRUE":
                noticed("the metadata server")
                return

    return _thread("preemption", watch)


def _thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, args=args, daemon=True)
    thread.start()
    return thread


def _ask(tag: str) -> tuple[str, str]:
    """Return the value of `instance/preempted` and its tag. With a tag, the answer
    comes when the value is no longer that one, or after LONG_POLL_S."""
    if not tag:
        return world.ask_metadata("preempted")
    query = {"wait_for_change": "true", "last_etag": tag, "timeout_sec": LONG_POLL_S}
    path = f"preempted?{urllib.parse.urlencode(query)}"
    return world.ask_metadata(path, LONG_POLL_S)


class HangWatch(HangDetector):
    """Watches one island's process: the parts of its start, then its loop, which calls
    `touch` at its boundaries."""

    def __init__(
        self,
        budget_s: float,
        hangs: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """budget_s: longest time between two touches, and longest time of a part of the
        start beyond what it may take; 0 = any."""
        super().__init__(budget_s, hangs, clock)
        self._budget_s, self._part = budget_s, ""

    def begin(self, part: str, lasts_s: float, setting: str) -> None:
        """Watch a part of the start from now on, which may take `lasts_s`, as `setting`
        says."""
        self.touch()
        self._limit_s = self._budget_s and lasts_s + self._budget_s
        self._part = f"{part} may take {lasts_s:.0f} s ({setting}), and "
        logger.info("%s begins", part)
        self.start()

    def run(self, loop: Loop) -> Ending:
        """Run the loop under this watch."""
        self.touch()
        self._limit_s, self._part = self._budget_s, ""
        loop.touch = self.touch
        self.start()
        return loop.run()

    def words(self, quiet_s: float) -> str:
        """See `HangDetector`."""
        return (
            f"hangs: no step and no boundary for {quiet_s:.0f} s; {self._part}"
            f"placement.hang_budget_s = {self._budget_s:g}; a device, a compiler or a "
            f"collective does not answer"
        )


def end_hanging(
    stop: Callable[[Ending], None], ending: Ending, within_s: float
) -> NoReturn:
    """End a process whose main thread hangs; say goodbye by `stop` if there is time."""
    _thread("goodbye", stop, ending).join(within_s)
    leave_at_once(ending.exit_code)


class ShortageWatch:
    """Looks again and again, on a thread of its own: a disk that hangs holds up no
    other watch. It ends with the block."""

    def __init__(self, folder: Path, tell: Callable[[tuple[Short, ...]], None]) -> None:
        """folder: this process writes to it. tell: called with what is short when that
        changes."""
        self._folder, self._tell = folder, tell
        self._short: dict[Short, str] = {}
        self._looks, self._peak = 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shortage", daemon=True)

    def __enter__(self) -> ShortageWatch:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()

    def look(self) -> None:
        """Look once; tell, and log what has become short."""
        self._give_back()
        short = dict(self._found())
        new = short.keys() - self._short.keys()
        for what in sorted(new):
            logger.warning("%s", short[what])
        if short.keys() != self._short.keys():
            self._tell(tuple(sorted(short)))
        self._short = short

    def _give_back(self) -> None:
        """Return freed memory to the system, if it is time for it."""
        self._looks += 1
        peak = machine.peak_bytes()
        if self._looks >= GIVE_BACK_LOOKS or peak > GROWN * self._peak:
            self._looks, self._peak = 0, peak
            machine.give_memory_back()

    def _found(self) -> Iterator[tuple[Short, str]]:
        left, whole = machine.left_bytes()
        if whole and left < LITTLE_LEFT * whole:
            if "memory" not in self._short:
                machine.give_memory_back()
            yield (
                "memory",
                f"{left / 1e9:.1f} of {whole / 1e9:.1f} GB of memory are left on this "
                f"machine, and this process has {machine.resident_bytes() / 1e9:.1f}: "
                f"it may be killed for it",
            )
        folder = self._folder
        made = next(f for f in (folder, *folder.absolute().parents) if f.exists())
        free = shutil.disk_usage(made).free
        if free < machine.LITTLE_DISK_BYTES:
            yield (
                "disk",
                f"{free / 1e6:.0f} MB are free in {folder}: checkpoints and the log "
                f"fail once it is full; free some space there",
            )

    def _run(self) -> None:
        told = False
        while not self._ended.wait(LOOK_S):
            try:
                self.look()
                told = False
            except OSError as error:  # A folder elsewhere may be away for a while.
                if not told:
                    logger.warning("cannot look for space: %s", error)
                told = True


def trace_steps(
    mailbox: Mailbox, name: str, folder: Path, request: ProfileRequest
) -> threading.Thread:
    """Trace the next steps with jax.profiler, on a thread that no one waits for, into a
    folder NAME-STEP in this one. A second trace at the same time fails. The log says
    where the trace is, or why there is none."""

    def trace() -> None:
        try:
            made = _traced(mailbox, folder, name, request)
        except Exception as error:
            # Whatever it is, it is told; the island trains on.
            logger.warning(
                "no trace of %d steps: %s: %s",
                request.steps,
                type(error).__name__,
                error,
            )
        else:
            logger.info(
                "the trace of %d steps is in %s; `tensorboard --logdir` of it shows "
                "them (pip install xprof)",
                request.steps,
                made,
            )

    return _thread("profile", trace)


def _traced(mailbox: Mailbox, folder: Path, name: str, request: ProfileRequest) -> Path:
    """Return the folder of the trace, which is named after the steps made before it."""
    options = jax.profiler.ProfileOptions()
    # Python's own tracer would slow down every thread, the loop's first of all.
    options.python_tracer_level = 0
    until = time.monotonic() + request.within_s

    def passed(step: int) -> int:
        """Wait until that many steps are made; return how many are."""
        mailbox.wait_for_post(
            lambda status, _: status.steps >= step or mailbox.ending is not None,
            until - time.monotonic(),
        )
        made = mailbox.status().steps
        if made >= step:
            return made
        if mailbox.ending is not None:
            raise RuntimeError("the island ends")
        raise TimeoutError(
            f"the island was at step {made} when the time for the trace was over, and "
            f"has to come to step {step}"
        )

    begun = mailbox.status().steps
    folder = (folder / f"{name}-{begun}").absolute()
    # A trace that cannot be written leaves jax with a profiler that has begun.
    folder.mkdir(parents=True, exist_ok=True)
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        passed(passed(begun + 1) + request.steps + IN_FLIGHT)
    finally:
        jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
    return folder
