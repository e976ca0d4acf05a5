"""Hold fragments in worker processes on the lead's machine: start, watch, start again.

To the lead this is one holder: each message goes to the worker that has its fragment.
A worker whose line breaks, or that is silent for a lease, is killed, and the lead is
told `WorkerAway`. Once it has decided upon that, it says what is committed
(`bring_back`), and another process begins with it; `WorkerBack` follows when that
serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.worker_line import Line, write_frame
from diloco_jax.core.fragments import digest_all
from diloco_jax.deadlines import Backoff
from diloco_jax.island.environment import fit_threads
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.holding import (
    Committed,
    Drop,
    Forget,
    FragmentsRestored,
    FromHolder,
    MergeDigested,
    MergesCompiled,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.protocol.values import Version
from diloco_jax.protocol.working import (
    AllSaved,
    BeginWorker,
    EndWorker,
    LeadAlive,
    SaveAll,
    WorkerAlive,
    WorkerFailed,
    WorkerServes,
    from_worker,
)
from diloco_jax.wire import addresses, bulk
from diloco_jax.wire.errors import Busy
from diloco_jax.wire.server import FetchSource

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "diloco_jax.coordinator.worker")

Tell = Callable[[FromHolder | WorkerAway | WorkerBack], None]


class Shown(NamedTuple):
    """A worker, for people."""

    worker: int
    address: str
    """Empty while it is away."""
    pid: int
    fragments: int
    memory_bytes: int
    """The most memory that its process has had."""


class Workers:
    """The `Holder` of a lead whose fragments are in `placement.workers` processes."""

    def __init__(
        self, config: Config, workdir: Path, run_id: str, sizes: tuple[int, ...]
    ) -> None:
        """sizes: parameters by fragment. No process is started before `restore`."""
        count = config.placement.workers
        self._dealt = deal(sizes, count)
        self._digests = [""] * len(sizes)
        self._told = threading.Event()
        self._uncompiled = count
        self._lock = threading.Lock()
        self._patience_s = config.placement.outage_budget_s
        fields = dataclasses.asdict(config)
        self._workers = [
            _Supervised(
                BeginWorker(
                    config=fields,
                    workdir=str(workdir.absolute()),
                    run_id=run_id,
                    worker=number,
                    fragments=self.of(number),
                    bind=_bind_of(config, number),
                ),
                config,
                self._hear,
            )
            for number in range(count)
        ]

    def of(self, worker: int) -> tuple[int, ...]:
        """Return the fragments of a worker."""
        return tuple(f for f, own in enumerate(self._dealt) if own == worker)

    def addresses(self) -> tuple[str, ...]:
        """Return where each worker serves, or served."""
        return tuple(worker.address for worker in self._workers)

    def shown(self) -> list[Shown]:
        """Return all workers, for people."""
        return [worker.shown() for worker in self._workers]

    # ---- as the lead's holder -------------------------------------------------------

    def answer(self, tell: Tell, failed: Callable[[BaseException], None]) -> None:
        """Say to whom to answer; see `StoreHolder.answer`. What workers have said
        before waits for it. `failed` is for a holder in this process."""
        self._tell = tell
        self._told.set()

    def hold(self, message: ToHolder) -> None:
        """See engine.Holder. A worker that is away hears nothing."""
        match message:
            case Forget():
                for worker in self._workers:
                    worker.send(message)
            case Drop():
                self._workers[self._dealt[message.delta.fragment]].send(message)
            case _:
                self._workers[self._dealt[message.fragment]].send(message)

    def bring_back(self, worker: int, versions: Sequence[Version]) -> None:
        """Start a worker that is away; versions: the committed ones, by fragment."""
        committed = tuple(
            Committed(fragment=f, version=versions[f], digests={})
            for f in self.of(worker)
        )
        self._workers[worker].begin(RestoreFragments(fragments=committed))

    def warm_up(self) -> None:
        """Nothing: workers compile as soon as they have their fragments."""

    def close(self) -> None:
        """Nothing: workers end after `save_all`, with `end`."""

    # ---- what the process around it asks for ----------------------------------------

    def restore(self, asked: RestoreFragments) -> FragmentsRestored:
        """Start the workers; each brings its fragments to what is committed. Raises
        ConfigError with the reason of the first worker that cannot."""
        for number, worker in enumerate(self._workers):
            own = tuple(c for c in asked.fragments if self._dealt[c.fragment] == number)
            worker.begin(RestoreFragments(fragments=own))
        restored = [worker.restored(self._patience_s) for worker in self._workers]
        fragments = sorted(
            (fragment for one in restored for fragment in one.fragments),
            key=lambda fragment: fragment.fragment,
        )
        for fragment in fragments:
            self._digests[fragment.fragment] = fragment.digest
        return FragmentsRestored(
            fragments=tuple(fragments),
            discarded=sum(one.discarded for one in restored),
            environment=restored[0].environment,
        )

    def keep_house(self, now: float) -> None:
        """Nothing: workers write the snapshots that are due themselves."""

    def wait(self, patience_s: Callable[[], float]) -> bool:
        """Return True: workers wait for the snapshots under way in `save_all`."""
        return True

    def save_all(self, within_s: float | None) -> None:
        """Have every worker write its last snapshots; wait for it as long as it lives.
        What a worker does not write it applies from its publishes."""
        for worker in self._workers:
            worker.send(SaveAll(within_s=within_s))
        for worker in self._workers:
            saved = worker.saved()
            if saved is None or saved.text:
                why = "it is away" if saved is None else saved.text
                logger.error("%s wrote no last snapshot: %s", worker.name, why)
            for fragment, digest in () if saved is None else saved.digests.items():
                self._digests[fragment] = digest

    def end(self, within_s: float) -> None:
        """End all workers; kill those that have not ended in time."""
        self._told.set()
        for worker in self._workers:
            worker.end()
        deadline = time.monotonic() + within_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def alerts(self, now: float) -> list[str]:
        """Return what people should know about snapshots."""
        return [alert for worker in self._workers for alert in worker.alerts]

    def digest(self) -> str:
        """Return 16 hex digits over the Theta of all fragments, as last heard."""
        return digest_all(self._digests)

    # ---- islands' bytes: not here ---------------------------------------------------

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Send the island to its fragment's worker: it has not heard of it yet."""
        raise self._elsewhere(start.fragment)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """See `upload_begin`."""
        raise self._elsewhere(start.fragment)

    def fetch(self, request: bulk.FetchRequest) -> FetchSource:
        """See `upload_begin`."""
        raise self._elsewhere(request.fragment)

    def _elsewhere(self, fragment: int) -> Busy:
        worker = self._dealt[fragment]
        return Busy(
            f"fragment {fragment} is at worker {worker}, "
            f"{self._workers[worker].address}; connect to it"
        )

    def _hear(self, message: FromHolder | WorkerAway | WorkerBack) -> None:
        """Pass on what a worker says, on its thread."""
        self._told.wait()
        match message:
            case MergesCompiled():
                with self._lock:
                    self._uncompiled -= 1
                    if self._uncompiled:  # All at a start; each one that came back.
                        return
                    self._uncompiled = 1
            case MergeDigested(fragment=fragment, digest=digest):
                self._digests[fragment] = digest
        self._tell(message)


