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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from diloco_jax import machine
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.island.hosts import world
from diloco_jax.island.loop import Loop
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.process import HangDetector, heeding_signals, leave_at_once
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.messages import Short

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
"""Looks from one `memory.give_back` to the next, at most. Arrays of takes and adoptions
come from a step's temporary memory and leave holes in it: a CPU island of 87 M
parameters grew by 0.6 GB within a cycle. Each time takes some tens of milliseconds of
this thread."""
GROWN = 1.005
"""Growth of this process's peak memory at which the next one comes at once. In a run's
first cycle each take leaves a residual between holes: with ten looks to the next one,
the peak was up to 9 % above what an island needs."""


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


class Preemption:
    """Handle the notice that this machine will be taken away: `watch` waits for it,
    `notice` acts on it.

    Args:
      notice_s: seconds from the notice until the goodbye must be said; 0 = this machine
        is not taken away, and `watch` does nothing.
      tell_leader: on a host that follows host 0: tells host 0, which decides.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        notice_s: float,
        tell_leader: Callable[[str], None] | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._tell_leader = tell_leader
        self._notice_s = notice_s
        self._noticed = threading.Lock()

    @property
    def expected(self) -> bool:
        """True if SIGTERM is a notice."""
        return self._notice_s > 0

    def notice(self, source: str) -> None:
        """End the loop once the open takes have been sent.

        Do not call it from a signal handler: the mailbox has a lock. The process exits
        with the code of a failure, so that its supervisor starts the island again.
        """
        if self._tell_leader is not None:
            self._tell_leader(source)
            return
        if not self._noticed.acquire(blocking=False):
            return  # Two sources tell of one notice.
        logger.warning("notice by %s: this island leaves", source)
        thread = threading.Thread(
            target=self._leave, args=(source,), name="leaving", daemon=True
        )
        thread.start()

    def watch(self, host: str = "") -> threading.Thread | None:
        """Start waiting for the metadata server's notice, beside the loop.

        host: HOST or HOST:PORT of the server; empty = GCE_METADATA_HOST, or the usual
        one. Where none answers, the thread ends and nothing else happens.
        """
        if not self.expected:
            return None
        thread = threading.Thread(
            target=self._watch, args=(host,), name="preemption", daemon=True
        )
        thread.start()
        return thread

    def _leave(self, source: str) -> None:
        if self._mailbox.status().phase in ("training", "stopped"):
            began = time.monotonic()
            self._mailbox.leave()
            sent = self._mailbox.wait_to_leave(self._notice_s)
            logger.info(
                "%s of what was open has arrived after %.1f s",
                "all" if sent else "not all",
                time.monotonic() - began,
            )
        self._mailbox.end(EXIT_FAILED, f"preempted ({source})", "preempted")

    def _watch(self, host: str) -> None:
        tag, known = "", False
        while True:
            try:
                value, tag = _ask(host, tag)
            except (OSError, ValueError) as error:
                if not known:
                    logger.debug("no metadata server: %s", error)
                    return
                # The server is away for moments now and then.
                time.sleep(AWAY_S)
                continue
            known = True
            if value.strip().upper() == "TRUE":
                self.notice("the metadata server")
                return


def _ask(host: str, tag: str) -> tuple[str, str]:
    """Return the value of `instance/preempted` and its tag. With a tag, the answer
    comes when the value is no longer that one, or after LONG_POLL_S."""
    if not tag:
        return world.ask_metadata("preempted", host)
    query = {"wait_for_change": "true", "last_etag": tag, "timeout_sec": LONG_POLL_S}
    path = f"preempted?{urllib.parse.urlencode(query)}"
    return world.ask_metadata(path, host, LONG_POLL_S)


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


def end_hanging(stop: Callable[[Ending], None], text: str, within_s: float) -> NoReturn:
    """End a process whose loop hangs; say goodbye by `stop` if there is time."""
    ending = Ending(EXIT_FAILED, text)
    goodbye = threading.Thread(target=stop, args=(ending,), name="goodbye", daemon=True)
    goodbye.start()
    goodbye.join(within_s)
    leave_at_once(EXIT_FAILED)


class ShortageWatch:
    """Looks again and again, on a thread of its own: a disk that hangs holds up no
    other watch. It ends with the block."""

    def __init__(
        self, folders: Sequence[Path], tell: Callable[[tuple[Short, ...]], None]
    ) -> None:
        """folders: those that this process writes to. tell: called with what is short
        when that changes."""
        self._folders, self._tell = folders, tell
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
        for folder in self._folders:
            made = next(f for f in (folder, *folder.absolute().parents) if f.exists())
            free = shutil.disk_usage(made).free
            if free < machine.LITTLE_DISK_BYTES:
                yield (
                    "disk",
                    f"{free / 1e6:.0f} MB are free in {folder}: checkpoints and the "
                    f"log fail once it is full; free some space there",
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
