"""The primary's side: it holds the mandate, has a standby follow, and says what may be
seen."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.mandates.opening import open_store
from diloco_jax.coordinator.mandates.store import MandateStore
from diloco_jax.coordinator.sleeping import clock
from diloco_jax.coordinator.standby.broken_disk import is_of_broken_disk
from diloco_jax.coordinator.standby.feed import StandbyFeed
from diloco_jax.coordinator.standby.machine_thread import MachineThread, timing_of
from diloco_jax.coordinator.standby.name import adopt, copied_from, node_of
from diloco_jax.coordinator.standby.outflow import Outflow
from diloco_jax.coordinator.standby.unseated import Unseated
from diloco_jax.coordinator.state_snapshots import StateSnapshots
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.supervised import Heard
from diloco_jax.files import StorageAway
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator.events import Alert
from diloco_jax.protocol.standby import primary
from diloco_jax.protocol.standby.events import (
    Accept,
    DiskBroken,
    Dismiss,
    Lapse,
    PrimaryEffect,
    RecordWritten,
    Reign,
    Release,
    RunFinished,
    StandbyAnswered,
    StandbyAttached,
    StandbyLost,
    StateGathered,
    StateLoaded,
    StepDown,
)
from diloco_jax.protocol.standby.machines import FOLLOWED
from diloco_jax.protocol.standby.primary_state import Primary
from diloco_jax.wire import follow
from diloco_jax.wire.errors import Busy, Refused
from diloco_jax.workdir import RunFacts, make_workdir

logger = logging.getLogger(__name__)

ALERTS_WAITING = 20
LAPSED = (
    "the mandate ran out: its object did not answer (see the log), so the standby may "
    "lead, and islands look for it"
)
POLL_S = 0.2
"""Pause between two looks at how long to wait: a handler of signals notifies nobody."""
MANDATE = "mandate"
"""Code of a coordinator that does not lead."""
LED_ELSEWHERE = "led elsewhere"
"""Code of one that may follow whoever leads, as its standby."""


def taken(
    config: Config,
    workdir: Path,
    facts: RunFacts,
    gathers: str,
    opened: contextlib.ExitStack,
) -> Unseated:
    """Return the seat of a coordinator that leads this run, which then holds the
    mandate, if the config has one. facts: without a run id if the workdir has no run.
    gathers: see `main.Coordinator`. opened: closes the seat.

    Raises ConfigError, Refused if another node leads, and StorageAway if the object of
    the mandate does not answer.
    """
    placement = config.placement
    if not placement.mandate:
        return Unseated()
    if not (facts.run_id or gathers):
        raise ConfigError(
            f"{workdir} holds no run (there is no run.json), and "
            f"placement.mandate = {placement.mandate!r} may be another node's: start "
            f"this coordinator with --standby-of, which takes over if nobody leads, or "
            f"give --init for a new run"
        )
    make_workdir(workdir)
    seat = Seat(config, workdir)
    try:
        seat.take(facts.run_id or gathers, gathers=bool(gathers))
    except BaseException:
        seat.close()
        raise
    opened.callback(seat.close)
    return seat


class Seat(Unseated):
    """One life of a primary. Make, `take`, `serve`, `close`."""

    def __init__(
        self, config: Config, workdir: Path, store: MandateStore | None = None
    ) -> None:
        """store: the object, if not that of placement.mandate."""
        placement = config.placement
        self.node, self.followable = node_of(workdir), self
        self._workdir = workdir
        self._store = store or open_store(placement.mandate)
        self._timing = timing_of(placement.deadlines)
        self._fingerprint = config.run.fingerprint()
        self._stop_s = placement.deadlines.stop_s
        self.outflow = Outflow(
            workdir,
            placement,
            self._timing.patience_s / 4,
            lambda why: self._machine.give(StandbyLost()),
        )
        self.outflow.on_written = lambda number: self._machine.give(
            RecordWritten(number=number)
        )
        self._lock = threading.Lock()
        self._asking: StandbyFeed | None = None
        """The stream of the standby that asks to follow or follows."""
        self._roster, self._roster_due = workdir / run_files.ROSTER, 0.0
        self._alerts: collections.deque[str] = collections.deque(maxlen=ALERTS_WAITING)
        self._accepted: collections.deque[StandbyFeed] = collections.deque()
        """Those whose copy the lead's thread has to list."""
        self._lapsed = False
        self._nudge: Callable[[], None] = lambda: None
        self.reason = ""
        """Why this node does not lead; empty while it may."""
        self._code = MANDATE
        self._run_id = ""

    def take(self, run_id: str, *, gathers: bool = False) -> None:
        """Hold the mandate for this run; wait until it is held.

        gathers: the workdir has no state that counts, by the mandate's own word.

        Raises Refused if another node leads, StorageAway if the object does not answer,
        and ConfigError if this node has to gather.
        """
        self._run_id = run_id
        self._machine: MachineThread[Primary] = MachineThread(
            primary.step,
            primary.next_deadline,
            primary.seek(
                self._timing,
                self.node,
                run_id,
                uuid.uuid4().hex[:8],
                self._copied(),
                rendezvous.last_reign(self._workdir),
            ),
            self._store,
            self._timing,
            self._act,
        )
        self._machine.start()
        within_s = self._timing.valid_s
        if not self._machine.wait_for(lambda s: s.phase != "seeking", within_s):
            raise StorageAway(
                f"the object of placement.mandate did not answer within {within_s:g} s "
                f"(see the log): nobody may lead without it; make it reachable"
            )
        if self.reason:
            raise Refused(self._code, self.reason)
        if self._machine.state.gathers != gathers:
            raise ConfigError(
                f"node {self.node} took the mandate without a state that counts, and "
                f"has to ask the islands for it; start it with --standby-of, which "
                f"does that"
            )
        try:
            adopt(self._workdir, self.node)
        except OSError as error:  # If the disk is broken, the next write says so.
            logger.warning("the workdir's place is not noted: %s", error)
        logger.info("node %s leads, reign %d", self.node, self._machine.state.reign)

    def judge(self, error: BaseException) -> None:
        """See `Unseated`."""
        if not is_of_broken_disk(error):
            return
        self._machine.give(DiskBroken())
        if self._machine.state.cedes:
            logger.error("the mandate is ceded to the standby: %s", error)
            over = self._timing.valid_s
            self._machine.wait_for(lambda s: s.phase == "over", over)

    def _copied(self) -> str:
        """Explain that the workdir is a copy; empty if it is not."""
        if not (origin := copied_from(self._workdir)):
            return ""
        return (
            f"node {self.node}, whose workdir is {origin}, holds the mandate, and this "
            f"workdir is a copy of that one: two nodes of one name could lead. If the "
            f"workdir has moved here, and no coordinator runs there, write {self.node} "
            f"alone into the file {run_files.NODE} of the workdir. Else start this "
            f"coordinator with --standby-of and a new workdir"
        )

    def serve(self, nudge: Callable[[], None]) -> None:
        """See `Unseated`."""
        self._nudge = nudge
        self._machine.give(StateLoaded())

    def watch(
        self,
        log: RecordLog,
        tape: Tape,
        states: StateSnapshots,
    ) -> None:
        """See `Unseated`."""
        out = self.outflow
        log.appended = functools.partial(out.appended, sync=True)
        tape.appended = functools.partial(out.appended, sync=False)
        tape.put_aside = out.put_aside
        states.written = lambda path: out.snapshot(Path(path))

    def watch_fragments(
        self, publishes: Publishes, snapshots: FragmentSnapshots
    ) -> None:
        """See `Unseated`."""
        publishes.written = self.outflow.published
        snapshots.written = lambda path: self.outflow.snapshot(Path(path))

    def heard(
        self, message: Heard, then: Callable[[], None], waits: Callable[[], None]
    ) -> None:
        """See `Unseated`."""
        self.outflow.heard(message, then, waits)

    def turn(
        self, alert: Callable[[str], None], end_sessions: Callable[[str], None]
    ) -> None:
        """See `Unseated`."""
        if self.reason:
            raise Refused(self._code, self.reason)
        if self._lapsed:
            self._lapsed = False
            alert(LAPSED)
            end_sessions(LAPSED)
        while self._alerts:
            alert(self._alerts.popleft())
        while self._accepted:
            self.outflow.begin(self._accepted.popleft())
        if clock() >= self._roster_due:
            self._roster_due = clock() + self._timing.renew_s
            self.outflow.snapshot(self._roster)

    @property
    def reign(self) -> int:
        """See `Unseated`."""
        return self._machine.state.reign

    @property
    def written(self) -> int:
        """See `Unseated`."""
        return self.outflow.number

    def may_show(self, number: int) -> bool:
        """See `Unseated`."""
        return primary.may_show(self._machine.state, number, clock())

    def begun(self) -> None:
        """See `Unseated`."""
        self._machine.give(StateGathered())

    def ended(self) -> None:
        """See `Unseated`."""
        self._machine.give(RunFinished())

    def finish(self, patience_s: Callable[[], float]) -> bool:
        """See `Unseated`."""

        def told(state: Primary) -> bool:
            return state.phase == "over" or (state.told_over and state.request is None)

        began = clock()
        while not self._machine.wait_for(told, POLL_S):
            if (waited := clock() - began) >= patience_s():
                logger.error(
                    "the run is over, and the mandate has not said so for %.0f s, "
                    "since its object does not answer: a standby still waits to take "
                    "over. Once the object answers, start this coordinator again, and "
                    "it says so",
                    waited,
                )
                return False
        return True

    def close(self) -> None:
        """See `Unseated`."""
        with self._lock:
            asking, self._asking = self._asking, None
        if asking is not None:
            self.outflow.end(asking, Busy("the primary ends"))
        if hasattr(self, "_machine"):
            self._machine.close(self._stop_s / 10)

    def shown(self) -> dict[str, Any]:
        """See `Unseated`."""
        state = self._machine.state
        follows = state.phase in FOLLOWED
        mandate = {
            "node": self.node,
            "reign": state.reign,
            "valid_seconds": max(0.0, round(state.valid_until - clock(), 1)),
            "standby": state.standby if follows else "",
            "state": state.phase,
            "lag": state.written - state.answered if follows else 0,
        }
        return {"mandate": mandate}

    # ---- the standby's stream, on the wire's threads --------------------------------

    @contextlib.contextmanager
    def followed(self, request: follow.FollowRequest) -> Iterator[StandbyFeed]:
        """Let a standby follow for the length of the block, which sends the messages.

        May raise Refused or Busy.
        """
        if request.fingerprint != self._fingerprint:
            raise Refused(
                "config",
                f"the standby's config has fingerprint {request.fingerprint}, this "
                f"run's is {self._fingerprint}; start it with the run's config.json",
            )
        outgoing = self.outflow.prepare(self._run_id, request.sealed)
        with self._lock:
            if self._asking is not None:
                raise Busy("another standby follows; come again")
            self._asking = outgoing
        try:
            self._machine.give(StandbyAttached(node=request.node))
            yield outgoing
        finally:
            with self._lock:
                if still := self._asking is outgoing:
                    self._asking = None
            self.outflow.end(outgoing)
            outgoing.close()
            if still:
                self._machine.give(StandbyLost())

    def answered(self, outgoing: StandbyFeed, number: int) -> None:
        """Take the answer of the standby that has this stream."""
        answer = StandbyAnswered(number=number)
        self._machine.give(answer, lambda: self._asking is outgoing)

    # ---- effects, under the machine's lock ------------------------------------------

    def _act(self, effect: PrimaryEffect) -> None:
        match effect:
            case Release():
                self._nudge()
            case Accept(node=node):
                logger.info("node %s follows as the standby", node)
                if (outgoing := self._asking) is not None:
                    self._accepted.append(outgoing)
                    self._nudge()
            case Dismiss(reason=reason):
                # At once: its stream may take a while to end.
                with self._lock:
                    parted, self._asking = self._asking, None
                if parted is not None:
                    self.outflow.end(parted, Busy(reason))
            case Alert(text=text):
                self._alerts.append(text)
                self._nudge()
            case Lapse():
                self._lapsed = True
                self._nudge()
            case StepDown(reason=reason, follows=follows):
                self._code = LED_ELSEWHERE if follows else MANDATE
                self.reason = reason
                self._nudge()
            case Reign():
                pass  # `take` waits for it.
