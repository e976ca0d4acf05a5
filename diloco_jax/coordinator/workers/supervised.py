"""A worker's process and its successors: start or dial, listen, do it again."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.watchdog import clock
from diloco_jax.coordinator.workers.crashes import Crashes
from diloco_jax.coordinator.workers.line import START_S, WorkerLine, write_frame
from diloco_jax.coordinator.workers.outpost.dialing import Elsewhere
from diloco_jax.coordinator.workers.places import BesideLead, Place, Unreachable
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.holding import (
    AllSaved,
    BeginWorker,
    EndWorker,
    Forget,
    FragmentKept,
    FragmentsRestored,
    FromHolder,
    LeadAlive,
    RestoreFragments,
    SaveAll,
    ToHolder,
    WorkerAlive,
    WorkerFailed,
    WorkerRefused,
    WorkerServes,
    from_worker,
)

logger = logging.getLogger(__name__)

Heard = FromHolder | WorkerAway | WorkerBack | FragmentKept


class Shown(NamedTuple):
    """The facts about a worker that `diloco status` shows."""

    worker: int
    address: str
    """Empty while it is away."""
    pid: int
    fragments: int
    memory_bytes: int
    """The most memory that its process has had."""
    resident_bytes: int
    """The memory that it has now."""


class Supervised:
    """One worker's process and its successors, with a thread that listens to it."""

    def __init__(
        self,
        begin: BeginWorker,
        config: Config,
        hear: Callable[[Heard], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """failed: called once no restart is left, in place of `WorkerAway`."""
        self.name = f"worker {begin.worker}"
        self.alerts: tuple[str, ...] = ()
        self.address = ""
        self._begin, self._config = begin, config
        self._hear, self._failed = hear, failed
        self._deadlines = config.placement.deadlines
        self._orders: queue.SimpleQueue[RestoreFragments | None] = queue.SimpleQueue()
        """First messages of a process; None: start no other."""
        self._restored: queue.SimpleQueue[FragmentsRestored | str] = queue.SimpleQueue()
        self._saved: queue.SimpleQueue[AllSaved | None] = queue.SimpleQueue()
        self._lines = threading.Lock()
        self._line: WorkerLine | None = None
        self._missed: dict[str, Forget] = {}
        """The order that the worker missed of each island, for when it is back."""
        self._ending = threading.Event()
        self._telling: threading.Thread | None = None
        """Tells a worker on another machine that the run is over."""
        self._place: Place = (
            Elsewhere(begin, config, self._ending)
            if config.placement.worker_addresses
            else BesideLead(begin, config)
        )
        self._crashes = Crashes(ends_with_line=self._place.ends_with_line)
        self._opened = 0.0
        """When the last line was made."""
        self._memory_bytes, self._resident_bytes = 0, 0
        self._serves, self._failure, self._refusal = False, "", ""
        self._cause: OSError | None = None
        """The system's error with which it failed, if it was one of this machine."""
        self._thread = threading.Thread(
            target=self._supervise, name=self.name, daemon=True
        )
        self._thread.start()

    @property
    def fragments(self) -> tuple[int, ...]:
        """Those that it holds."""
        return self._begin.fragments

    def begin(self, asked: RestoreFragments) -> None:
        """Start or dial a process, which restores these fragments; at first go on with
        that of an earlier lead, if it lives."""
        self._orders.put(asked)

    def restored(self, patience_s: float) -> FragmentsRestored:
        """Wait for the first process, which serves then; return its answer.

        Raises ConfigError if it does not come up in time.
        """
        patience_s += self._place.patience_s
        found: FragmentsRestored | str | None = None
        while found is None:
            try:
                found = self._restored.get(timeout=patience_s)
            except queue.Empty:
                if self._place.silent_s() < patience_s:
                    continue  # Files are on their way to it.
                found = f"it has not restored its fragments within {patience_s:g} s"
        if isinstance(found, str):
            raise ConfigError(f"{self.name} did not come up: {found}") from self._cause
        return found

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Its place, if that is another machine."""
        return self._place if isinstance(self._place, Elsewhere) else None

    def send(self, message: ToHolder | SaveAll) -> None:
        """Send a message; nothing happens while the worker is away, but that it hears
        of fenced incarnations when it is back."""
        with self._lines:
            if self._line is not None:
                self._line.send(message)
            elif isinstance(message, Forget):
                self._missed[message.island] = message

    def saved(self) -> AllSaved | None:
        """Return the answer to `SaveAll`; None if the worker is away."""
        while self._line is not None:
            with contextlib.suppress(queue.Empty):
                return self._saved.get(timeout=self._deadlines.report_s)
        with contextlib.suppress(queue.Empty):
            return self._saved.get_nowait()
        return None

    def shown(self) -> Shown:
        """Return the facts about this worker that `diloco status` shows."""
        return Shown(
            worker=self._begin.worker,
            address=self.address if self._serves else "",
            pid=self._place.pid,
            fragments=len(self._begin.fragments),
            memory_bytes=self._memory_bytes,
            resident_bytes=self._resident_bytes,
        )

    def end(self, *, over: bool = False) -> None:
        """Ask the process to end; start no other. over: the run is over."""
        self._ending.set()
        self._orders.put(None)
        line, there = self._line, self.elsewhere
        if line is not None:
            line.send(EndWorker())
        if over and there is not None:
            self._telling = threading.Thread(target=there.say_over, daemon=True)
            self._telling.start()

    def join(self, within_s: float) -> None:
        """Wait for the process; kill it if it stays. A worker on another machine is
        told of the end of the run for as long as it is dialled otherwise."""
        self._thread.join(within_s)
        self._place.end(kill=not self._ending.is_set())
        self._thread.join(1.0)
        if self._telling is not None:
            self._telling.join(self._place.patience_s + self._deadlines.connect_s)

    # ---- its thread -----------------------------------------------------------------

    def _supervise(self) -> None:
        first, placement = True, self._config.placement
        while (asked := self._orders.get()) is not None and not self._ending.is_set():
            try:
                if first and (why := self._bring_up(asked)):
                    self._restored.put(why)
                    return
                if not first:
                    self._live(asked, first, new=True)
            except Unreachable as error:
                self._give_up(first, f"{self.name} cannot be reached: {error}")
                return
            if self._ending.is_set():
                return
            first = False
            if self._crash_loop():
                self._give_up(
                    first,
                    f"{self.name} failed {self._crashes.in_a_row} times in a row, "
                    f"placement.restarts = {placement.restarts}: {self._why()}; see "
                    f"its lines above, mend that, and start the coordinator again",
                )
                return
            logger.error("%s is away: %s", self.name, self._why())
            self._hear(WorkerAway(worker=self._begin.worker))
            self._ending.wait(placement.restart_delay_s)

    def _bring_up(self, asked: RestoreFragments) -> str:
        """Go through lives of the first processes until one has served; return why none
        does, or nothing. A process of an earlier lead may be unable to go on, but not
        the next one. Lines that the network breaks are made again, for as long as a
        worker is dialled. Raises Unreachable."""
        new, until, patience_s = False, math.inf, self._place.patience_s
        while True:
            left = self._live(asked, True, new=new)
            if self.address or self._ending.is_set():
                return ""
            now = time.monotonic()
            if now - self._opened > patience_s:
                until = math.inf  # The line has lasted: breaks before it are over.
            until = min(until, now + patience_s)
            if self._crashes.ends:
                if new or not left:
                    return f"{self._why()}; see its lines above"
                logger.warning(
                    "%s of an earlier lead cannot go on: %s", self.name, self._why()
                )
                self._crashes.excuse()
                new = True
            elif now < until:
                logger.warning("%s: %s; it is dialled again", self.name, self._why())
                self._ending.wait(self._config.placement.restart_delay_s)
            else:
                return (
                    f"{self._why()}, again and again for {patience_s:g} s "
                    f"(placement.outage_budget_s); check the network to its machine"
                )

    def _why(self) -> str:
        if self._failure or self._place.ends_with_line:
            return self._failure or "it ended"
        return "the line to it broke, or its process there ended"

    def _crash_loop(self) -> bool:
        return self._crashes.in_a_row > self._config.placement.restarts

    def _give_up(self, first: bool, why: str) -> None:
        if first:
            self._restored.put(why)
        elif not self._ending.is_set():
            failure = RuntimeError(why)
            failure.__cause__ = self._cause
            self._failed(failure)

    def _live(self, asked: RestoreFragments, first: bool, *, new: bool) -> bool:
        """Go through one life of a process, or what is left of it; tell whether it may
        have been that of an earlier lead. Raises Unreachable."""
        self._failure, self._cause = "", None
        self._crashes.line_begins(time.monotonic())
        try:
            opened = self._place.open(self._begin, asked, new)
        except OSError as error:  # As without memory for another process.
            self._failure, self._cause = f"it cannot be started: {error}", error
            self._crashes.line_broke(time.monotonic(), failed=True)
            return False
        self._begin, self._opened = opened.begin, time.monotonic()
        with contextlib.suppress(OSError):  # It has died already, as is heard next.
            write_frame(opened.end, replace(self._begin, clock=clock()))
        deadlines = self._deadlines
        line = WorkerLine(
            opened.end,
            from_worker,
            LeadAlive,
            deadlines.report_s,
            3 * deadlines.lease_s,
            START_S,
        )
        line.send(asked)
        with self._lines:
            for missed in self._missed.values():
                line.send(missed)
            self._missed.clear()
            self._line = line
        try:
            self._listen(line, first)
        except msgspec.DecodeError as error:
            self._failure = f"what it says cannot be read: {error}"
        self._line, self._serves = None, False
        line.close()
        self._place.end(kill=not self._ending.is_set())
        self._crashes.line_broke(time.monotonic(), failed=bool(self._failure))
        if self._refusal:
            raise Unreachable(self._refusal)
        return opened.left

    def _listen(self, line: WorkerLine, first: bool) -> None:
        """Pass on what the process says, until its line breaks."""
        restored: FragmentsRestored | None = None
        for message in line.messages():
            match message:
                case FragmentsRestored():
                    restored = message
                case WorkerServes(address=address):
                    self._came_up(address)
                    if first and restored is not None:
                        self._restored.put(restored)
                    else:
                        assert restored is not None
                        lost = tuple(f.fragment for f in restored.lost)
                        back = WorkerBack(
                            worker=self._begin.worker,
                            lost=lost,
                            restored=restored.fragments,
                        )
                        self._hear(back)
                case WorkerAlive():
                    self.alerts, self._memory_bytes = (
                        message.alerts,
                        message.memory_bytes,
                    )
                    self._resident_bytes = message.resident_bytes
                    self._crashes.heard(message.process)
                    if self._crash_loop():
                        line.part()
                case AllSaved():
                    self._saved.put(message)
                case WorkerFailed(text=text, errno=number):
                    # Its own word says why; that of its outpost follows.
                    if not self._failure:
                        self._failure = text
                        self._cause = self._of_own_disk(number, text)
                case WorkerRefused(text=text):
                    self._refusal = text
                case _:
                    self._hear(message)

    def _of_own_disk(self, number: int, text: str) -> OSError | None:
        """Return the system's error that a worker failed with, if it is of this
        machine: another node that leads finds a disk elsewhere as it is."""
        return OSError(number, text) if number and self.elsewhere is None else None

    def _came_up(self, bound: str) -> None:
        """Note where it serves; a later process serves at the same place."""
        self._serves = True
        self.address = self._place.address_of(bound)
        self._begin = replace(self._begin, bind=bound)
