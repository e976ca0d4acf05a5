"""One incarnation of an island in virtual time: a shell around the island's half.

The protocol makes every decision of an island, as in the product: the meaning of
messages, the next fetch, the acts of a boundary, when to report and to stop. Two things
differ: steps take the seconds that the spec gives, and connections are `Line`s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from diloco_jax.config import RunConfig
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.data.batches import LeasedPositions
from diloco_jax.island.pace import Pace, goal_of
from diloco_jax.observability.logs import log_refused
from diloco_jax.protocol.coordinator.events import Said
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.island.boundary import Ahead, Boundary
from diloco_jax.protocol.island.conversation import Conversation, Wanted
from diloco_jax.protocol.island.reporting import Introduction, Status, hello
from diloco_jax.protocol.messages import (
    AnchorRequest,
    FromCoordinator,
    Goodbye,
    Measures,
    Progress,
    Report,
    ResendRequest,
    Welcome,
)
from diloco_jax.protocol.values import DeltaKey, EndReason
from diloco_jax.simulation.virtual.body import Body
from diloco_jax.simulation.virtual.clock import Clock, Due
from diloco_jax.simulation.virtual.connection import Connection, VirtualService
from diloco_jax.simulation.virtual.fetches import VirtualFetches
from diloco_jax.simulation.virtual.line import Line
from diloco_jax.simulation.virtual.reports import Reports


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandSpec:
    """Properties of an island in all its incarnations."""

    name: str
    batch_size: int
    step_seconds: Callable[[int], float]
    """Function from step k of the incarnation, from 0, to its seconds; called once."""
    join_seconds: float = 0.0
    """Seconds from its welcome to its first step: compilation, without fetches."""
    bytes_up: tuple[int, ...] = ()
    """Bytes of an encoded delta, by fragment."""
    lead: int = 0
    """Boundaries that its hosts need to agree on a decision; 0: it has one host."""


class VirtualIsland:
    """One incarnation; `connect` begins it. `ended` holds the reason once it stopped.

    report_s: longest time in seconds between two reports.
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
        """Last connection of the island, as the coordinator sees it."""
        self.positions = LeasedPositions()
        self.boundary: Boundary | None = None
        """Boundary of the island; None until it has joined."""
        self._run, self._clock, self._body = run, clock, body
        self._goal = goal_of(run, spec.batch_size)
        self._pace = Pace(run, self._goal)
        self._conversation = conversation = Conversation()
        self._fetches = VirtualFetches(conversation, body, self._came)
        self._reports = Reports(conversation, clock, report_s, self._say)
        self._ahead = Ahead(spec.lead)
        self._coordinator: VirtualService | None = None
        self._compiled = False
        self._outgoing: dict[tuple[int, int], Any] = {}
        self.boast = 1.0
        """Step time that it says it has, as a share of its own."""
        self.boasted_rates = 1.0
        """Learning rates that it says it has, as a multiple of its own."""
        self._measures = Measures()
        self._stepping = False
        self._next: Due | None = None
        """Start or end of a step that is due."""

    # ---- its life ---------------------------------------------------------------

    def connect(self, coordinator: VirtualService, line: Line) -> None:
        """Say hello on a new connection, for the first time or again."""
        self._coordinator, self.line = coordinator, line
        self._fetches.connect(coordinator, line)
        who = Introduction(
            island=self.name,
            incarnation=self.incarnation,
            session=self.session,
            fingerprint=coordinator.config.fingerprint,
            tokens_per_step=self._goal.tokens_per_step,
            sequences_per_step=self.spec.batch_size,
            lead=self.spec.lead,
        )
        said = hello(who, self._conversation.status())
        self.peer = peer = Connection(self, line, said)
        line.send_up(functools.partial(coordinator.hello, said, peer))

    def disconnect(self) -> None:
        """Lose the connection and train on."""
        if self.line is not None:
            self.line.cut()
        self.line = None
        self._reports.disconnected()

    def die(self, reason: str = "died") -> None:
        """End without a word."""
        self.disconnect()
        self._end(reason)

    def notice(self, seconds: float) -> None:
        """Announce that the island will be taken away after `seconds` at most.

        It leaves when the coordinator lets it go, or when the time is over.
        """

        def leave() -> None:
            if self.ended is None:
                self.leave("preempted")

        self._conversation.leave()
        self._clock.after(seconds, leave)
        if not self._stepping:
            self._at_boundary()

    def leave(self, reason: EndReason) -> None:
        """Report, say goodbye, and end."""
        self._reports.send()
        self._say(Goodbye(reason=reason, text=reason))
        self._end(reason)

    def _end(self, why: str) -> None:
        self.ended = self.ended or why
        self._reports.disconnected()
        self._fetches.close()
        if self._next is not None:
            self._next.cancel()

    # ---- its end of the connection ----------------------------------------------

    def turned_away(self, reason: str) -> None:
        """End, because the coordinator refused the island or put it out."""
        self.die(reason)

    def postponed(self, connection: Connection) -> None:
        """Lose a connection that the coordinator ended; here no coordinator does."""
        raise AssertionError(f"{self.name} is to come again")

    def received(self, message: FromCoordinator) -> None:
        """Handle a message of the coordinator."""
        if self.ended is not None:
            return
        if isinstance(message, Welcome):
            self._welcomed(message)
        for errand in self._conversation.receive(message):
            match errand:
                case Wanted(fragment, version):
                    self._fetches.want(fragment, version)
                case ResendRequest(fragment=fragment, tick=tick):
                    self._send(fragment, tick)
        self._fetches.fetch()
        if self._conversation.may_leave:
            self.leave("preempted")
        elif isinstance(message, Progress) and self._next is not None:
            pass  # As in a real loop, the next boundary looks at it.
        elif self._stepping:
            self._reports.look()
        else:
            self._at_boundary()

    def _welcomed(self, welcome: Welcome) -> None:
        self._reports.welcomed()
        if welcome.versions and not self._fetches.begun:
            self._fetches.begin(welcome.versions)
            self._conversation.post(Status(phase="compiling"))
            self._clock.after(self.spec.join_seconds, self._has_compiled)

    def _came(self) -> None:
        if self.boundary is None:
            self._begin_if_ready()
        elif not self._stepping:
            self._at_boundary()

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        self._outgoing[fragment, tick] = encoded
        self._send(fragment, tick)

    def forget(self, fragment: int, tick: int) -> None:
        self._outgoing.pop((fragment, tick), None)

    def send_anchor(self, asked: AnchorRequest) -> None:
        """Send the anchor to a coordinator that lost its state, or a fragment; here no
        coordinator does.
        """
        raise AssertionError(f"{self.name} is asked: {asked}")

    def _send(self, fragment: int, tick: int) -> None:
        if (fragment, tick) not in self._outgoing or self.line is None:
            return
        coordinator = self._coordinator
        assert coordinator is not None
        key = DeltaKey(self.name, self.incarnation, fragment, tick)
        encoded = self._outgoing[fragment, tick]
        nbytes = self.spec.bytes_up[fragment] if self.spec.bytes_up else 0
        self.line.upload(nbytes, functools.partial(coordinator.arrived, key, encoded))

    # ---- its loop ---------------------------------------------------------------

    def _has_compiled(self) -> None:
        self._compiled = True
        self._begin_if_ready()

    def _begin_if_ready(self) -> None:
        """Begin to step once the island has compiled and has every fragment."""
        joined = self._fetches.joined
        if joined is None or not self._compiled or self.ended is not None:
            return
        self._body.begin(joined)
        versions = [joined[fragment].version for fragment in range(len(joined))]
        books = Books(versions, ADOPT_RULES.find(self._run.sync.adopt))
        books.begin()
        self.boundary = Boundary(
            books,
            self._goal,
            arrays=self._body,
            incoming=self._fetches.arrivals,
            outgoing=self,
            data=self.positions,
        )
        self._at_boundary()
        self._fetches.start()

    def _at_boundary(self) -> None:
        boundary = self.boundary
        if boundary is None or self.ended is not None:
            self._reports.look()
            return
        decision = self._ahead.next(self._conversation.decide())
        log_refused(boundary.act(decision, self.steps))
        for asked in decision.anchors:
            self.send_anchor(asked)
        self._fetches.deliver()
        status = boundary.status(self.steps, self._measures)
        self._conversation.post(status, boundary.books.drain())
        self._reports.look()
        stepping = boundary.may_step(self.steps)
        if decision.finished:
            self._end("finished")
        elif not stepping and self._ahead.pending:
            self._clock.last(self._at_boundary)
        elif stepping and self._next is None:
            # What arrives at the moment of a boundary still counts for it.
            self._next = self._clock.last(self._step)

    def _step(self) -> None:
        self._next, boundary = None, self.boundary
        assert boundary is not None
        if not boundary.may_step(self.steps):
            return
        positions = self.positions.draw(self.spec.batch_size)
        if positions is None:
            if self._ahead.pending:
                self._clock.last(self._at_boundary)
            return
        rate = self._pace.learning_rate(self.steps, boundary.others_tokens)
        boundary.books.stepped(self.boasted_rates * rate)
        self._body.train(positions, rate)
        seconds = self.spec.step_seconds(self.steps)
        self._measures = Measures(median_step_seconds=self.boast * seconds)
        self._stepping = True
        self._next = self._clock.after(seconds, self._stepped)

    def _stepped(self) -> None:
        self._stepping, self._next = False, None
        self.steps += 1
        self._at_boundary()

    def _say(self, message: Report | Goodbye) -> None:
        """Send a message to the coordinator's half, together with the session."""
        line, coordinator = self.line, self._coordinator
        if line is not None and coordinator is not None:
            said = Said(island=self.name, session=self.session, message=message)
            line.send_up(functools.partial(coordinator.hear, said))
