"""The coordinator's one thread of decisions: events in, policy, effects out.

Everything that changes the run goes through the queue of this thread, so the policy
needs no lock. Merges are computed on a thread of their own and come back as events;
snapshots are written on another. A `Persist` is on disk before the effect after it is
carried out.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from diloco_jax.coordinator import notes, outbox
from diloco_jax.coordinator.durable import RecordLog
from diloco_jax.coordinator.inbox import DeltaKey, Inbox, left_behind
from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.coordinator.store import Merged, Store
from diloco_jax.faults import Faults
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape
from diloco_jax.policy import policy, records
from diloco_jax.policy.events import (
    Alert,
    AskResend,
    AskTake,
    DropDelta,
    Effect,
    Event,
    Finish,
    Grant,
    LetGo,
    Merge,
    MergeComputed,
    Note,
    Persist,
    Progress,
    Publish,
    Refuse,
    StopStepping,
    TellVerdict,
    Timer,
    Welcome,
)
from diloco_jax.policy.state import PolicyConfig, State
from diloco_jax.wire import messages
from diloco_jax.wire.errors import Refused

logger = logging.getLogger(__name__)

EVENTS_WAITING = 10_000
"""Events that may wait; beyond it, those who post wait too."""
LONGEST_WAIT_S = 0.5
"""The thread looks at its housekeeping at least this often."""
ALERTS_KEPT = 20

Before = Callable[[], None]


class Engine:
    """Runs the policy. Make it, `run` it on one thread, `post` from any."""

    def __init__(
        self,
        config: PolicyConfig,
        state: State,
        *,
        store: Store,
        inbox: Inbox,
        log: RecordLog,
        tape: Tape,
        metrics: Metrics,
        sessions: Sessions,
        faults: Faults,
        housekeeping: Callable[[Engine], None],
    ) -> None:
        """`housekeeping` is called on the engine's thread at least twice a second."""
        self.config = config
        self.state = state
        self.alerts: list[str] = []
        self.finished = state.phase == "done"
        self._store, self._inbox = store, inbox
        self._log, self._tape, self._metrics = log, tape, metrics
        self._sessions, self._faults = sessions, faults
        self._housekeeping = housekeeping
        self._queue: queue.Queue[tuple[Event | None, Before | None, float]] = (
            queue.Queue(EVENTS_WAITING)
        )
        self._now = time.monotonic()
        """Of the last step of the policy."""
        self._merger = ThreadPoolExecutor(1, "diloco-merge")
        self._computed: dict[int, Merged] = {}
        self._merges = sum(fragment.merges for fragment in state.fragments)
        self._stopping = False
        self._failure: BaseException | None = None

    def post(self, event: Event | None, before: Before | None = None) -> None:
        """Queues an event of now; `before` is called on the engine's thread just
        ahead."""
        self._queue.put((event, before, time.monotonic()))

    def stop(self) -> None:
        """Ends `run` after what is queued. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Until the run is over and every island has left, or `stop`.

        Raises what went wrong in a merge or while carrying out an effect: the process
        must end then, and start again from what is durable.
        """
        compiling = self._merger.submit(self._store.warm_up, lambda: self._stopping)
        compiling.add_done_callback(self._compiled)
        try:
            while not self._stopping:
                self._turn()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._merger.shutdown(wait=True, cancel_futures=True)

    def note(self, record: notes.Note | records.Durable | records.Noted) -> None:
        """Writes to the tape; on the engine's thread only."""
        self._tape.append(notes.dated(record))

    def _turn(self) -> None:
        due = policy.next_deadline(self.state, self._now)
        wait = LONGEST_WAIT_S
        if due is not None:
            wait = min(wait, due - time.monotonic())
        event: Event | None = None
        before: Before | None = None
        try:
            event, before, at = self._queue.get(timeout=max(wait, 0.0))
        except queue.Empty:
            event, at = Timer(), time.monotonic()
        if before is not None:
            before()
        if event is not None:
            self._step(event, at)
        self._housekeeping(self)

    def _step(self, event: Event, at: float) -> None:
        """The policy sees an event at the time at which it came: what waited here while
        this thread was held up (by a disk, or with the whole machine) is not late."""
        self._now = max(self._now, at)
        self.state, effects = policy.step(self.config, self.state, event, self._now)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        send = self._sessions.send
        match effect:
            case Persist(record=record):
                self._persist(record)
            case Note(record=record):
                self.note(record)
            case Merge():
                self._start_merge(effect)
            case Publish():
                self._publish(effect)
            case Welcome():
                self._sessions.welcomed(effect.island, effect.session)
                welcome = messages.Welcome(
                    run_id=self.config.run_id,
                    term=self.state.fragments[0].version.term,
                    resumed=effect.resumed,
                    versions=effect.versions,
                )
                send(effect.island, welcome)
            case Refuse():
                logger.info(
                    "island %s refused (%s): %s",
                    effect.island,
                    effect.code,
                    effect.message,
                )
                self.note(
                    notes.TurnedAway(
                        island=effect.island, code=effect.code, message=effect.message
                    )
                )
                refused = Refused(effect.code, effect.message)
                self._sessions.refuse(effect.island, effect.session, refused)
            case (
                AskTake()
                | AskResend()
                | TellVerdict()
                | Grant()
                | Progress()
                | StopStepping()
                | LetGo()
            ):
                send(effect.island, outbox.message(effect))
            case DropDelta():
                key = DeltaKey(
                    effect.island, effect.incarnation, effect.fragment, effect.tick
                )
                self._inbox.drop(key)
            case Alert(text=text):
                logger.warning("%s", text)
                self.alerts = [*self.alerts, text][-ALERTS_KEPT:]
                self.note(notes.Alert(text=text))
            case Finish():
                for island in self._sessions.connected():
                    send(island, messages.Finished())
                self.finished = True

    def _persist(self, record: records.Durable) -> None:
        payload = b""
        if isinstance(record, records.Merged):
            payload = self._computed[record.fragment].payload
        self._log.append(records.line(record), payload)
        self.note(record)
        if isinstance(record, records.Joined):
            self._inbox.drop_island(
                record.island, record.incarnation, left_behind(self.state)
            )
        if isinstance(record, records.Merged):
            self._merges += 1
            self._faults.fire(self._merges)

    def _start_merge(self, effect: Merge) -> None:
        payloads = [
            self._inbox.payload(
                DeltaKey(c.island, c.incarnation, effect.fragment, c.tick)
            )
            for c in effect.contributions
        ]
        future = self._merger.submit(
            self._store.merge,
            effect.fragment,
            effect.version,
            effect.contributions,
            payloads,
            share=effect.share,
            final=effect.final,
        )
        started = time.monotonic()

        def done(future: Future[Merged]) -> None:
            if not self._check(future):
                return
            merged = future.result()
            event = MergeComputed(
                fragment=effect.fragment, version=effect.version, digest=merged.digest
            )

            def keep() -> None:
                self._computed[effect.fragment] = merged
                for c in effect.contributions:
                    key = DeltaKey(c.island, c.incarnation, effect.fragment, c.tick)
                    self._inbox.drop(key)
                self._metrics.append(
                    {
                        "kind": "merge",
                        "time": time.time(),
                        "fragment": effect.fragment,
                        "version": effect.version.number,
                        "islands": [c.island for c in effect.contributions],
                        "tokens": sum(c.tokens for c in effect.contributions),
                        "share": effect.share,
                        "norm": merged.norm,
                        **merged.measures._asdict(),
                        "seconds": time.monotonic() - started,
                    }
                )

            self.post(event, keep)

        future.add_done_callback(done)

    def _compiled(self, future: Future[None]) -> None:
        if self._check(future):
            self.post(None, lambda: self.note(notes.Compiled()))

    def _check(self, future: Future[Any]) -> bool:
        """Whether work on the merge thread succeeded; a failure ends `run`."""
        if future.cancelled():
            return False
        if (failure := future.exception()) is None:
            return True
        self._failure = failure
        self.post(None)
        return False

    def _publish(self, effect: Publish) -> None:
        merged = self._computed.pop(effect.fragment)
        self._store.commit(effect.fragment, merged)
        self.note(
            notes.Measured(
                fragment=effect.fragment,
                version=merged.version,
                **merged.measures._asdict(),
            )
        )
        for island in self._sessions.connected():
            self._sessions.send(island, outbox.published(effect, island))
