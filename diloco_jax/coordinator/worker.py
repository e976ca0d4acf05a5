"""`diloco worker`: hold fragments for one lead at a time, on a machine of its own.

It proves with the worker's key which worker it is, and obeys the coordinator's key
alone; of two leads the one that was started later, across its own restarts. What it has
in memory is its present lead's. When the line to that lead breaks, it begins anew from
its disk with the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import queue
import resource
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import msgspec

from diloco_jax import checkpoint, run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import from_builtins, named_code
from diloco_jax.coordinator.holding.fragment_snapshots import make_store
from diloco_jax.coordinator.holding.holder import make_holder
from diloco_jax.coordinator.settings import bulk_server_of, faults_of
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import worker_name
from diloco_jax.files import is_bucket, write_json
from diloco_jax.machine import give_memory_back, resident_bytes
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.holding import (
    AllSaved,
    AwaitedTakes,
    AwaitTake,
    BeginWorker,
    Drop,
    Forget,
    KeepFragment,
    LeadAlive,
    LetGo,
    Obeyed,
    RestoreFragments,
    RunOver,
    SaveAll,
    ToWorker,
    WorkerAlive,
    WorkerEnds,
    WorkerFailed,
    WorkerRefused,
    WorkerServes,
    to_worker,
)
from diloco_jax.protocol.messages import DeltaKey, Version
from diloco_jax.wire import addresses, bulk, peers
from diloco_jax.wire.bulk import BulkConnection
from diloco_jax.wire.bulk_server import Acceptor, BulkServer
from diloco_jax.wire.duplex import WorkerLine, for_two_threads, read_frame, write_frame
from diloco_jax.wire.errors import Busy, Refused, SecurityError, VersionGone
from diloco_jax.wire.peers import IdleWatch, allow_connections
from diloco_jax.wire.session import Handlers
from diloco_jax.wire.tls import Peers, TlsFiles
from diloco_jax.workdir import held, make_workdir

logger = logging.getLogger(__name__)

FIRST_S = 86400.0
"""Longest wait for the first lead, in seconds: the coordinator may queue for a
machine."""
CONNECTIONS = 16
"""Most connections at a time that have not said who they are."""
HOUSEKEEPING_S = 0.5
"""Interval between two looks for a snapshot that is due, in seconds."""


def run(config: Config, index: int, workdir: Path, bind: str) -> int:
    """Serve as this worker until the run is over, or no coordinator comes; return the
    exit code."""
    # TPUs here are an island's. JAX_PLATFORMS is too late if a config imported jax.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    listening = Listening(config, index, workdir, bind)
    with contextlib.closing(listening):
        logger.info("worker %d awaits the coordinator at %s", index, listening.address)
        if listening.serve():
            logger.info("the run is over")
            return EXIT_DONE
        logger.error(
            "no coordinator came for %g s: this worker ends, and what it has stays in "
            "%s; start it again with the coordinator",
            listening.within_s,
            workdir,
        )
        return EXIT_FAILED


class Came(NamedTuple):
    """A lead that is obeyed, with the line to it. config: its own, with what is of this
    machine."""

    line: WorkerLine
    begin: BeginWorker
    config: Config
    peer: str


class Listening:
    """The place of one worker, where leads come."""

    def __init__(self, config: Config, index: int, workdir: Path, bind: str) -> None:
        """Listen at `bind`. Raises ConfigError, SecurityError."""
        placement = config.placement
        self._config, self._index, self._workdir = config, index, workdir
        self._deadlines = placement.deadlines
        who = peers.worker(index)
        tls = TlsFiles.load_given(placement.certificates, who)
        addresses.require_tls(bind, tls=tls is not None, insecure=placement.insecure)
        self._peers = Peers(tls.folder if tls is not None else None)
        self._open = contextlib.ExitStack()
        make_workdir(workdir)
        lock = held(workdir / run_files.LOCK, "a coordinator or a worker")
        self._open.enter_context(lock)
        (workdir / run_files.WORKERS).mkdir(exist_ok=True)
        numeric = addresses.resolve(bind)
        # Islands reach it at the next port, from its first lead on.
        self._bulk = addresses.bulk_address(numeric)
        listener = addresses.listen(numeric)
        self._watch = IdleWatch("diloco-worker-watch")
        self._newest: WorkerLine | None = None
        self._came: queue.SimpleQueue[Came] = queue.SimpleQueue()
        self.within_s = FIRST_S
        """Longest wait for a lead; later as the last one's config says."""
        self.address = addresses.format_address(*listener.getsockname()[:2])
        """Where it listens."""
        self._acceptor = Acceptor(
            "diloco-worker",
            listener,
            tls,
            self._admit,
            self._deadlines,
            most=CONNECTIONS,
            threads=CONNECTIONS,
            idle_s=self._deadlines.connect_s,
        )
        self._acceptor.start()

    def serve(self) -> bool:
        """Serve one lead after another until the run is over. Return False if none has
        come for too long."""
        while True:
            try:
                came = self._came.get(timeout=self.within_s)
            except queue.Empty:
                return False
            self.within_s = came.config.placement.alone_s
            if came.line is not self._newest:
                came.line.close()
                continue
            logger.info("worker %d serves the lead at %s", self._index, came.peer)
            if serve_lead(came, self._workdir, self._bulk):
                return True
            logger.warning(
                "the lead at %s is gone: worker %d dropped what it had in memory, and "
                "awaits the next one for %g s",
                came.peer,
                self._index,
                self.within_s,
            )

    def close(self) -> None:
        """Stop listening."""
        self._acceptor.stop()
        self._watch.close(1.0)
        self._open.close()

    # ---- connections ----------------------------------------------------------------

    def _admit(self, connection: BulkConnection) -> None:
        """Read who leads; obey it, or say why not."""
        with self._watch.guard(self._deadlines.connect_s, connection.cut):
            try:
                who = self._peers.identify(connection.certificate)
                peers.require(who, peers.COORDINATOR)
                frame = read_frame(connection.end)
                if frame is None:
                    return
                begin = to_worker(frame)
                if not isinstance(begin, BeginWorker):
                    wrong = f"a lead began with {type(begin).__name__}"
                    raise Refused("protocol", wrong)
                self._obey(connection, begin)
            except (Refused, SecurityError, ConfigError, msgspec.DecodeError) as error:
                self._acceptor.failed("a lead is refused", error, connection.peer)
                code = error.code if isinstance(error, Refused) else "config"
                refused = WorkerRefused(code=code, text=str(error))
                write_frame(connection.end, refused)
                connection.part()

    def _obey(self, connection: BulkConnection, begin: BeginWorker) -> None:
        """Leave the lead before for a newer one. Raises Refused for an older one, for
        another worker or run, and ConfigError for a config that is not fit here."""
        if begin.worker != self._index:
            raise Refused(
                "worker",
                f"this is worker {self._index}, and the lead asks for worker "
                f"{begin.worker}; check placement.worker_addresses, and --index",
            )
        config = self._fitted(begin)
        path = facts_path(self._workdir, self._index)
        with _FACTS:
            facts = facts_of(self._workdir, self._index)
            own = {field: facts[field] for field in Obeyed._fields if field in facts}
            if refusal := Obeyed(**own).refusal(begin, str(path)):
                raise Refused(*refusal)
            now = Obeyed(begin.run_id, begin.term, begin.start)
            write_json({**facts, **now._asdict()}, path)
            deadlines = config.placement.deadlines
            # It shows that it lives from now on, though it may be minutes before it
            # does what the lead says.
            line = WorkerLine(
                for_two_threads(connection.detach()),
                to_worker,
                sign_of_life,
                deadlines.report_s,
                2 * deadlines.lease_s,
            )
            line.send(sign_of_life())
            before, self._newest = self._newest, line
            self._came.put(Came(line, begin, config, connection.peer))
            if before is not None:
                before.part()

    def _fitted(self, begin: BeginWorker) -> Config:
        """Return the lead's config with what is of this machine."""
        config = from_builtins(begin.config, "the lead's config")
        own, theirs = self._config.placement, config.placement
        code, ours = named_code(config.run), named_code(self._config.run)
        if code != ours:
            raise ConfigError(
                f"the lead's config names code ({code or 'none'}), and CONFIG of this "
                f"worker other code ({ours or 'none'}); give both the same CONFIG"
            )
        buckets = is_bucket(own.checkpoints), is_bucket(theirs.checkpoints)
        if any(buckets) and own.checkpoints != theirs.checkpoints:
            raise ConfigError(
                f"placement.checkpoints = {theirs.checkpoints!r} at the lead, and "
                f"{own.checkpoints!r} here; give both the same bucket, or each a folder"
            )
        placement = dataclasses.replace(
            theirs,
            workdir=str(self._workdir),
            certificates=own.certificates,
            checkpoints=own.checkpoints,
            insecure=own.insecure,
        )
        return dataclasses.replace(config, placement=placement)


