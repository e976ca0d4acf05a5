"""The coordinator's process: start, run, stop, and the last writes.

Without `--init` the run in the workdir goes on. If there is none, the coordinator waits
for islands, and a new term begins with their anchors. What is written last is the
summary, which says that a run is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from diloco_jax import checkpoint, compilation, files, restart_time, run_files, storage
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator import going_on, origin, summary, too_late
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator.anchor_search import (
    AnchorSearch,
    AnyHolder,
    Searched,
)
from diloco_jax.coordinator.disk_space import DiskWait
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.lead import Lead
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.origin import Holders, StateMaker
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.service import Likeness, Service
from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.coordinator.settings import (
    faults_of,
    own_tls,
    policy_of,
    require_merging,
    require_ports,
    require_room,
    server_of,
)
from diloco_jax.coordinator.snapshots import StateSnapshots
from diloco_jax.coordinator.summary import Announcer
from diloco_jax.coordinator.watchdog import TurnWatch
from diloco_jax.coordinator.workers.holder import WorkersHolder
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import COORDINATOR
from diloco_jax.models.build import build, build_inner, build_plan
from diloco_jax.observability import sinks
from diloco_jax.observability.measures import ENDING
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape, remove_tape
from diloco_jax.process import heed_signals
from diloco_jax.protocol.coordinator.search import Aim
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.wire import addresses
from diloco_jax.wire.session import Handlers
from diloco_jax.workdir import RunFacts

logger = logging.getLogger(__name__)


def run(
    config: Config,
    workdir: Path,
    *,
    init: bool,
    resume: bool = False,
    gathers: str = "",
    trusted: str = "",
) -> int:
    """Serve one run until it is over; return the exit code.

    Args:
      config: resolved and validated.
      workdir: the run's folder.
      init: begin a new run there; otherwise the run there goes on.
      resume: the run was stopped as a whole; islands begin anew.
      gathers: the run whose state was lost, if it is known.
      trusted: the island whose anchors a person believes, where islands differ.

    Raises:
      ConfigError: neither the workdir nor any island has a run to go on with; the
        workdir has another run, or a coordinator at work; the address cannot be bound;
        snapshots cannot be written.
    """
    # TPUs here are an island's. JAX_PLATFORMS is too late if a config imported jax.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    coordinator = Coordinator(config, workdir, init=init, resume=resume)
    coordinator.gathers, coordinator.trusted = gathers, trusted
    return serve(coordinator)


def serve(coordinator: Coordinator) -> int:
    """Serve by this coordinator until its end; return the exit code.

    Whatever ends it, on its own thread or at a holder, comes through here. Only a hang
    ends the process itself.
    """
    try:
        coordinator.start(coordinator.heed_signals)
        with TurnWatch(coordinator.config.placement) as watch:
            watch.start()
            code = coordinator.run(watch.touch)
        return code or coordinator.conclude()
    finally:
        coordinator.close()


class Coordinator:
    """One life of the coordinator: make, `start`, `run`, `conclude`, `close`."""

    gathers = ""
    """The run whose state was lost, as a person says; before `start`."""
    trusted = ""
    """The island whose anchors a person believes; likewise."""

    def __init__(
        self, config: Config, workdir: Path, *, init: bool, resume: bool = False
    ) -> None:
        """Make or find the run in `workdir`, if the address can be served."""
        self._workdir = workdir
        self._init, self._resume, self._open = init, resume, contextlib.ExitStack()
        placement = config.placement
        self._tls = own_tls(placement)
        require_ports(placement, self._tls)
        self._folder = checkpoint.snapshots_folder(placement, workdir)
        sinks.require(placement.sinks)
        if placement.checkpoints:
            storage.require_access(self._folder)
        self._model = build(config.run)
        self._plan = build_plan(config.run, self._model)
        self.config = config = restart_time.lasting(config, self._plan.total)
        # Islands need it: refuse a name that optax lacks before they start.
        build_inner(config.run, self._model)
        require_room(config, self._plan)
        require_merging(placement)
        self._facts = going_on.facts_of(config, workdir, init=init, resume=resume)
        self._deadlines = config.placement.deadlines
        self._disk = DiskWait(config.placement.alone_s, lambda: self._interrupted)
        self._end_by: float | None = None
        self._interrupted = False
        self._served = False
        """True once islands' calls are answered."""
        self._unheard: Sequence[Any] = ()

    def start(self, serves: Callable[[], None] = lambda: None) -> None:
        """Make or load the state, or gather it from islands, and serve. serves: called
        when this can be asked to end, before the run's address is told."""
        config, workdir = self.config, self._workdir
        searched: Searched | None = None
        if self._facts.run_id:
            self._open_run(had_run=True)
        else:
            aim = origin.aim_of_run(config, self._plan, self.trusted)
            try:
                searched = self._search(aim)
            except ConfigError as error:
                raise origin.nothing_to_go_on_with(workdir, error) from error
        state = self._make_state(searched)
        extends = going_on.extension(config, workdir, state)
        self._open_measures(was_over=state.phase == "done" and extends is None)
        self._make_lead(state)
        # Both before any hello, and the extension before the run counts as over.
        if extends is not None:
            self.lead.post(extends)
        if self._resume:
            before = self._facts
            self._facts, resumed = going_on.after_stop(before, self._roster, workdir)
            self.lead.post(resumed)
        self._announce()
        service = self._make_service()
        if self._served:
            self._server.hand_over(service)
            self._open.callback(self._server.stop, 0.0)  # Before its files.
        else:
            self._serve(service)
        serves()
        self._tell_address()
        logger.info("run %s is served at %s", self._facts.run_id, self.address)

    def run(self, touch: Callable[[], None] = lambda: None) -> int:
        """Decide until the run is over or the process is asked to end. touch: see
        `TurnWatch`."""
        self.lead.touch = self._disk.touch = touch
        self.lead.run()
        return EXIT_DONE if self.lead.finished or self._interrupted else EXIT_FAILED

    def conclude(self) -> int:
        """Write the last snapshot and summary, unless it failed; return the code."""
        finished, linger_s = self.lead.finished, self.config.placement.linger_s
        if finished:
            # Whoever asks is answered until the summary is there.
            self._answer(ENDING)
        else:
            self._server.stop(self._deadlines.stop_s / 5)
        last = LastWrites(
            workdir=self._workdir,
            config=self.config,
            lead=self.lead,
            holder=self.holder,
            log=self._log,
            states=self._states,
            roster=self._roster,
            disk=self._disk,
            begun_unix=self._facts.begun_unix,
            over_unix=self._over,
            patience_s=self._patience_s,
        )
        last.measures()
        if not finished:
            # The sender of a signal may not wait for a snapshot.
            last.summary()
        whole = last.snapshots()
        if finished and not whole:
            return EXIT_FAILED
        if finished:
            # The summary says that the run is over: nothing is left to do.
            last.summary()
            if linger_s:
                self._answer("done")
                too_late.wait(linger_s, lambda: self._interrupted)
            else:
                self._server.stop(self._deadlines.stop_s / 5)
        return EXIT_FAILED if self._disk.alerts else EXIT_DONE

    def _answer(self, phase: str) -> None:
        """Tell those who come after the run's end how far its coordinator is."""
        status = {**self._announcer.shown(), "phase": phase}
        self._server.hand_over(too_late.AfterEndHandlers(self.lead, status))

    def close(self) -> None:
        """End service and close the files; also after a start that failed."""
        self._open.close()

    def _serve(self, handlers: Handlers) -> None:
        self._server = server_of(self.config, handlers, self._tls)
        self._open.callback(self._server.stop, 0.0)
        self._bound, self._served = self._server.start(), True
        self.address = self.config.placement.advertise or self._bound
        addresses.parse_address(self.address)

    def _tell_address(self) -> None:
        file = self._workdir / run_files.ADDRESS
        files.write_text(addresses.on_this_machine(self.address), file)
        self._open.callback(file.unlink, missing_ok=True)

    def _search(self, aim: Aim, holder: AnyHolder | None = None) -> Searched:
        """Search islands for anchors, before anyone is let in. holder: that of their
        fragments; None: it is made once the run is known, and with it all else."""
        policy = policy_of(self.config, self._plan, self._facts.run_id or self.gathers)

        def holder_of(run_id: str, term: int) -> AnyHolder:
            if not self._facts.run_id:
                workdirs.make_workdir(self._workdir)
                self._facts = RunFacts(run_id=run_id, begun_unix=time.time())
                self._open_run(had_run=False)
            return holder or self._holders.lacking_all(term)

        search = AnchorSearch(self.config.run, policy, self._plan, aim, holder_of)
        self._serve(search)
        if self._facts.run_id:
            self._tell_address()  # Islands need it for a run that is to begin.
        searched = search.search()
        self._unheard = searched.unheard
        return searched

    def _open_run(self, *, had_run: bool) -> None:
        """Lock the workdir, and open the tape, the kept cycles, the snapshots and the
        holders of fragments. had_run: see `going_on.hold`."""
        config, workdir, run_id = self.config, self._workdir, self._facts.run_id
        going_on.hold(workdir, self._open, had_run=had_run)
        compilation.use_cache(compilation.of_run(workdir))
        self.policy_config = policy = policy_of(config, self._plan, run_id)
        whose = checkpoint.whose(config.run, run_id, self._plan)
        self._states = StateSnapshots(self._folder, config.placement, policy, whose)
        if had_run and self._states.newest() is None:
            begins = self._init or (
                config.placement.first_from and not workdirs.has_begun(workdir)
            )
            if not begins:
                raise origin.without_snapshot(workdir, run_id, self._folder)
            # Left by a start that failed: no run exists before the first snapshot.
            remove_tape(workdir / run_files.TAPE)
        self._tape = Tape(workdir / run_files.TAPE, repeat=self._disk.until_written)
        self._open.callback(self._tape.close)
        exports, sizes = config.placement.exports_kept, self._plan.sizes
        self._kept = KeptCycles(workdir, exports, whose, sizes)
        self._open.callback(self._kept.close, self._deadlines.stop_s)
        self._holders = Holders(
            config, self._plan, self._kept, workdir, run_id, self._open
        )

    def _make_state(self, searched: Searched | None) -> State:
        """Make the state, the holder and the log of this life."""
        config, workdir = self.config, self._workdir
        maker = StateMaker(
            config=config,
            policy=self.policy_config,
            plan=self._plan,
            workdir=workdir,
            states=self._states,
            holders=self._holders,
            tape=self._tape,
            open_log=self._open_log,
            search=self._search,
            trusted=self.trusted,
        )
        found = self._states.newest()
        if searched is not None:
            made = maker.of_new_term(searched, found)
        elif found is not None:
            made = maker.recovered()
        else:
            made = maker.of_new_run(self._model)
        self.holder, self._log = made.holder, made.log
        if searched is not None:
            # run.json comes last: before it, the workdir holds no run.
            write_config_json(config, workdir / run_files.CONFIG)
            self._facts.write(workdir)
        return made.state

    def _open_measures(self, *, was_over: bool) -> None:
        """Open what islands measure. was_over: the run was, before this life."""
        workdir = self._workdir
        self._metrics = Metrics.of_run(self.config, workdir, self._facts.run_id)
        self._open.callback(self._metrics.close)
        self._roster = Roster.begin_from(workdir / run_files.ROSTER)
        self._over = self._roster.saved_unix() if was_over else 0.0  # Unix time.

    def _make_lead(self, state: State) -> None:
        self._sessions = Sessions()
        self._sessions.completed = self.holder.completed
        self.lead = Lead(
            self.policy_config,
            state,
            holder=self.holder,
            log=self._log,
            tape=self._tape,
            metrics=self._metrics,
            sessions=self._sessions,
            faults=faults_of(self.config, COORDINATOR),
            slow_s=self._deadlines.report_s,
            housekeeping=self._keep_house,
        )
        for message in self._unheard:
            self.lead.hear(message)

    def _announce(self) -> None:
        """Begin to show people how the run is."""
        self._announcer = Announcer(
            self.config,
            self._plan,
            self._workdir,
            roster=self._roster,
            metrics=self._metrics,
            holder=self.holder,
            snapshots=self._states.writer,
            disk=self._disk,
            tls=self._tls,
            begun_unix=self._facts.begun_unix,
        )
        self._open.callback(self._announcer.stop)
        self._announcer.begin(self.lead)

    def _make_service(self) -> Service:
        config = self.config
        return Service(
            Likeness(config.run, self._plan),
            lead=self.lead,
            holder=self.holder,
            sessions=self._sessions,
            roster=self._roster,
            metrics=self._metrics,
            kept=self._kept,
            status=self._announcer.shown,
            time_budget_s=config.placement.time_budget_s,
            sources=config.run.data.sources,
        )

    def _open_log(self, after: int) -> durable.RecordLog:
        folder = self._workdir / run_files.LOG
        log = durable.RecordLog(folder, after, self._disk.until_written)
        self._open.callback(log.close)
        return log

    def _keep_house(self, lead: Lead) -> None:
        now = time.monotonic()
        if self._announcer.due(now):
            self._announcer.refresh(lead)
            with self._disk.put_off("islands' measures"):
                self._roster.save()
        for waited in self._disk.over():
            lead.journal.alert(waited)
        if not (lead.finished or self._interrupted):
            with self._disk.put_off("a snapshot"):
                self._states.write_due(now, lead.state, self._log)
                self.holder.keep_house(now)
        else:
            if self._end_by is None:
                logger.info("ending, %s", "asked to" if self._interrupted else "done")
                # A stop of the coordinator alone does not wait long: islands train on.
                waits = self._deadlines
                self._end_by = now + (waits.stop_s if lead.finished else waits.report_s)
            if not self._sessions.connected() or now >= self._end_by:
                lead.stop()

    def _patience_s(self) -> float:
        """Return the longest wait for the snapshot that is being written at the end."""
        if self._interrupted or not self.lead.finished:
            return self._deadlines.stop_s
        return self.config.placement.outage_budget_s

    def heed_signals(self) -> None:
        """Let signals ask this process to end, if this is the main thread."""
        heed_signals(self._asked_to_end)

    def _asked_to_end(self, number: int, frame: Any) -> None:
        # Nothing else here: a handler may find any lock held, even a log stream's.
        self._interrupted = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastWrites:
    """The last writes of one life. begun_unix, over_unix: see `summary.write`.
    patience_s: returns the longest wait for a snapshot that is being written."""

    workdir: Path
    config: Config
    lead: Lead
    holder: StoreHolder | WorkersHolder
    log: RecordLog
    states: StateSnapshots
    roster: Roster
    disk: DiskWait
    begun_unix: float
    over_unix: float
    patience_s: Callable[[], float]

    def measures(self) -> None:
        """Write what islands measured."""
        self._write("islands' measures", self.roster.save)

    def summary(self) -> None:
        """Write the summary, unless the run was over before and left it."""
        self._write("the summary", self._sum_up)

    def snapshots(self) -> bool:
        """Write the last snapshots; before the run is over, what there is time for.
        Return whether all of a run that is over is here."""
        began, finished = time.monotonic(), self.lead.finished
        if self.states.writer.wait(self.patience_s) and self.holder.wait(
            lambda: self.patience_s() - (time.monotonic() - began)
        ):
            found = list[bool]()
            self._write("a snapshot", lambda: found.append(self._save()))
            return all(found)
        logger.error(
            "a snapshot has not ended within %g s: none is written at the end, and "
            "the log has everything since the last one%s",
            self.patience_s(),
            "; start the coordinator again, and it writes it" if finished else "",
        )
        return not finished

    def _write(self, what: str, write: Callable[[], None]) -> None:
        """Wait for room on the disk only if the run is over: the sender of a signal may
        not wait."""
        repeat = self.disk.until_written if self.lead.finished else self.disk.once
        repeat(what, write)

    def _save(self) -> bool:
        deadlines = self.config.placement.deadlines
        within_s = None if self.lead.finished else deadlines.stop_s / 2
        self.states.write_last(self.lead.state, self.log)
        return self.holder.save_all(within_s)

    def _sum_up(self) -> None:
        summary.write(
            self.workdir,
            self.config,
            self.lead,
            self.roster,
            begun_unix=self.begun_unix,
            over_unix=self.over_unix,
            digest=self.holder.digest(),
        )
