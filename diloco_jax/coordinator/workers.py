"""Hold fragments at workers: `diloco worker` processes, which obey one lead at a
time.

To the lead this is one holder: each message goes to the worker that has its fragment.
The first line that breaks ends the lead; whoever started it starts it again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from diloco_jax import checkpoint, run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.holding.anchors import layouts_of, values_of
from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    KeptCycles,
    make_store,
)
from diloco_jax.coordinator.holding.holder import FragmentHolder, Tell
from diloco_jax.coordinator.settings import own_tls
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.tiles import digest_all, digest_arrays
from diloco_jax.files import is_bucket, write_json
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.holding import (
    AllSaved,
    AnchorKept,
    AwaitTake,
    BeginWorker,
    Drop,
    Forget,
    FragmentsRestored,
    FromHolder,
    KeepFragment,
    LeadAlive,
    LetGo,
    MergeDigested,
    MergesCompiled,
    RestoredFragment,
    RestoreFragments,
    RunOver,
    SaveAll,
    ToHolder,
    WorkerAlive,
    WorkerEnds,
    WorkerFailed,
    WorkerRefused,
    WorkerServes,
    deal,
    from_worker,
    next_start,
)
from diloco_jax.protocol.messages import (
    AnchorRequest,
    DeltaKey,
    FromCoordinator,
    Hello,
    ResendRequest,
    TakeRequest,
    Version,
    Welcome,
)
from diloco_jax.wire import addresses, bulk
from diloco_jax.wire.duplex import WorkerLine, dial_worker
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    SecurityError,
    WireError,
)
from diloco_jax.wire.peers import Backoff, IdleWatch
from diloco_jax.wire.peers import worker as worker_principal
from diloco_jax.wire.tls import Renewed, TlsFiles
from diloco_jax.wire.transfers import Connections, Transfers

logger = logging.getLogger(__name__)

START_S = 60.0
"""Longest wait for the first word of a worker's process, in seconds: it imports jax, on
a machine that others use as well."""
TOLD_EVERY_S = 30.0
"""Seconds between two lines of the log about a worker that is missing at a start."""
ME = "coordinator"
"""The caller's name in the lead's fetches; its certificate says who it is."""


class LedWorker:
    """One worker of one life of the lead, with a thread that dials it, for as long as
    islands last, and listens to it. Once it serves, the end of the line is the end of
    the lead."""

    def __init__(
        self,
        begin: BeginWorker,
        config: Config,
        hear: Tell,
        failed: Callable[[BaseException], None],
    ) -> None:
        """hear: called with what it says to the lead, on its thread. failed: called
        with the error if the line breaks once it serves."""
        placement = config.placement
        self._dialled = placement.worker_addresses[begin.worker]
        self.name = f"worker {begin.worker} at {self._dialled}"
        self.fragments, self.address = begin.fragments, ""
        self.alive: WorkerAlive | None = None
        """Its last sign of life."""
        self.heard_over = False
        """It has answered that it ends with the run."""
        self._begin, self._placement = begin, placement
        self._hear, self._failed = hear, failed
        self._tls_files = own_tls(placement)
        self._tls = None
        if self._tls_files is not None:
            # A dial between the renewal of a key and its certificate has the pair.
            self._tls = Renewed(self._tls_files, TlsFiles.client_context)
        self._restored: Future[FragmentsRestored] = Future()
        self._saved: Future[AllSaved | None] = Future()
        self._line: WorkerLine | None = None
        self._transfers: Transfers | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, first: RestoreFragments | RunOver) -> None:
        """Begin to dial it. first: what it is told after `BeginWorker`."""
        self._thread = threading.Thread(
            target=self._run, args=(first,), name=self.name, daemon=True
        )
        self._thread.start()

    def restored(self, *, first: bool = False) -> FragmentsRestored:
        """Wait until it serves; return its answer. first: no island waits yet. Raises
        ConfigError, Refused, or ConnectionLost if it does not come up in time."""
        # It is dialled for as long, and restores its fragments for as long.
        within_s = self._placement.outage_budget_s * 2 + START_S
        try:
            return self._restored.result(None if first else within_s)
        except TimeoutError:
            raise ConnectionLost(
                f"{self.name} has not restored its fragments within {within_s:g} s "
                f"(by placement.outage_budget_s); see its log"
            ) from None

    def send(self, message: ToHolder | AwaitTake | SaveAll | LetGo | RunOver) -> None:
        """Send a message; nothing happens once the line broke."""
        if (line := self._line) is not None:
            line.send(message)

    def saved(self, within_s: float | None) -> AllSaved | None:
        """Return the answer to `SaveAll`; None if the line broke, or if it has not come
        in a time twice as long."""
        try:
            return self._saved.result(None if within_s is None else 2 * within_s)
        except TimeoutError:
            return None

    def fetch(self, fragment: int, version: Version, max_bytes: int) -> memoryview:
        """Return Theta of a fragment that it serves or keeps, f32. Raises WireError."""
        if self._transfers is None:
            raise ConnectionLost(f"{self.name} does not serve")
        request = bulk.FetchRequest(
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
        if not (self.heard_over or (self._thread and self._thread.is_alive())):
            self.address = ""  # Its next life, which may only just begin.
            self.start(RunOver())
        self.send(RunOver())
        assert self._thread is not None
        placement = self._placement
        self._thread.join(placement.outage_budget_s + placement.deadlines.connect_s)
        return self.heard_over

    def shown(self) -> dict[str, Any]:
        """Return the facts about this worker that `diloco status` shows. address: empty
        before it serves; pid: on its machine; memory_bytes: the most that its process
        has had."""
        alive = self.alive
        return {
            "worker": self._begin.worker,
            "address": self.address,
            "pid": alive.pid if alive else 0,
            "fragments": len(self.fragments),
            "memory_bytes": alive.memory_bytes if alive else 0,
            "resident_bytes": alive.resident_bytes if alive else 0,
        }

    def end(self) -> None:
        """Break the line; the worker waits for the next lead."""
        self._ending.set()
        if (line := self._line) is not None:
            line.close()
        if self._transfers is not None:
            self._transfers.cancel()
            self._transfers.close(0.0)

    # ---- its thread -----------------------------------------------------------------

    def _run(self, first: RestoreFragments | RunOver) -> None:
        patience_s = self._placement.outage_budget_s
        until = time.monotonic() + patience_s
        pauses = Backoff(*self._placement.deadlines.retries_s)
        told = -math.inf
        try:
            while not self._ending.is_set():
                try:
                    self._live(first)
                    return
                except Exception as error:
                    left_s = until - time.monotonic()
                    hopes = isinstance(error, WireError | OSError)
                    hopes &= not isinstance(error, Refused | SecurityError)
                    if self.address or left_s <= 0 or not hopes:
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
                self._ending.wait(pauses.next_s())
        finally:
            if not self._saved.done():
                self._saved.set_result(None)

    def _end_with(self, error: Exception) -> None:
        """Let an error be the start's, or that of the lead that is at work."""
        if self.heard_over or self._ending.is_set():
            return
        if not self.address:
            if not isinstance(error, Refused | SecurityError | ConfigError):
                error = ConnectionLost(f"{self.name} did not come up: {error}")
            if not self._restored.done():  # At the end it is dialled once more.
                self._restored.set_exception(error)
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
        deadlines = self._placement.deadlines
        end = dial_worker(self._dialled, self._begin.worker, self._tls, deadlines)
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

    def _listen(self, line: WorkerLine) -> None:
        """Pass on what it says until the line breaks, and raise the reason then."""
        restored: FragmentsRestored | None = None
        silence_s = 3 * self._placement.deadlines.lease_s
        why = (
            f"the line to it broke, or it was silent for {silence_s:g} s (3 * "
            f"placement.time_budget_s); see its log"
        )
        for message in line.messages():
            match message:
                case FragmentsRestored():
                    restored = message
                case WorkerServes():
                    assert restored is not None
                    self._came_up()
                    self._restored.set_result(restored)
                case WorkerAlive():
                    self.alive = message
                case AllSaved():
                    if not self._saved.done():  # It may be asked again: a full disk.
                        self._saved.set_result(message)
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

    def _came_up(self) -> None:
        """Begin to fetch from it, which serves now."""
        address, number = addresses.bulk_address(self._dialled), self._begin.worker
        channels, deadlines = self._placement.bulk_channels, self._placement.deadlines
        connections = Connections(
            address,
            self._tls_files,
            deadlines,
            channels,
            worker_principal(number),
            field="placement.worker_addresses",
        )
        watch = IdleWatch(f"diloco-worker-{number}")
        self._transfers = Transfers(connections, channels, deadlines, watch)
        self.address = address