# ---- what a worker keeps on its disk ------------------------------------------------


_FACTS = threading.Lock()
"""Held from the reading of these facts to their writing: a lead comes on a thread of
its own, while the life for the one before begins."""


def facts_path(workdir: Path, worker: int) -> Path:
    """Return the path of the file in which a worker keeps facts about itself."""
    return workdir / run_files.WORKERS / f"{worker}.json"


def facts_of(workdir: Path, worker: int) -> dict[str, Any]:
    """Return these facts; none if there is no such worker. `life`: the number of its
    life in the run. The rest: the lead that it obeyed last."""
    try:
        found = json.loads(facts_path(workdir, worker).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _next_life(workdir: Path, worker: int) -> int:
    """Return the number of the life that begins, and keep it."""
    with _FACTS:
        facts = facts_of(workdir, worker)
        life = int(facts.get("life", 0)) + 1
        write_json({**facts, "life": life}, facts_path(workdir, worker))
    return life


# ---- one life -----------------------------------------------------------------------


def serve_lead(came: Came, workdir: Path, bind: str) -> bool:
    """Hold fragments for a lead until its line breaks; then drop all that is in memory.
    Return True if the run is over. bind: where islands are served."""
    line, begin = came.line, came.begin
    worker: HoldingWorker | None = None
    try:
        worker = HoldingWorker(came, workdir, bind)
        return worker.obey()
    except ConfigError as error:
        logger.error("worker %d: %s", begin.worker, error)
        line.send(WorkerRefused(code="config", text=str(error)))
        return False
    except Exception as error:
        if worker is None:
            logger.exception("worker %d failed", begin.worker)
            line.send(WorkerFailed(text=f"{type(error).__name__}: {error}"))
            return False
        worker.fail(error)
    finally:
        line.alive = sign_of_life
        if worker is not None:
            worker.close()
        line.close()
        worker = None
        gc.collect()
        give_memory_back()


class HoldingWorker(Handlers):
    """One life of a worker: restore, then merge and serve, until its line breaks."""

    def __init__(self, came: Came, workdir: Path, bind: str) -> None:
        """Prepare to hold the fragments. workdir: the worker's."""
        begin, config = came.begin, came.config
        self._begin, self._config, self._bind = begin, config, bind
        own = peers.worker(begin.worker)
        self._tls = TlsFiles.load_given(config.placement.certificates, own)
        plan = build_plan(config.run, build(config.run))
        whose = checkpoint.whose(config.run, begin.run_id, plan)
        # Arrays come with `RestoreFragments`, for its own fragments alone.
        self._store = make_store(config, plan)
        self.holder = make_holder(
            config, self._store, None, workdir, whose, begin.fragments
        )
        life = _next_life(workdir, begin.worker)
        self.holder.faults = faults_of(config, worker_name(begin.worker), life)
        self._awaited, self._awaiting = AwaitedTakes(), threading.Lock()
        self._pinned: dict[int, tuple[Version, list[Any]]] = {}
        """Theta of fragments that the lead is about to fetch for a kept cycle."""
        self._closing = threading.Event()
        self._server: BulkServer | None = None
        self._line = came.line
        self._line.alive = self._alive
        self.holder.answer(self._line.send, self.fail)
        threading.Thread(target=self._keep_house, daemon=True).start()

    def obey(self) -> bool:
        """Do what the lead says until the line breaks; tell whether the run is over."""
        for message in self._line.messages():
            if isinstance(message, RunOver):
                self._line.send(WorkerEnds())
                return True
            self._do(message)
        return False

    def fail(self, error: BaseException) -> NoReturn:
        """Send the lead the error, and end this process as a crash would."""
        logger.error("the worker failed", exc_info=error)
        self._line.send(WorkerFailed(text=f"{type(error).__name__}: {error}"))
        self._line.close()
        os._exit(EXIT_FAILED)

    def close(self) -> None:
        """End service, the merge under way, and the snapshot: the next life reads the
        same folder. If it hangs, so would that life, and this process ends."""
        self._closing.set()
        if self._server is not None:
            self._server.stop(0.0)
        self.holder.close()
        patience_s = self._config.placement.outage_budget_s
        if not self.holder.wait(lambda: patience_s):
            self.fail(
                TimeoutError(
                    f"a snapshot has not ended within {patience_s:g} s (placement."
                    f"outage_budget_s); look at that disk, and start the worker again"
                )
            )

    # ---- what the lead says ---------------------------------------------------------

    def _do(self, message: ToWorker) -> None:
        match message:
            case RestoreFragments(fences=fences):
                for fence in fences:
                    self._awaited.forget(fence.island, fence.before)
                self._line.send(self.holder.restore(message, whole=True))
                self._serve()
                self.holder.warm_up()
            case SaveAll(within_s=within_s):
                self._line.send(self._saved(within_s))
            case AwaitTake(delta=delta):
                with self._awaiting:
                    self._awaited.take(delta)
            case KeepFragment(fragment=fragment):
                self._pinned[fragment] = self._theta(fragment)
            case LetGo(fragment=fragment):
                self._pinned.pop(fragment, None)
            case BeginWorker() | RunOver() | LeadAlive():
                pass
            case Drop(delta=delta):
                with self._awaiting:  # Before its bytes go.
                    self._awaited.drop(delta)
                self.holder.hold(message)
            case Forget(island=island, before=before):
                with self._awaiting:
                    self._awaited.forget(island, before)
                self.holder.hold(message)
            case _:
                self.holder.hold(message)

    def _serve(self) -> None:
        server = bulk_server_of(self._config, self, self._tls)
        server.connections = allow_connections(server.connections)
        server.start(addresses.listen(self._bind))
        self._server = server
        self._line.send(WorkerServes())

    def _saved(self, within_s: float | None) -> AllSaved:
        """Write the last snapshots; nothing is merged any more."""
        self._closing.set()
        self.holder.close()
        own = self.holder.fragments
        patience_s, text = self._config.placement.outage_budget_s, ""
        if within_s is not None:
            patience_s = within_s
        if self.holder.wait(lambda: patience_s):
            try:
                self.holder.save_all(within_s)
            except OSError as error:
                text = str(error)
        else:
            text = f"a snapshot has not ended within {patience_s:g} s"
        return AllSaved(
            versions={f: self._store.current(f)[0] for f in own},
            digests={f: self._store.digest_of(f) for f in own},
            text=text,
        )

    def _alive(self) -> WorkerAlive:
        return sign_of_life(tuple(self.holder.alerts(time.monotonic())))

    def _keep_house(self) -> None:
        while not self._closing.wait(HOUSEKEEPING_S):
            if self._server is None:  # Before that, fragments have no arrays.
                continue
            try:
                self.holder.keep_house(time.monotonic())
            except Exception as error:
                if not self._closing.is_set():
                    self.fail(error)

    def _theta(self, fragment: int) -> tuple[Version, list[Any]]:
        version, arrays = self._store.current(fragment)
        return version, arrays["theta"]

    # ---- bytes, on many threads -----------------------------------------------------

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the place of a stripe of a delta, or of an anchor."""
        self._require_own(start)
        if start.version is None:
            key = DeltaKey(start.island, start.incarnation, start.fragment, start.tick)
            with self._awaiting:
                awaited = self._awaited.is_awaited(key)
            if not awaited:
                # The lead may be about to say so, or the verdict is on its way.
                raise Busy(
                    f"worker {self._begin.worker} has not heard that the delta of "
                    f"fragment {start.fragment}, tick {start.tick}, of island "
                    f"{start.island!r} is awaited; come again"
                )
        return self.holder.upload_begin(start)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place."""
        return self.holder.upload_end(start, place)

    def fetch(self, request: bulk.FetchRequest) -> bulk.FetchSource:
        """Return published fragments for an island, or Theta for the lead."""
        self._require_own(request)
        fragment, want = request.fragment, request.want
        if request.theta:
            # At the end of the run a kept cycle may still be on its way.
            version, theta = self._theta(fragment)
            if version != want:
                version, theta = self._pinned.get(fragment, (version, theta))
            if version != want:
                raise VersionGone(
                    f"version {tuple(want)} of fragment {fragment} is not kept here, "
                    f"but {tuple(version)}"
                )
            return self._store.values(fragment, version, theta, request.part)
        current, _ = self._store.current(fragment)
        if want > current:
            # The island heard of it before `Commit` came here.
            raise Busy(
                f"version {tuple(want)} of fragment {fragment} is not committed here "
                f"yet; come again"
            )
        return self.holder.fetch(request)

    def _require_own(self, call: bulk.UploadStart | bulk.FetchRequest) -> None:
        begin = self._begin
        peers.require_run(call, begin.run_id)
        if call.fragment not in begin.fragments:
            raise Busy(
                f"worker {begin.worker} has not fragment {call.fragment}, but "
                f"{list(begin.fragments)}; ask the coordinator again"
            )
        if isinstance(call, bulk.FetchRequest) and call.theta:
            return  # The lead.
        with self._awaiting:
            least = self._awaited.least(call.island)
        if least is None and isinstance(call, bulk.FetchRequest):
            raise Busy(
                f"worker {begin.worker} has not heard that island {call.island!r} is "
                f"in the run; come again"
            )
        if call.incarnation < (least or 0):
            raise Refused(
                "fenced",
                f"incarnation {call.incarnation} of island {call.island!r} has ended, "
                f"and the first that counts is {least}; stop this process",
            )


def sign_of_life(alerts: tuple[str, ...] = ()) -> WorkerAlive:
    """Return a sign of life of this process. alerts: see `WorkerAlive`."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return WorkerAlive(
        pid=os.getpid(),
        alerts=alerts,
        memory_bytes=kib << 10,
        resident_bytes=resident_bytes(),
    )
