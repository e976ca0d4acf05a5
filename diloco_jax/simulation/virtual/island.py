"""One incarnation of an island in virtual time.

Everything an island decides is done by the runtime's own parts: `Mailbox`, `Inbound`,
`Boundary` with its `Books`, `Pace`. What is different: steps take the seconds they are
said to take, and connections are `Line`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from diloco_jax.config import RunConfig
from diloco_jax.coordinator.inbox import DeltaKey
from diloco_jax.data.positions import LeasedPositions
from diloco_jax.island.decisions import Ahead, LiveDecisions
from diloco_jax.island.mailbox import Arrival, Mailbox, Status
from diloco_jax.island.pace import Pace
from diloco_jax.protocol.coordinator.events import Goodbye, Hello, Report
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.island.boundary import Boundary
from diloco_jax.protocol.island.conversation import Inbound, Targets
from diloco_jax.protocol.messages import FromCoordinator, Progress, Welcome
from diloco_jax.protocol.reasons import EndReason
from diloco_jax.protocol.values import Phase, Version
from diloco_jax.simulation.virtual.body import Body
from diloco_jax.simulation.virtual.clock import Clock, Due
from diloco_jax.simulation.virtual.connection import Connection, Service
from diloco_jax.simulation.virtual.line import Line
from diloco_jax.simulation.virtual.merging import Fetched


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandSpec:
    """What an island is, over all its incarnations."""

    name: str
    batch_size: int
    step_seconds: Callable[[int], float]
    """Of step k of the incarnation (from 0); asked once for each, as it begins."""
    join_seconds: float = 0.0
    """From its welcome to its first step: compiling, fetching apart."""
    bytes_up: tuple[int, ...] = ()
    """Of an encoded delta, by fragment."""
    lead: int = 0
    """Boundaries that its hosts need to agree on what to do; 0: it has one."""


class VirtualIsland:
    """One incarnation; `connect` begins it. `ended` tells why it stopped, if it did.

    report_s: it says at least this often that it lives.
    """

    def __init__(
        self,
        spec: IslandSpec,
        incarnation: int,
        run: RunConfig,
        clock: Clock,
        body: Body,
        report_s: float,
    ) -> None:
        self.spec, self.incarnation = spec, incarnation
        self.name = spec.name
        self.session = f"{spec.name}.{incarnation}"
        self.steps = 0
        self.ended: str | None = None
        self.line: Line | None = None
        self.peer: Connection | None = None
        """Its last connection, as the coordinator sees it."""
        self.mailbox = Mailbox()
        self.positions = LeasedPositions()
        self.boundary: Boundary | None = None
        """Once it is in."""
        self._phase: Phase = "joining"
        self._term = 0
        self._run, self._clock, self._body = run, clock, body
        self._report_s = report_s
        self._tokens_per_step = spec.batch_size * run.sequence_length
        self._pace = Pace(run, self._tokens_per_step)
        self._inbound = Inbound(
            self.mailbox,
            Targets(want=self._want, resend=self._resend),
        )
        self._decisions = LiveDecisions(self.mailbox, lambda: False)
        self._ahead = Ahead(spec.lead)
        self._coordinator: Service | None = None
        self._wanted: dict[int, Version] = {}
        self._have: dict[int, Version] = {}
        self._fetching: set[int] = set()
        self._joined: dict[int, Fetched] = {}
        self._arrivals: list[Arrival] = []
        """Fetched, and waiting for room in the mailbox."""
        self._outgoing: dict[tuple[int, int], Any] = {}
        self._sent_through = 0
        self._said: tuple[Phase, int] | None = None
        self._said_at = clock.now
        self._last_step_seconds = 0.0
        self._stepping = False
        self._next: Due | None = None
        """The beginning or the end of a step."""
        clock.after(report_s, self._beat)

    # ---- its life ---------------------------------------------------------------

    def connect(self, coordinator: Service, line: Line) -> None:
        """Says hello on a new connection, for the first time or again."""
        self._coordinator, self.line = coordinator, line
        self._sent_through = 0
        self._fetching = set()
        run, status = self._run, self.mailbox.status()
        hello = Hello(
            island=self.name,
            incarnation=self.incarnation,
            session=self.session,
            run_id=coordinator.config.run_id,
            fingerprint=coordinator.config.fingerprint,
            tokens_per_step=self.spec.batch_size * run.sequence_length,
            sequences_per_step=self.spec.batch_size,
            steps=self.steps,
            step_seconds=self._last_step_seconds,
            phase=self._phase,
            outstanding=status.outstanding,
            sequences_granted=self._inbound.granted,
            records_through=status.records_through,
            term=self._term,
            lead=self.spec.lead,
        )
        self.peer = peer = Connection(self, line, status)
        line.send_up(lambda: coordinator.hello(hello, peer))

    def disconnect(self) -> None:
        """Its connection is gone; it trains on."""
        if self.line is not None:
            self.line.cut()
        self.line = None

    def die(self, reason: str = "died") -> None:
        """It ends, and says nothing."""
        self.ended = self.ended or reason
        self.disconnect()
        if self._next is not None:
            self._next.cancel()

    def notice(self, seconds: float) -> None:
        """It is about to be taken away: it leaves once it is let go, or then."""

        def leave() -> None:
            if self.ended is None:
                self.leave("preempted")

        self.mailbox.leave()
        self._clock.after(seconds, leave)
        if not self._stepping:
            self._at_boundary()

    def leave(self, reason: EndReason) -> None:
        """It reports, says goodbye, and ends."""
        line, coordinator = self.line, self._coordinator
        self._report()
        if line is not None and coordinator is not None:
            goodbye = Goodbye(
                island=self.name, session=self.session, reason=reason, said=reason
            )
            line.send_up(lambda: coordinator.step(goodbye))
        self.ended = reason
        if self._next is not None:
            self._next.cancel()

    # ---- its end of the connection ----------------------------------------------

    def turned_away(self, reason: str) -> None:
        """It is not let in, or put out."""
        self.die(reason)

    def received(self, message: FromCoordinator) -> None:
        """A message of the coordinator is here."""
        if self.ended is not None:
            return
        if isinstance(message, Welcome):
            if 0 < self._term < message.term:
                self.mailbox.new_term(message.term)
            self._term = max(self._term, message.term)
            if self._phase == "joining":
                self._phase = "compiling"
                self._clock.after(self.spec.join_seconds, self._compiled)
                self._post()
            for fragment, version in enumerate(message.versions):
                self._want(fragment, version)
            self._report(alive=True)
            return
        self._inbound.dispatch(message)
        if self.mailbox.leaving and self.mailbox.wait_to_leave(0.0):
            self.leave("preempted")
            return
        if self._next is not None and isinstance(message, Progress):
            return  # As in a real loop, it is looked at with the next boundary.
        if not self._stepping:
            self._at_boundary()

    def _want(self, fragment: int, version: Version) -> None:
        wanted = self._wanted.get(fragment, version)
        self._wanted[fragment] = max(wanted, version)
        self._fetch(fragment)

    def _fetch(self, fragment: int) -> None:
        # A join takes every fragment in full.
        have = self._have.get(fragment) if self.boundary is not None else None
        line, coordinator = self.line, self._coordinator
        behind = have is None or have < self._wanted[fragment]
        if not behind or fragment in self._fetching or line is None:
            return
        assert coordinator is not None
        if not coordinator.serves:
            return
        self._fetching.add(fragment)
        fetched = coordinator.fetch(fragment, have)
        line.download(fetched.nbytes, lambda: self._fetched(fragment, fetched))

    def _fetched(self, fragment: int, fetched: Fetched) -> None:
        if self.ended is not None:
            return
        if self.boundary is None:
            self._fetching.discard(fragment)
            self._joined[fragment] = fetched
            self._begin_if_ready()
            return
        self._have[fragment] = fetched.version
        self._arrivals.append(self._body.arrival(fragment, fetched))
        self._deliver()
        if not self._stepping:
            self._at_boundary()

    def _deliver(self) -> None:
        """Hands over what there is room for, and fetches what came after it."""
        if not self._arrivals:
            return
        waiting, self._arrivals = self._arrivals, []
        for arrival in waiting:
            if self.mailbox.deliver(arrival, 0.0):
                self._fetching.discard(arrival.fragment)
                self._fetch(arrival.fragment)
            else:
                self._arrivals.append(arrival)

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        """See boundary.Outgoing."""
        self._outgoing[fragment, tick] = encoded
        self._resend(fragment, tick)

    def forget(self, fragment: int, tick: int) -> None:
        """See boundary.Outgoing."""
        self._outgoing.pop((fragment, tick), None)

    def send_anchor(self, fragment: int) -> None:
        """To a coordinator that lost its state; here none does."""
        raise AssertionError(f"{self.name} is asked for the anchor of {fragment}")

    def _resend(self, fragment: int, tick: int) -> None:
        if (fragment, tick) not in self._outgoing or self.line is None:
            return
        coordinator = self._coordinator
        assert coordinator is not None
        key = DeltaKey(self.name, self.incarnation, fragment, tick)
        encoded = self._outgoing[fragment, tick]
        nbytes = self.spec.bytes_up[fragment] if self.spec.bytes_up else 0
        self.line.upload(nbytes, lambda: coordinator.arrived(key, encoded))

    # ---- its loop ---------------------------------------------------------------

    def _compiled(self) -> None:
        if self.ended is None:
            self._phase = "training"
            self._begin_if_ready()

    def _begin_if_ready(self) -> None:
        """The join is done once it has compiled and has every fragment."""
        fragments = len(self._wanted)
        if self._phase != "training" or not fragments or self.boundary is not None:
            return
        if len(self._joined) < fragments or self._fetching:
            return
        self._body.begin(self._joined)
        versions = [self._joined[f].version for f in range(fragments)]
        self._have = {f: fetched.version for f, fetched in self._joined.items()}
        self._joined = {}
        rule = self._run.sync.adopt
        books = Books(versions, rule)
        books.begin()
        self.boundary = Boundary(books, self._body, self.positions, self, rule)
        self._at_boundary()
        for fragment in range(fragments):
            self._fetch(fragment)

    def _at_boundary(self) -> None:
        if self.boundary is None or self.ended is not None:
            return
        decided = self._decisions.at(self.steps, stepping=self._phase == "training")
        inbox = self._ahead.next(decided)
        self.boundary.act(inbox, self.steps)
        # As in a real loop, by what it knows now.
        done = self._pace.share_done(self.steps, self.boundary.others_tokens)
        stepping = not inbox.stop and done < 1
        self._phase = "training" if stepping else "stopped"
        for fragment in inbox.anchors:
            self.send_anchor(fragment)
        self._deliver()
        self._post()
        self._report()
        if inbox.finished:
            self.ended = "finished"
        elif not stepping and self._ahead.pending:
            self._clock.last(self._at_boundary)
        elif stepping and self._next is None:
            # What arrives at the moment of a boundary still counts for it.
            self._next = self._clock.last(self._step)

    def _step(self) -> None:
        self._next = None
        if self._phase == "stopped":
            return
        positions = self.positions.draw(self.spec.batch_size)
        if positions is None:
            if self._ahead.pending:
                self._clock.last(self._at_boundary)
            return
        assert self.boundary is not None
        others = self.boundary.others_tokens
        self._body.train(positions, self._pace.learning_rate(self.steps, others))
        seconds = self.spec.step_seconds(self.steps)
        self._last_step_seconds = seconds
        self._stepping = True
        self._next = self._clock.after(seconds, self._stepped)

    def _stepped(self) -> None:
        self._stepping, self._next = False, None
        self.steps += 1
        self._at_boundary()

    # ---- reports ----------------------------------------------------------------

    def _post(self) -> None:
        if self.boundary is None:
            self.mailbox.post(Status(phase=self._phase))
            return
        books = self.boundary.books
        status = Status(
            phase=self._phase,
            steps=self.steps,
            outstanding=books.outstanding(),
            versions=tuple(books.versions()),
        )
        self.mailbox.post(status, books.drain())

    def _report(self, *, alive: bool = False) -> None:
        """Says what is new; `alive`: even if nothing is."""
        line, coordinator = self.line, self._coordinator
        if self.ended is not None or line is None or coordinator is None:
            return
        status, records = self.mailbox.report(self._sent_through)
        if not records and (status.phase, status.steps) == self._said and not alive:
            return
        if records:
            self._sent_through = records[-1].seq
        self._said, self._said_at = (status.phase, status.steps), self._clock.now
        report = Report(
            island=self.name,
            session=self.session,
            phase=status.phase,
            steps=status.steps,
            step_seconds=self._last_step_seconds,
            records=records,
        )
        line.send_up(lambda: coordinator.step(report))

    def _beat(self) -> None:
        """Rings less often than it could: it is set anew only when it has rung."""
        if self.ended is not None:
            return
        due = self._said_at + self._report_s
        if self._clock.now >= due:
            self._report(alive=True)
            due = self._clock.now + self._report_s
        self._clock.at(due, self._beat)
