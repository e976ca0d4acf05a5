"""The process of a worker: it holds fragments for one lead at a time.

What it has in memory is its present lead's. When the line to that lead breaks, a child
of the lead ends; `diloco worker` begins anew from its disk with the next one
(`listening.py`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from diloco_jax import checkpoint, run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import from_builtins
from diloco_jax.coordinator.holding.fragment_snapshots import load_first, make_store
from diloco_jax.coordinator.holding.holder import make_holder
from diloco_jax.coordinator.settings import bulk_server_of, faults_of
from diloco_jax.coordinator.workers.line import WorkerLine, read_frame
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import worker_name
from diloco_jax.files import write_json
from diloco_jax.machine import give_memory_back, resident_bytes
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.logs import setup_logging
from diloco_jax.process import end_process
from diloco_jax.protocol.holding import (
    AllSaved,
    AwaitedTakes,
    AwaitTake,
    BeginWorker,
    Drop,
    Forget,
    FragmentsRestored,
    FromWorker,
    KeepFragment,
    LeadAlive,
    LetGo,
    RestoredFragment,
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
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.weights.first import first_pieces
from diloco_jax.wire import addresses, bulk, principal
from diloco_jax.wire.bulk_server import BulkServer
from diloco_jax.wire.certificates import principals
from diloco_jax.wire.duplex import End
from diloco_jax.wire.errors import Busy, Refused, VersionGone
from diloco_jax.wire.limits import allow_connections
from diloco_jax.wire.session import Handlers
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
"""Interval between two looks for a snapshot that is due, in seconds."""
FIRST_WORD_S = 30.0
"""Longest wait for the lead's first message, in seconds."""
LOCKED_S = 10.0
"""Longest wait for the worker before this one to let go of its folders, in seconds."""