class _Supervised:
    """One worker's process and its successors, with a thread that listens to it."""

    def __init__(
        self,
        begin: BeginWorker,
        config: Config,
        hear: Callable[[FromHolder | WorkerAway | WorkerBack], None],
    ) -> None:
        self.name = f"worker {begin.worker}"
        self.alerts: tuple[str, ...] = ()
        self.address = ""
        self._begin, self._config, self._hear = begin, config, hear
        self._deadlines = config.placement.deadlines
        self._backoff = Backoff(self._deadlines)
        self._orders: queue.SimpleQueue[RestoreFragments | None] = queue.SimpleQueue()
        self._restored: queue.SimpleQueue[FragmentsRestored | str] = queue.SimpleQueue()
        self._saved: queue.SimpleQueue[AllSaved | None] = queue.SimpleQueue()
        self._line: Line | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._memory_bytes, self._serves, self._failure = 0, False, ""
        self._thread = threading.Thread(
            target=self._supervise, name=self.name, daemon=True
        )
        self._thread.start()

    def begin(self, asked: RestoreFragments) -> None:
        """Start a process, which restores these fragments."""
        self._orders.put(asked)

    def restored(self, patience_s: float) -> FragmentsRestored:
        """Return the answer of the first process, which serves then. Raises
        ConfigError."""
        try:
            found = self._restored.get(timeout=patience_s)
        except queue.Empty:
            found = f"it has not restored its fragments within {patience_s:g} s"
        if isinstance(found, str):
            raise ConfigError(f"{self.name} did not come up: {found}")
        return found

    def send(self, message: ToHolder | SaveAll) -> None:
        """Say something, if it is there."""
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
        """See Shown."""
        process = self._process
        return Shown(
            worker=self._begin.worker,
            address=self.address if self._serves else "",
            pid=process.pid if process is not None else 0,
            fragments=len(self._begin.fragments),
            memory_bytes=self._memory_bytes,
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
        first = True
        while (asked := self._orders.get()) is not None and not self._ending.is_set():
            line = self._start(asked)
            self._listen(line, first)
            self._line, self._serves = None, False
            line.close()
            self._kill()
            if self._ending.is_set():
                return
            if first and not self.address:
                why = self._failure or "it ended; see its lines above"
                self._restored.put(why)
                return
            first = False
            logger.error("%s is away: %s", self.name, self._failure or "it ended")
            self._hear(WorkerAway(worker=self._begin.worker))
            self._ending.wait(self._backoff.next_s())

    def _start(self, asked: RestoreFragments) -> Line:
        """Start a process and say what it holds."""
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
        self._failure = ""
        with contextlib.suppress(OSError):  # It has died already, as is heard next.
            write_frame(own, self._begin)
        deadlines = self._deadlines
        line = Line(
            own, from_worker, LeadAlive, deadlines.report_s, 3 * deadlines.lease_s
        )
        line.send(asked)
        self._line = line
        return line

    def _listen(self, line: Line, first: bool) -> None:
        """Pass on what the process says, until its line breaks."""
        restored: FragmentsRestored | None = None
        for message in line.messages():
            match message:
                case FragmentsRestored():
                    restored = message
                case WorkerServes(address=address):
                    self._came_up(address)
                    self._backoff.reset()
                    if first and restored is not None:
                        self._restored.put(restored)
                    else:
                        self._hear(WorkerBack(worker=self._begin.worker))
                case WorkerAlive(alerts=alerts, memory_bytes=nbytes):
                    self.alerts, self._memory_bytes = alerts, nbytes
                case AllSaved():
                    self._saved.put(message)
                case WorkerFailed(text=text):
                    self._failure = text
                case _:
                    self._hear(message)

    def _came_up(self, bound: str) -> None:
        """Note where it serves; a later process serves at the same place."""
        self._serves = True
        host, port = addresses.parse_address(bound)
        placed = self._config.placement.advertise
        if placed:
            host, _ = addresses.parse_address(placed)
        self.address = addresses.format_address(host, port)
        bind_host, _ = addresses.parse_address(self._begin.bind)
        bind = addresses.format_address(bind_host, port)
        self._begin = replace(self._begin, bind=bind)

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


def _bind_of(config: Config, worker: int) -> str:
    """Return where a worker binds: on the ports after the coordinator's, if that is a
    fixed one."""
    host, port = addresses.parse_address(config.placement.bind)
    return addresses.format_address(host, port + 1 + worker if port else 0)
