"""One worker as the lead has it: its process or its address, and the one line to it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.settings import own_tls
from diloco_jax.coordinator.workers.line import WorkerLine
from diloco_jax.core.members import importable
from diloco_jax.deadlines import Backoff
from diloco_jax.machine import fit_threads
from diloco_jax.protocol.holding import (
    AllSaved,
    AwaitTake,
    BeginWorker,
    FragmentsRestored,
    FromHolder,
    LeadAlive,
    LetGo,
    RestoreFragments,
    RunOver,
    SaveAll,
    ToHolder,
    WorkerAlive,
    WorkerEnds,
    WorkerFailed,
    WorkerRefused,
    WorkerServes,
    from_worker,
)
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses
from diloco_jax.wire.bulk import FetchRequest
from diloco_jax.wire.duplex import End, dial_worker
from diloco_jax.wire.errors import ConnectionLost, Refused, SecurityError, WireError
from diloco_jax.wire.principal import COORDINATOR, worker
from diloco_jax.wire.threads import IdleWatch
from diloco_jax.wire.tls import Renewed, TlsFiles
from diloco_jax.wire.transfers import Connections, Transfers

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "diloco_jax.coordinator.workers.process")
START_S = 60.0
"""Longest wait for the first word of a worker's process, in seconds: it may have to be
started, and imports jax, on a machine that others use as well."""
TOLD_EVERY_S = 30.0
"""Seconds between two lines of the log about a worker that is missing at a start."""
ME = "coordinator"
"""The caller's name in the lead's fetches; its certificate says who it is."""


class Shown(NamedTuple):
    """The facts about a worker that `diloco status` shows."""

    worker: int
    address: str
    """Empty before it serves."""
    pid: int
    """On its machine."""
    fragments: int
    memory_bytes: int
    """The most memory that its process has had."""
    resident_bytes: int
    """The memory that it has now."""


class LedWorker:
    """One worker of one life of the lead, with a thread that listens to it.

    `placement.worker_addresses` says where it listens; without, it is a child of this
    process. Once it serves, the end of the line is the end of the lead.
    """

    def __init__(
        self,
        begin: BeginWorker,
        config: Config,
        hear: Callable[[FromHolder], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """hear: called with what it says to the lead, on its thread. failed: called
        with the error if the line breaks once it serves."""
        placement = config.placement
        dialled = placement.worker_addresses
        self.dialled = dialled[begin.worker] if dialled else ""
        """Its address; empty: it is a child."""
        self.name = f"worker {begin.worker}"
        if self.dialled:
            self.name += f" at {self.dialled}"
        self.alerts: tuple[str, ...] = ()
        self.fragments, self.address = begin.fragments, ""
        self.heard_over = False
        """It has answered that it ends with the run."""
        self._begin, self._config = begin, config
        self._hear, self._failed = hear, failed
        self._deadlines, self._patience_s = (
            placement.deadlines,
            placement.outage_budget_s,
        )
        self._tls_files = own_tls(placement)
        self._tls = None
        if self._tls_files is not None:
            # A dial between the renewal of a key and its certificate has the pair.
            self._tls = Renewed(self._tls_files, TlsFiles.client_context)
        self._answers: queue.SimpleQueue[FragmentsRestored | BaseException] = (
            queue.SimpleQueue()
        )
        """Results of its start: one."""
        self._saved: queue.SimpleQueue[AllSaved | None] = queue.SimpleQueue()
        self._line: WorkerLine | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._transfers: Transfers | None = None
        self._ending = threading.Event()
        self._alive: WorkerAlive | None = None
        self._thread: threading.Thread | None = None

    def start(self, first: RestoreFragments | RunOver) -> None:
        """Start the process or dial it, for as long as islands last. first: what it is
        told after `BeginWorker`."""
        self._thread = threading.Thread(
            target=self._run, args=(first,), name=self.name, daemon=True
        )
        self._thread.start()

    def restored(self, *, first: bool = False) -> FragmentsRestored:
        """Wait until it serves; return its answer. first: no island waits yet. Raises
        ConfigError, Refused, or ConnectionLost if it does not come up in time."""
        # It is dialled for as long, and restores its fragments for as long.
        within_s = self._patience_s * (2 if self.dialled else 1) + START_S
        try:
            found = self._answers.get(timeout=None if first else within_s)
        except queue.Empty:
            found = ConnectionLost(
                f"{self.name} has not restored its fragments within {within_s:g} s "
                f"(placement.outage_budget_s); see its log"
            )
        if isinstance(found, BaseException):
            raise found
        return found

    def send(self, message: ToHolder | AwaitTake | SaveAll | LetGo | RunOver) -> None:
        """Send a message; nothing happens once the line broke."""
        if (line := self._line) is not None:
            line.send(message)

    def saved(self) -> AllSaved | None:
        """Return the answer to `SaveAll`; None if the line broke."""
        while self._line is not None:
            with contextlib.suppress(queue.Empty):
                return self._saved.get(timeout=self._deadlines.report_s)
        with contextlib.suppress(queue.Empty):
            return self._saved.get_nowait()
        return None

    def fetch(self, fragment: int, version: Version, max_bytes: int) -> memoryview:
        """Return Theta of a fragment that it serves or keeps, f32. Raises WireError."""
        if self._transfers is None:
            raise ConnectionLost(f"{self.name} does not serve")
        request = FetchRequest(
            run_id=self._begin.run_id,
            island=ME,
            incarnation=0,
            session=ME,
            fragment=fragment,
            want=version,
            have=None,
            theta=True,
        )
        return self._transfers.fetch(request, max_bytes=max_bytes).payload

    def tell_over(self) -> bool:
        """Tell it that the run is over; return whether it has heard."""
        if self._thread is None or not (self._thread.is_alive() or self.heard_over):
            self.start(RunOver())
        self.send(RunOver())
        if self._thread is not None:
            self._thread.join(self._patience_s + self._deadlines.connect_s)
        return self.heard_over

    def shown(self) -> Shown:
        """Return the facts about this worker that `diloco status` shows."""
        alive = self._alive
        return Shown(
            worker=self._begin.worker,
            address=self.address,
            pid=alive.pid if alive is not None else 0,
            fragments=len(self.fragments),
            memory_bytes=alive.memory_bytes if alive is not None else 0,
            resident_bytes=alive.resident_bytes if alive is not None else 0,
        )

    def end(self) -> None:
        """Break the line. A child ends with it, another worker waits for a lead."""
        self._ending.set()
        if (line := self._line) is not None:
            line.close()

    def join(self, within_s: float) -> None:
        """Wait for a child; kill it if it stays."""
        child = self._child
        if child is not None:
            try:
                child.wait(within_s)
            except subprocess.TimeoutExpired:
                child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    # If not, it is in a call of the kernel, as when a disk hangs.
                    child.wait(within_s)
        if self._transfers is not None:
            self._transfers.cancel()
            self._transfers.close(0.0)

    # ---- its thread -----------------------------------------------------------------

    def _run(self, first: RestoreFragments | RunOver) -> None:
        pauses, until = Backoff(self._deadlines), time.monotonic() + self._patience_s
        told = -math.inf
        while True:
            try:
                self._live(first)
                return
            except (Refused, SecurityError, ConfigError) as error:
                self._end_with(error)
                return
            except (WireError, OSError) as error:
                left_s = until - time.monotonic()
                if not self.dialled or self.address or left_s <= 0:
                    self._end_with(error)
                    return
                if time.monotonic() - told >= TOLD_EVERY_S:
                    told = time.monotonic()
                    logger.warning(
                        "%s is missing: %s; the start waits for it, %.0f s more",
                        self.name,
                        error,
                        left_s,
                    )
            if self._ending.wait(pauses.next_s()):
                return

    def _end_with(self, error: Exception) -> None:
        """Let an error be the start's, or that of the lead that is at work."""
        if self.heard_over or self._ending.is_set():
            return
        if not self.address:
            why = f"{self.name} did not come up: {error}"
            same = isinstance(error, Refused | SecurityError | ConfigError)
            self._answers.put(error if same else ConnectionLost(why))
            return
        self._failed(
            ConnectionLost(
                f"{self.name}, which serves at {self.address}, is gone: {error}. The "
                f"coordinator ends with its workers; start it again, and it goes on "
                f"from its log and their snapshots"
            )
        )

    def _live(self, first: RestoreFragments | RunOver) -> None:
        """Go through the life of the line. Raises an error unless it ends in order."""
        end, deadlines = self._open(), self._deadlines
        line = WorkerLine(
            end,
            from_worker,
            LeadAlive,
            deadlines.report_s,
            3 * deadlines.lease_s,
            START_S,
        )
        line.send(self._begin)
        line.send(first)
        self._line = line
        try:
            self._listen(line)
        except msgspec.DecodeError as error:
            raise ConnectionLost(f"what it says cannot be read: {error}") from error
        finally:
            self._line = None
            line.close()

    def _open(self) -> End:
        if not self.dialled:
            return self._start_child()
        return dial_worker(self.dialled, self._begin.worker, self._tls, self._deadlines)

    def _start_child(self) -> End:
        environment = {**os.environ, **importable(), "JAX_PLATFORMS": "cpu"}
        fit_threads(environment)
        own, other = socket.socketpair()
        with contextlib.ExitStack() as undo, other:
            undo.enter_context(own)
            self._child = subprocess.Popen(
                [*COMMAND, str(other.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
            undo.pop_all()
        return own

    def _listen(self, line: WorkerLine) -> None:
        """Pass on what it says until the line breaks, and raise the reason then."""
        restored: FragmentsRestored | None = None
        why = (
            f"the line to it broke, or it was silent for "
            f"{3 * self._deadlines.lease_s:g} s (3 * placement.time_budget_s); see its "
            f"log"
        )
        for message in line.messages():
            match message:
                case FragmentsRestored():
                    restored = message
                case WorkerServes(address=bound):
                    assert restored is not None
                    self._came_up(bound)
                    self._answers.put(restored)
                case WorkerAlive():
                    self._alive, self.alerts = message, message.alerts
                case AllSaved():
                    self._saved.put(message)
                case WorkerFailed(text=text):
                    why = f"it failed: {text}; see its log"
                case WorkerRefused(code="config", text=text):
                    raise ConfigError(f"{self.name} did not come up: {text}")
                case WorkerRefused(code=code, text=text):
                    raise Refused(code, f"{self.name}: {text}")
                case WorkerEnds():
                    self.heard_over = True
                    return
                case _:
                    self._hear(message)
        raise ConnectionLost(why)

    def _came_up(self, bound: str) -> None:
        """Note where it serves."""
        placement = self._config.placement
        if self.dialled:
            address = addresses.bulk_address(self.dialled)
        elif not placement.advertise:
            address = bound
        else:
            host, port = addresses.parse_address(placement.advertise)
            # Where ports are fixed, each is forwarded as the coordinator's own is.
            own = addresses.parse_address(placement.bind)[1]
            shift = port - own if own else 0
            bound_port = addresses.parse_address(bound)[1]
            address = addresses.format_address(host, bound_port + shift)
        channels = placement.bulk_channels
        self._transfers = Transfers(
            Connections(
                addresses.on_this_machine(address),
                self._tls_files,
                self._deadlines,
                channels,
                worker(self._begin.worker),
                COORDINATOR,
                field="placement.advertise",
            ),
            channels,
            self._deadlines,
            IdleWatch(f"diloco-worker-{self._begin.worker}"),
        )
        self.address = address
