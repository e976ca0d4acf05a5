"""The signs of life of a worker's process."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from diloco_jax import checkpoint, run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import from_builtins
from diloco_jax.coordinator.holding.fragment_snapshots import make_store
from diloco_jax.coordinator.holding.holder import make_holder
from diloco_jax.coordinator.kept import KeptFragments
from diloco_jax.coordinator.settings import bulk_server_of, faults_of
from diloco_jax.coordinator.watchdog import clock
from diloco_jax.coordinator.workers.line import WorkerLine, read_frame
from diloco_jax.coordinator.workers.rendezvous import HAS_SURVIVORS, Rendezvous
from diloco_jax.faults import worker_name
from diloco_jax.machine import resident_bytes
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.logs import setup_logging
from diloco_jax.process import end_process
from diloco_jax.protocol.holding import (
    OF_ONE_LEAD,
    AllSaved,
    BeginWorker,
    EndWorker,
    Forget,
    FragmentKept,
    FromWorker,
    KeepFragment,
    LeadAlive,
    MergesCompiled,
    RestoreFragments,
    SaveAll,
    ToWorker,
    WorkerAlive,
    WorkerFailed,
    WorkerServes,
    to_worker,
)
from diloco_jax.protocol.tickets import Checker, Permit, of_anchor
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses, bulk, principal
from diloco_jax.wire.bulk_server import BulkServer
from diloco_jax.wire.certificates import principals
from diloco_jax.wire.errors import NO_TICKET, Busy, Refused
from diloco_jax.wire.limits import allow_connections
from diloco_jax.wire.session import Handlers
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

_PROCESS = secrets.token_hex(8)


def sign_of_life(alerts: tuple[str, ...] = ()) -> WorkerAlive:
    """Return a sign of life of this process. alerts: see `WorkerAlive`."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return WorkerAlive(
        alerts=alerts,
        memory_bytes=kib << 10,
        resident_bytes=resident_bytes(),
        process=_PROCESS,
    )


HOUSEKEEPING_S = 0.5
"""Interval between two looks for a snapshot that is due, in seconds."""
FIRST_WORD_S = 30.0
"""Longest wait for the lead's first message, in seconds."""
LOCKED_S = 10.0
"""Longest wait for the worker before this one to let go of its folders, in seconds."""


