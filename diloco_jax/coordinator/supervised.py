"""A worker's process and its successors: start, listen, start again."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from diloco_jax.cluster.restarts import crashes_in_a_row
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator import rendezvous
from diloco_jax.coordinator.rendezvous import Reached, Survivor
from diloco_jax.coordinator.worker_line import WorkerLine, write_frame
from diloco_jax.island.environment import fit_threads
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.holding import (
    FragmentsRestored,
    FromHolder,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.protocol.working import (
    AllSaved,
    BeginWorker,
    EndWorker,
    FragmentKept,
    FragmentSaved,
    LeadAlive,
    SaveAll,
    WorkerAlive,
    WorkerFailed,
    WorkerServes,
    from_worker,
)
from diloco_jax.wire import addresses

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "diloco_jax.coordinator.worker")


Heard = FromHolder | WorkerAway | WorkerBack | FragmentKept | FragmentSaved


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
        self._line: WorkerLine | None = None
        self._process: subprocess.Popen[bytes] | Survivor | None = None
        self._ending = threading.Event()
        self._memory_bytes, self._resident_bytes = 0, 0
        self._serves, self._failure = False, ""
        self._thread = threading.Thread(
            target=self._supervise, name=self.name, daemon=True
        )
        self._thread.start()

    def begin(self, asked: RestoreFragments) -> None:
        """Start a process, which restores these fragments; at first go on with that of
        an earlier lead, if it lives."""
        self._orders.put(asked)

    def restored(self, patience_s: float) -> FragmentsRestored:
        """Wait for the first process, which serves then; return its answer.

        Raises ConfigError if it does not come up in time.
        """
        try:
            found = self._restored.get(timeout=patience_s)
        except queue.Empty:
            found = f"it has not restored its fragments within {patience_s:g} s"
        if isinstance(found, str):
            raise ConfigError(f"{self.name} did not come up: {found}")
        return found

    def send(self, message: ToHolder | SaveAll) -> None:
        """Send a message; nothing happens while the worker is away."""
        line = self._line
        if line is not None:
            line.send(message)

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
        process = self._process
        return Shown(
            worker=self._begin.worker,
            address=self.address if self._serves else "",
            pid=process.pid if process is not None else 0,
            fragments=len(self._begin.fragments),
            memory_bytes=self._memory_bytes,
            resident_bytes=self._resident_bytes,
        )

    def end(self) -> None:
        """Ask the process to end; start no other."""
        self._ending.set()
        self._orders.put(None)
        line = self._line
        if line is not None:
            line.send(EndWorker())

    def join(self, within_s: float) -> None:
        """Wait for the process; kill it if it stays."""
        self._thread.join(within_s)
        self._kill()
        self._thread.join(1.0)

    # ---- its thread -----------------------------------------------------------------

    def _supervise(self) -> None:
        first, crashes, placement = True, 0, self._config.placement
        while (asked := self._orders.get()) is not None and not self._ending.is_set():
            began = time.monotonic()
            workdir, worker = Path(self._begin.workdir), self._begin.worker
            reached = rendezvous.reach(workdir, worker) if first else None
            if first:
                life = rendezvous.last_life(workdir, worker) + (reached is None)
                self._begin = replace(self._begin, life=life)
            self._live(asked, first, reached)
            if reached is not None and not self.address and not self._ending.is_set():
                logger.warning(
                    "%s, process %d of an earlier lead, cannot go on: %s",
                    self.name,
                    reached.process.pid,
                    self._failure or "it ended",
                )
                self._begin = replace(self._begin, life=self._begin.life + 1)
                self._live(asked, first, None)
            if self._ending.is_set():
                return
            if first and not self.address:
                why = self._failure or "it ended; see its lines above"
                self._restored.put(why)
                return
            first = False
            why = self._failure or "it ended"
            crashes = crashes_in_a_row(crashes, time.monotonic() - began)
            if crashes > placement.restarts:
                self._failed(
                    RuntimeError(
                        f"{self.name} failed {crashes} times in a row, "
                        f"placement.restarts = {placement.restarts}: {why}; see its "
                        f"lines above, mend that, and start the coordinator again"
                    )
                )
                return
            self._begin = replace(self._begin, life=self._begin.life + 1)
            logger.error("%s is away: %s", self.name, why)
            self._hear(WorkerAway(worker=self._begin.worker))
            self._ending.wait(placement.restart_delay_s)

    def _live(
        self, asked: RestoreFragments, first: bool, reached: Reached | None
    ) -> None:
        """Go through one life of a process, or what is left of it."""
        line = self._start(asked, reached)
        self._listen(line, first)
        self._line, self._serves = None, False
        line.close()
        self._kill()

    def _start(self, asked: RestoreFragments, reached: Reached | None) -> WorkerLine:
        """Start a process, unless one is reached, and say what it holds."""
        own = self._spawned() if reached is None else reached.end
        if reached is not None:
            self._process = reached.process
        self._failure = ""
        with contextlib.suppress(OSError):  # It has died already, as is heard next.
            write_frame(own, self._begin)
        deadlines = self._deadlines
        line = WorkerLine(
            own, from_worker, LeadAlive, deadlines.report_s, 3 * deadlines.lease_s
        )
        line.send(asked)
        self._line = line
        return line

    def _spawned(self) -> socket.socket:
        own, other = socket.socketpair()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        fit_threads(environment)
        with other:
            self._process = subprocess.Popen(
                [*COMMAND, str(other.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        return own

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
                case AllSaved():
                    self._saved.put(message)
                case WorkerFailed(text=text):
                    self._failure = text
                case _:
                    self._hear(message)

    def _came_up(self, bound: str) -> None:
        """Note where it serves; a later process serves at the same place."""
        self._serves = True
        placement = self._config.placement
        self.address = bound
        if placement.advertise:
            _, port = addresses.parse_address(bound)
            there, first = addresses.parse_address(placement.advertise)
            # Where ports are fixed, each is forwarded as the coordinator's own is.
            if own := addresses.parse_address(placement.bind)[1]:
                port += first - own
            self.address = addresses.format_address(there, port)
        self._begin = replace(self._begin, bind=bound)

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            if process.poll() is None and not self._ending.is_set():
                process.kill()
            try:
                process.wait(self._deadlines.stop_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
