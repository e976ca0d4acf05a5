"""The coordinator's process: start, run, stop, and the last writes.

Without `--init` the run in the workdir goes on. If there is none, the coordinator waits
for islands, and a new term begins with their anchors. What is written last is the
summary, which says that a run is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from msgspec.structs import replace

from diloco_jax import checkpoint, compilation, files, run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator import going_on, origin, summary
from diloco_jax.coordinator import journal as durable
from diloco_jax.coordinator.holding.fragment_snapshots import KeptCycles, make_store
from diloco_jax.coordinator.holding.holder import FragmentHolder, make_holder
from diloco_jax.coordinator.lead import Lead, Sessions
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.service import (
    AfterEndHandlers,
    AnchorSearch,
    AskedToEnd,
    Likeness,
    Searched,
    SearchError,
    Service,
)
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
from diloco_jax.coordinator.watchdog import DiskWait, TurnWatch
from diloco_jax.coordinator.workers import WorkersHolder, has_result
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.faults import COORDINATOR
from diloco_jax.hardware.machines import lasting
from diloco_jax.models.build import build, build_inner, build_plan, inner_note
from diloco_jax.observability import sinks
from diloco_jax.observability.measures import ENDING
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape, remove_tape
from diloco_jax.process import heed_signals
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.search import Aim, FoundTerm
from diloco_jax.protocol.coordinator.state import State, initial
from diloco_jax.protocol.holding import Committed, FromHolder, RestoreFragments
from diloco_jax.protocol.messages import NOTHING, Version
from diloco_jax.weights.first import keep_source, keep_tokenizer
from diloco_jax.wire import addresses
from diloco_jax.wire.server import Server
from diloco_jax.wire.session import Handlers
from diloco_jax.workdir import RunFacts

logger = logging.getLogger(__name__)

LINGER_POLL_S = 0.2


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
        try:
            coordinator.start(coordinator.heed_signals)
        except AskedToEnd as asked:
            logger.info("%s", asked)
            return EXIT_DONE
        with TurnWatch(coordinator.config.placement) as watch:
            watch.start()
            code = coordinator.run(watch.touch)
        return code or coordinator.conclude()
    finally:
        coordinator.close()


class Coordinator:
    """One life of the coordinator: make, `start`, `run`, `conclude`, `close`."""

    gathers = trusted = ""
    """The run whose state was lost, as a person says, and the island whose anchors a
    person believes; before `start`."""

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
            files.require_access(self._folder)
        model = build(config.run)
        self._plan = build_plan(config.run, model)
        self.config = config = lasting(config, self._plan.total)
        # Islands need it: refuse a name that optax lacks before they start.
        build_inner(config.run, model)
        if note := inner_note(config.run, model):
            logger.info(note)
        require_room(config, self._plan)
        require_merging(placement)
        self._facts = going_on.facts_of(config, workdir, init=init, resume=resume)
        self._deadlines = config.placement.deadlines
        self._disk = DiskWait(config.placement.alone_s, lambda: self._interrupted)
        self._end_by: float | None = None
        self._interrupted = False
        self._server: Server | None = None
        self._unheard: Sequence[FromHolder] = ()
        self._environment: dict[str, Any] = {}
        """That of the process in which merges of a search's fragments run."""

    def start(self, serves: Callable[[], None] = lambda: None) -> None:
        """Make or load the state, or gather it from islands, and serve. serves: called
        when this can be asked to end, before the run's address is told. AskedToEnd is
        raised if that is while islands are searched."""
        config, workdir = self.config, self._workdir
        self._serves = serves
        searched: Searched | None = None
        if self._facts.run_id:
            self._open_run(had_run=True)
        else:
            aim = origin.aim_of_run(config, self._plan, self.trusted)
            try:
                searched = self._search(aim)
            except (ConfigError, SearchError) as error:
                raise origin.nothing_to_go_on_with(workdir, error) from error
        state = self._make_state(searched)
        extends = going_on.extension(config, workdir, state)
        was_over = state.phase == "done" and extends is None
        self._metrics = Metrics.of_run(config, workdir, self._facts.run_id)
        self._open.callback(self._metrics.close)
        self._over = self._roster.saved_unix() if was_over else 0.0  # Unix time.
        self._make_lead(state)
        # Both before any hello, and the extension before the run counts as over.
        if extends is not None:
            self.lead.post(extends)
        if self._resume:
            before = self._facts
            self._facts, resumed = going_on.after_stop(before, self._roster, workdir)
            self.lead.post(resumed)
        self._announce()
        self._serve(self._make_service())
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
        # The sender of a signal does not wait for room on the disk.
        write = self._disk.until_written if finished else self._disk.once
        if finished:
            # Whoever asks is answered until the summary is there.
            self._answer(ENDING)
        else:
            self._stop_serving()
        write("islands' measures", self._roster.save)
        if not finished:
            # Nor may it wait for a snapshot.
            write("the summary", self._sum_up)
        if not self._save(write) and finished:
            return EXIT_FAILED
        if finished:
            # The summary says that the run is over: nothing is left to do.
            write("the summary", self._sum_up)
            if linger_s:
                self._answer("done")
                self._linger(linger_s)
            else:
                self._stop_serving()
        return EXIT_FAILED if self._disk.alerts else EXIT_DONE

    def close(self) -> None:
        """End service and close the files; also after a start that failed."""
        self._open.close()

    def heed_signals(self) -> None:
        """Let signals ask this process to end, if this is the main thread."""
        heed_signals(self._asked_to_end)

    def _asked_to_end(self, number: int, frame: Any) -> None:
        # Nothing else here: a handler may find any lock held, even a log stream's.
        if self._interrupted:
            os._exit(EXIT_FAILED)  # All that anybody was told of is on the disk.
        self._interrupted = True

    # ---- the start ------------------------------------------------------------------

    def _serve(self, handlers: Handlers) -> None:
        """Answer calls by these handlers from now on."""
        if self._server is not None:
            self._server.hand_over(handlers)
        else:
            self._server = server_of(self.config, handlers, self._tls)
            bound = self._server.start()
            self.address = self.config.placement.advertise or bound
            addresses.parse_address(self.address)
        self._open.callback(self._server.stop, 0.0)  # Before its files.

    def _tell_address(self) -> None:
        file = self._workdir / run_files.ADDRESS
        files.write_text(addresses.on_this_machine(self.address), file)
        self._open.callback(file.unlink, missing_ok=True)

    def _search(self, aim: Aim, holder: FragmentHolder | None = None) -> Searched:
        """Search islands for anchors, before anyone is let in. holder: that of their
        fragments; None: it is made once the run is known, and with it all else."""
        policy = policy_of(self.config, self._plan, self._facts.run_id or self.gathers)

        def holder_of(run_id: str, term: int) -> FragmentHolder:
            if not self._facts.run_id:
                workdirs.make_workdir(self._workdir)
                self._facts = RunFacts(run_id=run_id, begun_unix=time.time())
                self._open_run(had_run=False)
            return holder or self._all_lost(term)

        search = AnchorSearch(
            self.config.run,
            policy,
            self._plan,
            aim,
            holder_of,
            lambda: self._interrupted,
        )
        self._serve(search)
        self._serves()
        if self._facts.run_id:
            self._tell_address()  # Islands need it for a run that is to begin.
        searched = search.search()
        self._unheard = searched.unheard
        return searched

    def _open_run(self, *, had_run: bool) -> None:
        """Lock the workdir, and open the tape, the kept cycles and the snapshots.
        had_run: see `going_on.hold`."""
        config, workdir, run_id = self.config, self._workdir, self._facts.run_id
        placement = config.placement
        going_on.hold(workdir, self._open, had_run=had_run)
        compilation.use_cache(compilation.of_run(workdir))
        self._policy = policy_of(config, self._plan, run_id)
        self._whose = checkpoint.whose(config.run, run_id, self._plan)
        self._states = StateSnapshots(
            self._folder, placement, self._policy, self._whose
        )
        if had_run and self._states.newest() is None:
            begins = self._init or (
                placement.first_from and not workdirs.has_begun(workdir)
            )
            if not begins:
                raise origin.without_snapshot(workdir, run_id, self._folder)
            # Left by a start that failed: no run exists before the first snapshot.
            remove_tape(workdir / run_files.TAPE)
        self._roster = Roster.begin_from(workdir / run_files.ROSTER)
        self._tape = Tape(
            workdir / run_files.TAPE,
            repeat=self._disk.until_written,
            told=self._roster.failures.tape,
        )
        if self._resume:
            self._tape.went_on = 0.0  # The run as a whole was away: nothing failed.
        self._open.callback(self._tape.close)
        self._kept = KeptCycles(
            workdir, placement.exports_kept, self._whose, self._plan.sizes
        )
        self._open.callback(self._kept.close, self._deadlines.stop_s)

    def _make_state(self, searched: Searched | None) -> State:
        """Make the state, the holder and the log of this life."""
        found = self._states.newest()
        if searched is not None:
            state = self._of_new_term(searched, found)
            # run.json comes last: before it, the workdir holds no run.
            write_config_json(self.config, self._workdir / run_files.CONFIG)
            self._facts.write(self._workdir)
            return state
        return self._of_new_run() if found is None else self._recovered()

    def _recovered(self) -> State:
        """Return the state of the run on the disk, as far as it was durable."""
        folder = self._workdir / run_files.LOG
        recovered = origin.recover(self._policy, self._states, folder)
        state = recovered.state
        total = self.config.run.total_tokens
        over = state.phase == "done" and state.progress_tokens >= total
        over = over and has_result(self._workdir)
        self.holder = self._make_holder(state.term, over=over)
        restored = self.holder.restore(recovered.restore)
        origin.tell_recovered(self.config, recovered, restored, self._tape)
        # After the snapshot: a kill may have come between snapshot and log.
        self._open_log(recovered.snapshot)
        if lost := [one.fragment for one in restored.lost]:
            aim = origin.aim_of_run(self.config, self._plan, self.trusted)
            aim = origin.aim_of_lost(aim, state, lost, self._tape)
            found = self._search(aim, self.holder).found
            for record in recovery.term_records(state, found):
                self._log.append(records.line(record))
                self._tape.append(durable.dated(record))
                state = recovery.fragment_begun(state, record)
            origin.commit(self.holder, found)
        return recovery.serving_from(self._policy, state, time.monotonic())

    def _of_new_run(self) -> State:
        """Return the state of a new run. An island gives its parameters, or workers or
        this process draw or read them."""
        state, giver = initial(self._policy), self.config.placement.first_from
        if giver:
            aim = origin.aim_of_run(self.config, self._plan, "")
            aim = replace(aim, names=frozenset((giver,)), first=True)
            searched = self._search(aim)
            self._tell_begun(self._environment, giver, searched.found)
            self._begin_with(state, searched.holder)
            origin.commit(searched.holder, searched.found)
            return state
        holder, began = self._make_holder(1), time.monotonic()
        asked = RestoreFragments(fragments=self._all_at(Version()), first=True)
        self._tell_begun(holder.restore(asked).environment)
        if self.config.run.model.weights:
            logger.info(
                "%d parameters of %s, read and written in %.1f s",
                self._plan.total,
                self.config.run.model.weights,
                time.monotonic() - began,
            )
        self._begin_with(state, holder)
        return state

    def _of_new_term(self, searched: Searched, before: int | None) -> State:
        """Return the state of a new term. before: number of a snapshot that is there,
        of an older run, as where snapshots go elsewhere."""
        if before is not None:
            self._states.require_own(before)
        found = searched.found
        begins = durable.Term(
            term=found.term,
            name=found.name,
            run_id=found.run_id,
            versions=tuple(anchor.version for anchor in found.anchors),
            sources=tuple(anchor.island for anchor in found.anchors),
            replaced=tuple(anchor.replaced for anchor in found.anchors),
            tokens=found.tokens,
            next_position=found.next_position,
            fingerprint=self._policy.fingerprint,
            plan=self._plan.digest(),
            parameters_digest=origin.digest_of(found),
            environment=self._environment,
            since=self._tape.went_on,
            fragment_parameters=self._plan.sizes,
        )
        self._tape.append(durable.dated(begins))
        logger.warning(
            "term %d of run %s begins with versions %s of islands %s",
            found.term,
            found.run_id,
            [tuple(anchor.replaced) for anchor in found.anchors],
            sorted({anchor.island for anchor in found.anchors}),
        )
        state = recovery.first_state(self._policy, found)
        self._begin_with(state, searched.holder, before)
        origin.commit(searched.holder, found)
        return state

    def _tell_begun(
        self,
        environment: dict[str, Any],
        giver: str = "",
        found: FoundTerm | None = None,
    ) -> None:
        """Tell the tape that a run begins, before its first snapshot: a run with one
        goes on after a crash. Keep the files of the weights' source. found: the
        parameters that an island gave."""
        run = self.config.run
        if run.model.weights:
            keep_source(run.model.weights, self._workdir)
        keep_tokenizer(run.data, self._workdir)
        begun = durable.Begun(
            run_id=self._policy.run_id,
            fingerprint=self._policy.fingerprint,
            plan=self._plan.digest(),
            total_tokens=run.total_tokens,
            environment=environment,
            first_from=giver,
            parameters_digest=origin.digest_of(found) if found else "",
            fragment_parameters=self._plan.sizes,
        )
        self._tape.append(durable.dated(begun))

    def _begin_with(
        self, state: State, holder: FragmentHolder, before: int | None = None
    ) -> None:
        """Write the first snapshot of a run or a term, whose fragments are on disk at
        this holder."""
        # After the log's snapshot: where a log is, the run has begun.
        after = -1 if before is None else before
        number = durable.next_number(self._workdir / run_files.LOG, after)
        with self._states.beginning():
            self._states.save(number, state)
        self._open_log(number)
        self._log.forget(number)
        self.holder = holder

    def _open_log(self, after: int) -> None:
        folder = self._workdir / run_files.LOG
        self._log = durable.RecordLog(folder, after, self._disk.until_written)
        self._open.callback(self._log.close)

    def _all_lost(self, term: int) -> FragmentHolder:
        """Return a holder that waits for the anchors of all fragments. term: that which
        begins with them."""
        holder = self._make_holder(term)
        asked = RestoreFragments(fragments=self._all_at(NOTHING))
        self._environment = holder.restore(asked).environment
        return holder

    def _make_holder(self, term: int, *, over: bool = False) -> FragmentHolder:
        """Return a holder without arrays, for `restore`. At the end of this life it
        ends a restore that is under way, and breaks the lines to workers."""
        config, plan, workdir = self.config, self._plan, self._workdir
        if config.placement.workers == 1:
            store, everything = make_store(config, plan), range(len(plan.fragments))
            holder = make_holder(
                config, store, self._kept, workdir, self._whose, everything
            )
            self._open.callback(holder.close)  # A start may fail while it restores.
            return holder
        run_id = self._policy.run_id
        workers = WorkersHolder(
            config, workdir, run_id, plan, self._kept, term, over=over
        )
        self._open.callback(workers.end)
        return workers

    def _all_at(self, version: Version) -> tuple[Committed, ...]:
        return tuple(
            Committed(fragment=fragment, version=version, digests={})
            for fragment in range(len(self._plan.fragments))
        )

    def _make_lead(self, state: State) -> None:
        self._sessions = Sessions()
        self._sessions.completed = self.holder.completed
        self.lead = Lead(
            self._policy,
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
            lead=self.lead,
            roster=self._roster,
            metrics=self._metrics,
            holder=self.holder,
            snapshots=self._states.writer,
            disk=self._disk,
            tls=self._tls,
            begun_unix=self._facts.begun_unix,
        )
        self._open.callback(self._announcer.stop)

    def _make_service(self) -> Service:
        config = self.config
        return Service(
            likeness=Likeness(config.run, self._plan),
            lead=self.lead,
            holder=self.holder,
            sessions=self._sessions,
            roster=self._roster,
            metrics=self._metrics,
            kept_cycles=self._kept,
            shown=self._announcer.shown,
            time_budget_s=config.placement.time_budget_s,
            sources=config.run.data.sources,
        )

    # ---- while it decides -----------------------------------------------------------

    def _keep_house(self, lead: Lead) -> None:
        now = time.monotonic()
        if self._announcer.due(now):
            self._announcer.refresh()
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

    # ---- the end --------------------------------------------------------------------

    def _answer(self, phase: str) -> None:
        """Tell those who come after the run's end how far its coordinator is."""
        assert self._server is not None
        status = {**self._announcer.shown(), "phase": phase}
        self._server.hand_over(AfterEndHandlers(self.lead, status))

    def _stop_serving(self) -> None:
        assert self._server is not None
        self._server.stop(self._deadlines.stop_s / 5)

    def _linger(self, seconds: float) -> None:
        """Wait that long, or until the process is asked to end."""
        logger.info("for %g s islands that come are told that it is over", seconds)
        until = time.monotonic() + seconds
        while not self._interrupted and (left := until - time.monotonic()) > 0:
            time.sleep(min(LINGER_POLL_S, left))

    def _save(self, write: Callable[[str, Callable[[], None]], None]) -> bool:
        """Write the last snapshots; before the run is over, what there is time for.
        Return whether all of a run that is over is here."""
        finished, whole = self.lead.finished, False

        def patience_s() -> float:
            if self._interrupted or not finished:
                return self._deadlines.stop_s
            return self.config.placement.outage_budget_s

        def save() -> None:
            nonlocal whole
            self._states.write_last(self.lead.state, self._log)
            within_s = None if finished else self._deadlines.stop_s / 2
            whole = self.holder.save_all(within_s)

        began = time.monotonic()
        if self._states.writer.wait(patience_s) and self.holder.wait(
            lambda: patience_s() - (time.monotonic() - began)
        ):
            write("a snapshot", save)
            return whole
        logger.error(
            "a snapshot has not ended within %g s: none is written at the end, and "
            "the log has everything since the last one%s",
            patience_s(),
            "; start the coordinator again, and it writes it" if finished else "",
        )
        return not finished

    def _sum_up(self) -> None:
        """Write the summary, unless the run was over before and left it."""
        summary.write(
            self._workdir,
            self.config,
            self.lead,
            self._roster,
            begun_unix=self._facts.begun_unix,
            over_unix=self._over,
            digest=self.holder.digest(),
        )