class HoldingWorker(Handlers):
    """One life of a worker: restore, then merge and serve, until its line breaks."""

    def __init__(self, begin: BeginWorker, config: Config, workdir: Path) -> None:
        """Prepare to hold the fragments. workdir: the worker's."""
        self._begin, self._config, self._workdir = begin, config, workdir
        self._tls = _own_tls(config.placement.certificates, begin.worker)
        self._model = build(config.run)
        plan = build_plan(config.run, self._model)
        whose = checkpoint.whose(config.run, begin.run_id, plan)
        # Arrays come with `RestoreFragments`, for its own fragments alone.
        self._store = make_store(config, plan, None)
        self.holder = make_holder(
            config, self._store, None, workdir, whose, begin.fragments
        )
        facts = next_life(workdir, begin.worker)
        name = worker_name(begin.worker)
        self.holder.faults = faults_of(config, name, int(facts["life"]))
        self._awaited, self._awaiting = AwaitedTakes(), threading.Lock()
        self._pinned: dict[int, tuple[Version, list[Any]]] = {}
        """Theta of fragments that the lead is about to fetch for a kept cycle."""
        self._closing = threading.Event()
        self._server: BulkServer | None = None
        self._line: WorkerLine | None = None
        self.holder.answer(self._say, self.fail)
        threading.Thread(target=self._keep_house, daemon=True).start()

    def alive(self) -> WorkerAlive:
        """Return a sign of life."""
        return sign_of_life(tuple(self.holder.alerts(time.monotonic())))

    def obey(self, line: WorkerLine) -> bool:
        """Do what the lead says until the line breaks; tell whether the run is over."""
        self._line = line
        for message in line.messages():
            if isinstance(message, RunOver):
                line.send(WorkerEnds())
                return True
            self._do(message)
        return False

    def fail(self, error: BaseException) -> NoReturn:
        """Send the lead the error, and end this process as a crash would."""
        logger.error("the worker failed", exc_info=error)
        assert self._line is not None
        self._line.send(WorkerFailed(text=f"{type(error).__name__}: {error}"))
        self._line.close()
        os._exit(EXIT_FAILED)

    def close(self) -> None:
        """End service, and the merge under way."""
        self._closing.set()
        if self._server is not None:
            self._server.stop(0.0)
        self.holder.close()

    # ---- what the lead says ---------------------------------------------------------

    def _do(self, message: ToWorker) -> None:
        match message:
            case RestoreFragments(fences=fences):
                for fence in fences:
                    self._awaited.forget(fence.island, fence.before)
                restored = (
                    self._drawn() if message.first else self.holder.restore(message)
                )
                self._say(restored)
                self._serve()
                self.holder.warm_up()
            case SaveAll(within_s=within_s):
                self._say(self._saved(within_s))
            case AwaitTake(delta=delta):
                with self._awaiting:
                    self._awaited.take(delta)
            case KeepFragment(fragment=fragment):
                self._pinned[fragment] = self._theta(fragment)
            case LetGo(fragment=fragment):
                self._pinned.pop(fragment, None)
            case BeginWorker() | RunOver() | LeadAlive():
                pass
            case _:
                self._note(message)
                self.holder.hold(message)

    def _note(self, message: ToWorker) -> None:
        """Note which deltas are awaited no more, before their bytes go."""
        with self._awaiting:
            match message:
                case Drop(delta=delta):
                    self._awaited.drop(delta)
                case Forget(island=island, before=before):
                    self._awaited.forget(island, before)

    def _drawn(self) -> FragmentsRestored:
        """Draw or read the first parameters of the own fragments; they are durable when
        this returns. Workers of one machine take turns: a draw is of all parameters."""
        own, scratch = self._begin.fragments, self._workdir / run_files.WORKERS
        turn = workdirs.held(scratch, "another worker", self._config.placement.alone_s)
        with turn:
            first = first_pieces(self._config.run, self._model, self._workdir)
            load_first(self._store, first, own)
            del first
            give_memory_back()
        self.holder.begin()
        return FragmentsRestored(
            fragments=tuple(
                RestoredFragment(
                    fragment=fragment,
                    snapshot=Version(),
                    moved=False,
                    digest=self._store.digest_of(fragment),
                )
                for fragment in own
            ),
            discarded=0,
            environment=self._store.describe(),
        )

    def _serve(self) -> None:
        server = bulk_server_of(self._config, self, self._tls)
        server.connections = allow_connections(server.connections)
        host, _ = addresses.parse_address(self._begin.bind)
        listener = addresses.listen(addresses.resolve(self._begin.bind))
        port = listener.getsockname()[1]
        server.start(listener)
        self._server = server
        self._say(WorkerServes(address=addresses.format_address(host, port)))

    def _saved(self, within_s: float | None) -> AllSaved:
        """Write the last snapshots; nothing is merged any more."""
        self._closing.set()
        self.holder.close()
        own = self.holder.fragments
        patience_s, text = self._config.placement.outage_budget_s, ""
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

    def _say(self, message: FromWorker) -> None:
        if self._line is not None:
            self._line.send(message)

    def _keep_house(self) -> None:
        while not self._closing.wait(HOUSEKEEPING_S):
            if self._server is not None:  # Before that, fragments have no arrays.
                self.holder.keep_house(time.monotonic())

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
            version, theta = self._pinned.get(fragment, self._theta(fragment))
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
        principal.require_run(call, begin.run_id)
        if call.fragment not in begin.fragments:
            raise Busy(
                f"worker {begin.worker} has not fragment {call.fragment}, but "
                f"{list(begin.fragments)}; ask the coordinator again"
            )
        with self._awaiting:
            least = self._awaited.least(call.island)
        of_lead = isinstance(call, bulk.FetchRequest) and call.theta
        if call.incarnation < least and not of_lead:
            raise Refused(
                "fenced",
                f"incarnation {call.incarnation} of island {call.island!r} has ended, "
                f"and the first that counts is {least}; stop this process",
            )