class WorkersHolder(FragmentHolder):
    """The holder of a lead whose fragments are at `placement.workers` workers."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        run_id: str,
        plan: FragmentPlan,
        kept: KeptCycles,
        term: int,
        *,
        over: bool = False,
    ) -> None:
        """kept: makes cycles of what workers kept. term: the run's. over: it is over;
        see `has_result`. No worker is dialled before `restore`."""
        super().__init__()
        count = config.placement.workers
        self._config, self._workdir, self._plan = config, workdir, plan
        self._kept, self._over = kept, over
        self._dealt = deal(plan.sizes, count)
        self._digests = [""] * len(self._dealt)
        """Digest of each fragment's Theta, as last heard."""
        self._uncompiled = set(range(count))
        """Workers that have not said that they have compiled."""
        self._lock, self._begun = threading.Lock(), threading.Event()
        self._broken: BaseException | None = None
        """Error of the first line that broke."""
        # Layouts and shapes, without arrays.
        self._store = make_store(config, plan)
        self._layouts = layouts_of(plan.fragments)
        self._whose = checkpoint.whose(config.run, run_id, plan)
        start, fields = _next_start(workdir), dataclasses.asdict(config)
        self._workers = [
            LedWorker(
                BeginWorker(
                    config=fields,
                    run_id=run_id,
                    worker=number,
                    fragments=self.of(number),
                    term=term,
                    start=start,
                ),
                config,
                functools.partial(self._hear, number),
                self._fail,
            )
            for number in range(count)
        ]

    def of(self, worker: int) -> tuple[int, ...]:
        """Return the fragments of a worker."""
        return tuple(f for f, own in enumerate(self._dealt) if own == worker)

    def completed(self, hello: Hello, message: FromCoordinator) -> FromCoordinator:
        """Complete a Welcome, and a request for an anchor, with the addresses at which
        workers serve, for the island that said hello; tell the worker first which delta
        the island is asked for."""
        match message:
            case Welcome() | AnchorRequest():
                at = tuple(worker.address for worker in self._workers)
                return replace(message, workers=at)
            case TakeRequest() | ResendRequest():
                delta = DeltaKey(
                    hello.island, hello.incarnation, message.fragment, message.tick
                )
                self._of(message.fragment).send(AwaitTake(delta=delta))
        return message

    def shown(self) -> dict[str, Any]:
        """Return what `diloco status` shows beside the run's state."""
        return {"workers": [worker.shown() for worker in self._workers]}

    # ---- as the lead's holder -------------------------------------------------------

    def answer(self, tell: Tell, failed: Callable[[BaseException], None]) -> None:
        """See `FragmentHolder`. What workers say before this call waits for it. failed:
        called with the error of a worker whose line broke."""
        super().answer(tell, failed)
        self._begun.set()
        if self._broken is not None:  # Whoever was told before has ended since.
            failed(self._broken)

    def hold(self, message: ToHolder) -> None:
        """Pass a message to its fragment's worker; see `lead.Holder`."""
        match message:
            case Forget():
                for worker in self._workers:
                    worker.send(message)
            case Drop():
                self._of(message.delta.fragment).send(message)
            case _:
                self._of(message.fragment).send(message)
        if isinstance(message, KeepFragment):
            theta = functools.partial(self._fetch_kept, message)
            let_go = LetGo(fragment=message.fragment)
            done = functools.partial(self._of(message.fragment).send, let_go)
            self._kept.keep(message, theta, self._tell, done)

    # ---- what the process around it asks for ----------------------------------------

    def restore(self, asked: RestoreFragments) -> FragmentsRestored:
        """Dial the workers; each brings its fragments to what is committed, or begins
        them. Raises ConfigError, Refused or ConnectionLost with the reason of the first
        worker that does not."""
        if self._over:
            return self._as_heard(asked)
        _over_path(self._workdir).unlink(missing_ok=True)
        for number, worker in enumerate(self._workers):
            own = tuple(c for c in asked.fragments if self._dealt[c.fragment] == number)
            worker.start(replace(asked, fragments=own))
        restored = [worker.restored(first=asked.first) for worker in self._workers]
        fragments = [fragment for one in restored for fragment in one.fragments]
        for fragment in fragments:
            self._digests[fragment.fragment] = fragment.digest
        return FragmentsRestored(
            fragments=tuple(sorted(fragments, key=lambda f: f.fragment)),
            lost=tuple(f for one in restored for f in one.lost),
            discarded=sum(one.discarded for one in restored),
            environment=restored[0].environment,
        )

    def save_all(self, within_s: float | None) -> bool:
        """Have every worker write its last snapshots. What a worker does not write it
        applies from its publishes as it starts again.

        At the end of the run, fetch them, then tell all workers that it is over; return
        False if one did not come."""
        if self._over:
            self._tell_over()
            return True
        for worker in self._workers:
            worker.send(SaveAll(within_s=within_s))
        saved = [(worker, worker.saved(within_s)) for worker in self._workers]
        for worker, one in saved:
            if one is None or one.text:
                why = "it has not answered" if one is None else one.text
                logger.error("%s wrote no last snapshot: %s", worker.name, why)
            for fragment, digest in one.digests.items() if one else ():
                self._digests[fragment] = digest
        if within_s is not None:
            return True
        lacking = [w.name for w, one in saved if not (one and self._fetch_last(w, one))]
        if lacking:
            logger.error(
                "the result lacks fragments of %s; start the coordinator again, and "
                "they come",
                ", ".join(lacking),
            )
            return False
        _write_over(self._workdir, self._digests, ())
        self._tell_over()
        return True

    def end(self) -> None:
        """Break the lines to all workers."""
        self._begun.set()
        for worker in self._workers:
            worker.end()

    def alerts(self, now: float) -> list[str]:
        """See `FragmentHolder`."""
        alive = [worker.alive for worker in self._workers]
        return [alert for one in alive if one for alert in one.alerts]

    def digest(self) -> str:
        """Return 16 hex digits over the Theta of all fragments, as last heard."""
        return digest_all(self._digests)

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Send the island to its fragment's worker, of which it has not heard yet."""
        raise self._elsewhere(start.fragment)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """See `upload_begin`."""
        raise self._elsewhere(start.fragment)

    def fetch(self, request: bulk.FetchRequest) -> bulk.FetchSource:
        """See `upload_begin`."""
        raise self._elsewhere(request.fragment)

    def _elsewhere(self, fragment: int) -> Busy:
        worker = self._of(fragment)
        return Busy(f"fragment {fragment} is at {worker.name}; connect to it")

    # ---- inside ---------------------------------------------------------------------

    def _of(self, fragment: int) -> LedWorker:
        return self._workers[self._dealt[fragment]]

    def _hear(self, worker: int, message: FromHolder) -> None:
        """Pass on what a worker says, on the worker's thread."""
        self._begun.wait()
        match message:
            case MergesCompiled():
                with self._lock:
                    self._uncompiled.discard(worker)
                    if self._uncompiled:
                        return
            case MergeDigested():
                self._digests[message.fragment] = message.digest
            case AnchorKept():
                self._digests[message.fragment] = message.parameters
        self._tell(message)

    def _fail(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._begun.wait()
        self._failed(error)

    def _fetched(self, fragment: int, version: Version) -> dict[str, list[Any]]:
        """Fetch Theta of a fragment; return a snapshot's arrays, without momentum.
        Raises WireError."""
        layout = self._layouts[fragment]
        found = self._of(fragment).fetch(fragment, version, layout.total_bytes)
        return self._store.first(fragment, values_of(layout, found))

    def _fetch_kept(self, keep: KeepFragment) -> list[Any]:
        """Fetch a fragment that its worker keeps for a cycle. Raises WireError."""
        return self._fetched(keep.fragment, keep.version)["theta"]

    def _fetch_last(self, worker: LedWorker, saved: AllSaved) -> bool:
        """Fetch the last snapshots of a worker; tell whether all that it has is here.
        The outer momentum stays there."""
        if lost := sorted(set(worker.fragments) - set(saved.digests)):
            logger.error(
                "fragments %s are lost with the disk of %s, and no island gave them "
                "back: the result lacks them; see kept cycles",
                lost,
                worker.name,
            )
        placement = self._config.placement
        folder = checkpoint.snapshots_folder(placement, self._workdir)
        if is_bucket(str(folder)):  # It writes there itself.
            return not saved.text
        if not saved.digests:
            return True
        snapshots = FragmentSnapshots(
            folder, placement, tuple(saved.digests), self._whose
        )
        try:
            for fragment, digest in saved.digests.items():
                version = saved.versions[fragment]
                arrays = self._fetched(fragment, version)
                if (found := digest_arrays(arrays["theta"])) != digest:
                    raise RemoteProtocolError(
                        f"fragment {fragment} came with digest {found}, and its worker "
                        f"has {digest}"
                    )
                snapshots.save_first(fragment, version, arrays)
                arrays.clear()
                give_memory_back()
        except WireError as error:
            logger.error("fragments are at %s alone: %s", worker.name, error)
            return False
        return True

    def _as_heard(self, asked: RestoreFragments) -> FragmentsRestored:
        """Answer for workers that have ended with the run."""
        self._digests = [str(d) for d in _over(self._workdir)["digests"]]
        return FragmentsRestored(
            fragments=tuple(
                RestoredFragment(
                    fragment=c.fragment,
                    version=c.version,
                    snapshot=c.version,
                    digest=self._digests[c.fragment],
                )
                for c in asked.fragments
                if self._digests[c.fragment]
            ),
            discarded=0,
            environment=self._store.describe(),
        )

    def _tell_over(self) -> None:
        """Tell all workers that the run is over, but those that know it."""
        heard = set(_over(self._workdir)["heard"])
        for number, worker in enumerate(self._workers):
            if number in heard:
                continue
            if worker.tell_over():
                heard.add(number)
                _write_over(self._workdir, self._digests, sorted(heard))
            else:
                logger.error(
                    "%s cannot be told that the run is over; end `diloco worker` "
                    "there, if it does not end by itself",
                    worker.name,
                )


def has_result(workdir: Path) -> bool:
    """Tell whether this machine has the result of workers, which may have ended."""
    return _over_path(workdir).is_file()


def _over_path(workdir: Path) -> Path:
    return workdir / run_files.WORKERS / "over.json"


def _over(workdir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_over_path(workdir).read_bytes())
    return found


def _write_over(workdir: Path, digests: Sequence[str], heard: Sequence[int]) -> None:
    """Keep that the result is here, and which workers have heard so."""
    facts = {"digests": list(digests), "heard": list(heard)}
    write_json(facts, _over_path(workdir))


def _next_start(workdir: Path) -> int:
    """Return the number of this start of the lead, and keep it: no other may be started
    at the same time (`run_files.LOCK`)."""
    path = workdir / run_files.WORKERS / "lead.json"
    path.parent.mkdir(exist_ok=True)
    last = int(json.loads(path.read_bytes())["start"]) if path.is_file() else 0
    number = next_start(last, time.time())
    write_json({"start": number}, path)
    return number