class HoldingWorker(Handlers):
    """One life of a worker: restore, then merge and serve, for one lead or several."""

    def __init__(
        self, begin: BeginWorker, config: Config, locks: contextlib.ExitStack
    ) -> None:
        """Prepare to hold the fragments; `locks` keep their folders for this process.
        Raises ConfigError if another process has them."""
        self._begin, self._config = begin, config
        workdir, placement = Path(begin.workdir), config.placement
        for fragment in begin.fragments:
            folder = workdir / run_files.PUBLISHES / f"{fragment:05d}"
            folder.mkdir(parents=True, exist_ok=True)
            locks.enter_context(workdirs.held(folder, "another worker", LOCKED_S))
        self._tls = _own_tls(placement.certificates, begin.worker)
        plan = build_plan(config.run, build(config.run))
        whose = checkpoint.whose(config.run, begin.run_id, plan)
        # Arrays come with `RestoreFragments`, for its own fragments alone.
        self._store = make_store(config, plan, None)
        self._kept = KeptFragments(workdir, whose, self._tell_kept)
        self.holder = make_holder(
            config,
            self._store,
            self._kept,
            workdir,
            whose,
            begin.fragments,
        )
        name = worker_name(begin.worker)
        self.holder.faults = faults_of(config, name, begin.life)
        self._tickets = Checker(begin.ticket_key, _ahead_s(begin))
        self.closing = threading.Event()
        self._server: BulkServer | None = None
        self._address = ""
        self._saying = threading.Lock()
        self._unsaid: list[FromWorker] | None = None
        """Messages that wait until a new lead knows what is here."""
        self.holder.answer(self._say, lambda error: fail(self._line, error))

    def answer(self, line: WorkerLine) -> None:
        """Set the line to the lead, to which answers go."""
        self._line = line

    def go_on(self, begin: BeginWorker, line: WorkerLine) -> None:
        """Answer another lead, which says next what is committed. Raises ConfigError if
        it wants another worker than this one."""
        with self._saying:
            self._unsaid = []
            self._line = line
        if not self._begin.is_like(begin):
            raise ConfigError(
                f"worker {begin.worker} of the lead before cannot go on: its config or "
                f"its fragments are not those of this one"
            )
        self._begin = replace(begin, life=self._begin.life)
        self._tickets.renew(begin.ticket_key, _ahead_s(begin))

    def alive(self) -> WorkerAlive:
        """Return a sign of life."""
        return sign_of_life(tuple(self.holder.alerts(time.monotonic())))

    def obey(self, message: ToWorker) -> None:
        """Do what the lead says."""
        match message:
            case RestoreFragments(fences=fences):
                for fence in fences:
                    self._tickets.fence(fence.island, fence.before)
                    self.holder.hold(fence)
                if self._server is None:
                    self._line.send(self.holder.restore(message))
                    self._serve()
                    self.holder.warm_up()
                else:
                    self._take_over(message)
            case SaveAll(within_s=within_s):
                self._line.send(self._saved(within_s))
            case BeginWorker() | EndWorker() | LeadAlive():
                pass
            case _:
                if isinstance(message, Forget):
                    self._tickets.fence(message.island, message.before)
                self.holder.hold(message)

    def keep_house(self) -> None:
        """Write the snapshots that are due, until the end."""
        while not self.closing.wait(HOUSEKEEPING_S):
            if self._server is not None:  # Before that, fragments have no arrays.
                self.holder.keep_house(time.monotonic())

    def close(self) -> None:
        """End service, and the merge under way."""
        self.closing.set()
        if self._server is not None:
            self._server.stop(0.0)
        self.holder.close()
        self._kept.close(self._config.placement.deadlines.stop_s / 2)

    def _tell_kept(self, keep: KeepFragment, trouble: str) -> None:
        self._say(FragmentKept(keep=keep, trouble=trouble))

    def _serve(self) -> None:
        self._server = bulk_server_of(self._config, self, self._tls)
        self._server.connections = allow_connections(self._server.connections)
        host, _ = addresses.parse_address(self._begin.bind)
        listener = addresses.listen(addresses.resolve(self._begin.bind))
        port = listener.getsockname()[1]
        self._server.start(listener)
        self._address = addresses.format_address(host, port)
        self._line.send(WorkerServes(address=self._address))

    def _take_over(self, asked: RestoreFragments) -> None:
        """Tell a new lead what is here, and then what was said meanwhile."""
        self._line.send(self.holder.take_over(asked))
        self._line.send(WorkerServes(address=self._address))
        if self.holder.compiled:
            self._line.send(MergesCompiled())
        with self._saying:
            unsaid, self._unsaid = self._unsaid, None
            for message in unsaid or []:
                if not isinstance(message, OF_ONE_LEAD):
                    self._line.send(message)
        for arrived in self.holder.arrived():
            self._say(arrived)

    def _say(self, message: FromWorker) -> None:
        with self._saying:
            if self._unsaid is not None:
                self._unsaid.append(message)
            else:
                self._line.send(message)

    def _saved(self, within_s: float | None) -> AllSaved:
        """Write the last snapshots; nothing is merged any more."""
        self.closing.set()
        self.holder.close()
        digests = {f: self._store.digest_of(f) for f in self.holder.fragments}
        patience_s = self._config.placement.outage_budget_s
        text = ""
        if self.holder.wait(lambda: patience_s):
            try:
                self.holder.save_all(within_s)
            except OSError as error:
                text = str(error)
        else:
            text = f"a snapshot has not ended within {patience_s:g} s"
        return AllSaved(digests=digests, text=text)

    # ---- islands' bytes, on many threads --------------------------------------------

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the place of a stripe of a delta, or of an anchor."""
        self._require_own(start)
        of: int | Version = start.tick
        if start.version is not None:
            of = of_anchor(self.holder.lost.term_of(start))
        self._require_ticket(start, of)
        return self.holder.upload_begin(start)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place."""
        return self.holder.upload_end(start, place)

    def fetch(self, request: bulk.FetchRequest) -> bulk.FetchSource:
        """Return published fragments for an island."""
        self._require_own(request)
        self._require_ticket(request, request.want)
        current, _ = self._store.current(request.fragment)
        if request.want > current:
            # The island heard of it before `Commit` came here.
            raise Busy(
                f"version {tuple(request.want)} of fragment {request.fragment} is not "
                f"committed here yet; come again"
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

    def _require_ticket(
        self, call: bulk.UploadStart | bulk.FetchRequest, of: int | Version
    ) -> None:
        permit = Permit(call.run_id, call.island, call.incarnation, call.fragment, of)
        if flaw := self._tickets.flaw(call.ticket, permit, clock()):
            raise Refused(
                NO_TICKET,
                f"the ticket of island {call.island!r}, incarnation "
                f"{call.incarnation}, for fragment {call.fragment}, {of}, is {flaw}; "
                f"the coordinator gives another one",
            )


def _ahead_s(begin: BeginWorker) -> float:
    """Return by how much this clock is ahead of the lead's, and of the time that the
    message took: tickets last no less than the lead meant."""
    return clock() - begin.clock


def _own_tls(folder: str, number: int) -> TlsFiles | None:
    """Load the worker's own key or, if it has none, that of the coordinator; None: no
    TLS."""
    own = principal.worker(number)
    here = principals(folder) if folder else []
    return TlsFiles.load_given(folder, own if own in here else principal.COORDINATOR)


def fail(line: WorkerLine, error: BaseException) -> NoReturn:
    """Send the lead the error, and end this process as a crash would."""
    logger.error("the worker failed", exc_info=error)
    number = error.errno if isinstance(error, OSError) else None
    text = f"{type(error).__name__}: {error}"
    line.send(WorkerFailed(text=text, errno=number or 0))
    line.close()
    os._exit(1)


def main(descriptor: int) -> int:
    """Serve until a lead says the end, or no other comes; return the exit code."""
    setup_logging()
    end = socket.socket(fileno=descriptor)
    end.settimeout(FIRST_WORD_S)
    frame = read_frame(end)
    begin = to_worker(frame) if frame is not None else None
    if not isinstance(begin, BeginWorker):
        logger.error("the lead was gone before it said what to hold")
        return 1
    config = from_builtins(begin.config, "the lead's config")
    found: list[HoldingWorker] = []

    def alive() -> WorkerAlive:
        return found[0].alive() if found else sign_of_life()

    deadlines = config.placement.deadlines

    def speak(end: socket.socket) -> WorkerLine:
        silence_s = 2 * deadlines.lease_s
        line = WorkerLine(end, to_worker, alive, deadlines.report_s, silence_s)
        line.send(alive())
        return line

    line = speak(end)
    with contextlib.ExitStack() as locks:
        try:
            worker = HoldingWorker(begin, config, locks)
            worker.answer(line)
            found.append(worker)
            place = Rendezvous(begin, line, speak, lambda: os._exit(0))
            house = threading.Thread(target=worker.keep_house, daemon=True)
            house.start()
            while True:
                for message in line.messages():
                    if isinstance(message, EndWorker):
                        worker.close()
                        place.close()
                        line.close()
                        return 0
                    worker.obey(message)
                line.close()
                can_go_on = HAS_SURVIVORS and not worker.closing.is_set()
                alone_s = config.placement.outage_budget_s if can_go_on else 0.0
                logger.warning("the lead is gone: awaiting the next for %g s", alone_s)
                if (came := place.await_lead(alone_s)) is None:
                    place.close()
                    break
                line = came.line
                worker.go_on(came.begin, line)
        except Exception as error:
            fail(line, error)
    logger.error("no lead came: this worker ends")
    os._exit(1)


if __name__ == "__main__":
    end_process(main(int(sys.argv[1])))