def _own_tls(folder: str, number: int) -> TlsFiles | None:
    """Load the worker's own key or, if it has none, that of the coordinator; None: no
    TLS."""
    own = principal.worker(number)
    here = principals(folder) if folder else []
    return TlsFiles.load_given(folder, own if own in here else principal.COORDINATOR)


def sign_of_life(alerts: tuple[str, ...] = ()) -> WorkerAlive:
    """Return a sign of life of this process. alerts: see `WorkerAlive`."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return WorkerAlive(
        pid=os.getpid(),
        alerts=alerts,
        memory_bytes=kib << 10,
        resident_bytes=resident_bytes(),
    )


# ---- what a worker keeps on its disk ------------------------------------------------


def facts_path(workdir: Path, worker: int) -> Path:
    """Return the path of the file in which a worker keeps facts about itself."""
    return workdir / run_files.WORKERS / f"{worker}.json"


def facts_of(workdir: Path, worker: int) -> dict[str, Any]:
    """Return these facts; none if there is no such worker. `pid` and `life`: its
    process, and its number in the run. The rest: the lead that it obeyed last."""
    try:
        found = json.loads(facts_path(workdir, worker).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def next_life(workdir: Path, worker: int) -> dict[str, Any]:
    """Note that the next life of a worker begins in this process."""
    facts = facts_of(workdir, worker)
    facts |= {"life": int(facts.get("life", 0)) + 1, "pid": os.getpid()}
    path = facts_path(workdir, worker)
    path.parent.mkdir(exist_ok=True)
    write_json(facts, path)
    return facts


# ---- one lead after another ---------------------------------------------------------


class Speaking:
    """A line to a lead, on which the worker shows that it lives from the first moment,
    though it may be minutes before it does what the lead says."""

    def __init__(
        self, end: End, config: Config, broke: Callable[[], None] = lambda: None
    ) -> None:
        """config: the lead's. broke: see `WorkerLine`."""
        deadlines = config.placement.deadlines
        self.alive: Callable[[], WorkerAlive] = sign_of_life
        self.line = WorkerLine(
            end,
            to_worker,
            lambda: self.alive(),
            deadlines.report_s,
            2 * deadlines.lease_s,
            broke=broke,
        )
        self.line.send(sign_of_life())


def serve_lead(
    speaking: Speaking, begin: BeginWorker, config: Config, workdir: Path
) -> bool:
    """Hold fragments for a lead until its line breaks; then drop all that is in memory.
    Return True if the run is over."""
    line, worker = speaking.line, None
    with contextlib.ExitStack() as locks:
        try:
            for fragment in begin.fragments:
                folder = workdir / run_files.PUBLISHES / f"{fragment:05d}"
                folder.mkdir(parents=True, exist_ok=True)
                held = workdirs.held(folder, "another worker", LOCKED_S)
                locks.enter_context(held)
            worker = HoldingWorker(begin, config, workdir)
            speaking.alive = worker.alive
            return worker.obey(line)
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
            speaking.alive = sign_of_life
            if worker is not None:
                worker.close()
            line.close()
            worker = None
            gc.collect()
            give_memory_back()


def main(descriptor: int) -> int:
    """Serve the lead at the other end of a socket pair; return the exit code."""
    setup_logging()
    end = socket.socket(fileno=descriptor)
    end.settimeout(FIRST_WORD_S)
    frame = read_frame(end)
    begin = to_worker(frame) if frame is not None else None
    if not isinstance(begin, BeginWorker):
        logger.error("the lead was gone before it said what to hold")
        return EXIT_FAILED
    config = from_builtins(begin.config, "the lead's config")
    # At once, whatever it does: the next lead starts another one at these ports.
    speaking = Speaking(end, config, lambda: os._exit(EXIT_FAILED))
    over = serve_lead(speaking, begin, config, Path(begin.workdir))
    return EXIT_DONE if over else EXIT_FAILED


if __name__ == "__main__":
    end_process(main(int(sys.argv[1])))
