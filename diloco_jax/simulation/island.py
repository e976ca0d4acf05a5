"""One incarnation of an island in virtual time: a shell around the island's half.

The protocol makes every decision of an island, as in the product: the meaning of
messages, the next fetch, the acts of a boundary, when to report and to stop. Two things
differ: steps take the seconds that the spec gives, and connections are `Line`s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from diloco_jax.config import RunConfig
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.data.reader import LeasedPositions
from diloco_jax.island.mailbox import Arrival, Arrivals, log_refused
from diloco_jax.island.region import KEPT
from diloco_jax.island.timing import Pace, goal_of
from diloco_jax.protocol.coordinator.state import Event, PolicyConfig, Said
from diloco_jax.protocol.island.boundary import (
    Ahead,
    Arrays,
    Books,
    Boundary,
    TakeOutcome,
)
from diloco_jax.protocol.island.conversation import (
    Conversation,
    Fetch,
    Fetching,
    Wanted,
    gave_up_late,
)
from diloco_jax.protocol.island.reporting import Introduction, Reporting, Status, hello
from diloco_jax.protocol.messages import (
    DONOR_RESTS,
    AnchorRequest,
    DeltaKey,
    Donor,
    DonorFailed,
    EndReason,
    FromCoordinator,
    Goodbye,
    Hello,
    Measures,
    Progress,
    Report,
    ResendRequest,
    Version,
    Welcome,
)
from diloco_jax.simulation.clock import Clock, Due, Line, WakeUp
from diloco_jax.wire.errors import Refused, WireError

if TYPE_CHECKING:
    from diloco_jax.island.device.exchange import Restored

ASK_AGAIN_S = 0.2
"""Seconds after which a donor is asked again that has not got a publish."""
GIVEN_S = 0.05
"""Seconds that a publish is under way in a region."""


class VirtualFetch(NamedTuple):
    """Fragment on its way to an island."""

    version: Version
    nbytes: int
    data: Any
    """Data from which `Body.arrival` makes arrays."""


class Body(Arrays, Protocol):
    """Model copy of an island, and how it is stepped; or no arrays (`NoBody`)."""

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> Restored | None:
        """Join with these anchors, in full, by fragment; return what it took over of an
        earlier incarnation besides."""

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        """Return a later version, ready to be adopted."""

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        """Make one inner step on the sequences at these positions of the data."""


class NoBody:
    """A body without arrays."""

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> Restored | None:
        return None

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        return Arrival(fragment=fragment, version=fetched.version)

    def train(self, positions: np.ndarray, learning_rate: float) -> None: ...

    def take(self, fragment: int) -> Any: ...

    def adopt(self, arrival: Arrival, *, keep: bool) -> None: ...

    def judge(self, fragment: int, outcome: TakeOutcome) -> None: ...


class VirtualService(Protocol):
    """Service that an island is connected to: a coordinator, or a gatherer.

    A `coordinator.VirtualCoordinator` serves; a gatherer of anchors does not serve yet.
    """

    @property
    def serves(self) -> bool:
        """True if anything can be fetched."""

    @property
    def config(self) -> PolicyConfig:
        """Config of the run's decisions."""

    def hello(self, hello: Hello, peer: Connection) -> None:
        """Judge an island on a new connection."""

    def hear(self, event: Event) -> None:
        """Hear a message of an island."""

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """Take in a delta, all of whose bytes have arrived."""

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """Return the newest version of a fragment; None if its worker is away. want: of
        which the island has heard."""


@dataclasses.dataclass(frozen=True, eq=False)
class Connection:
    """A control stream between an incarnation and the coordinator's `Sessions`."""

    island: VirtualIsland
    line: Line
    hello: Hello

    def send(self, message: FromCoordinator) -> None:
        """Send a message on its way to the island."""
        self.line.send_down(functools.partial(self.island.received, message))

    def close(self, refused: Refused | None = None) -> None:
        """Turn the island away if it is refused; otherwise it was replaced, and a live
        island comes again: what came last may have been a greeting that was late."""
        if refused is not None:
            reason = f"refused: {refused.message}"
            self.line.send_down(lambda: self.island.turned_away(reason))
        elif self.island.ended is None:
            self.island.postponed(self)

    def fail(self, error: WireError) -> None:
        """End the connection; the island comes again."""
        self.island.postponed(self)


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
    lookahead: int = 0
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
        self.boast = 1.0
        """Step time that it says it has, as a share of its own."""
        self.boasted_rates = 1.0
        """Learning rates that it says it has, as a multiple of its own."""
        self._run, self._clock, self._body = run, clock, body
        self._goal = goal_of(run, spec.batch_size)
        self._pace = Pace(run, self._goal)
        self._conversation = Conversation()
        self._coordinator: VirtualService | None = None
        self._report_s = report_s
        self._said: Reporting | None = None
        """Reports on this connection, once it is welcomed."""
        self._report_due = WakeUp(clock, self._report)
        self._fetching: Fetching | None = None
        """Fetches from the first welcome on."""
        self._joined: dict[int, VirtualFetch] = {}
        """Anchors in full, by fragment, until the island has joined."""
        self._arrivals = Arrivals()
        self._waiting: Arrival | None = None
        """Version that was fetched and has no room so far."""
        self._outgoing: dict[tuple[int, int], Any] = {}
        self._given: dict[tuple[int, Version], VirtualFetch] = {}
        """Publishes that others of its region have from it, the oldest first."""
        self._ahead = Ahead(spec.lookahead)
        self._compiled = self._stepping = False
        self._measures = Measures()
        self._next: Due | None = None
        """Start or end of a step that is due."""

    # ---- its life ---------------------------------------------------------------

    def connect(self, coordinator: VirtualService, line: Line) -> None:
        """Say hello on a new connection, for the first time or again. What was under
        way on the old one is lost."""
        self._coordinator, self.line = coordinator, line
        if self._fetching is not None:
            self._fetching.disconnected()
        who = Introduction(
            island=self.name,
            incarnation=self.incarnation,
            session=self.session,
            fingerprint=coordinator.config.fingerprint,
            tokens_per_step=self._goal.tokens_per_step,
            sequences_per_step=self.spec.batch_size,
            lookahead=self.spec.lookahead,
            gives_at=(self.name,) if self.name in coordinator.config.regions else (),
        )
        said = self._hello(who)
        self.peer = peer = Connection(self, line, said)
        line.send_up(functools.partial(coordinator.hello, said, peer))

    def _hello(self, who: Introduction) -> Hello:
        return hello(who, self._conversation.status())

    def disconnect(self) -> None:
        """Lose the connection and train on."""
        if self.line is not None:
            self.line.cut()
        self.line = self._said = None

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
        self._send_reports()
        self._say(Goodbye(reason=reason, text=reason))
        self._end(reason)

    def _end(self, why: str) -> None:
        self.ended = self.ended or why
        self._said = None
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
                case Wanted() as wanted:
                    assert self._fetching is not None
                    self._fetching.want(*wanted)
                case ResendRequest(fragment=fragment, tick=tick):
                    self._send(fragment, tick)
        self._fetch()
        if self._conversation.may_leave:
            self.leave("preempted")
        elif isinstance(message, Progress) and self._next is not None:
            pass  # As in a real loop, the next boundary looks at it.
        elif self._stepping:
            self._report()
        else:
            self._at_boundary()

    def _welcomed(self, welcome: Welcome) -> None:
        if self._said is None:
            # There is no interval: virtual time may stand still between question and
            # answer.
            self._said = Reporting(self._report_s, self._clock.now, 0.0)
        if welcome.versions and self._fetching is None:
            self._fetching = Fetching(welcome.versions, self.name)
            self._conversation.post(Status(phase="compiling"))
            self._clock.after(self.spec.join_seconds, self._has_compiled)

    def _report(self) -> None:
        """Report if a report is due, and look again at the next due time."""
        said, conversation = self._said, self._conversation
        if said is None:
            return
        news = said.has_news(conversation.posted, conversation.newest_record)
        due = said.news_due_at if news else said.alive_due_at
        if due <= self._clock.now:
            self._send_reports()
            due = said.alive_due_at
        self._report_due.by(due)

    def _send_reports(self) -> None:
        if (said := self._said) is not None:
            unsent = self._conversation.unsent(said.sent_through)
            for report in said.reports(self._conversation.current(), unsent):
                said.sent(report, self._clock.now)
                self._say(report)

    def _say(self, message: Report | Goodbye | DonorFailed) -> None:
        """Send a message to the coordinator's half, together with the session."""
        line, coordinator = self.line, self._coordinator
        if line is not None and coordinator is not None:
            said = Said(island=self.name, session=self.session, message=message)
            line.send_up(functools.partial(coordinator.hear, said))

    # ---- its fetches ------------------------------------------------------------

    def _fetch(self) -> None:
        """Begin the fetches that may be under way: those of the join, or later ones."""
        fetching, service, line = self._fetching, self._coordinator, self.line
        if fetching is None or not fetching.lags or self._waiting is not None:
            return
        if line is None or service is None or not (service.serves and line.open):
            return
        if fetching.joined != (self.boundary is not None):
            return
        away = set[int]()
        while (fetch := fetching.next(away, self._clock.now)) is not None:
            if fetch.sources is not None:
                self._ask(line, fetch, fetch.sources.donors)
            elif not self._from_service(line, fetch):
                away.add(fetch.fragment)

    def _from_service(self, line: Line, fetch: Fetch) -> bool:
        """Have a fetch done by the coordinator; False if a worker is away."""
        assert self._coordinator is not None
        assert self._fetching is not None
        fetched = self._coordinator.fetch(fetch.fragment, fetch.want, fetch.have)
        if fetched is None:
            self._fetching.failed(fetch.fragment)
            return False
        line.download(fetched.nbytes, lambda: self._fetched(fetch, fetched))
        return True

    def _fetched(self, fetch: Fetch, fetched: VirtualFetch) -> None:
        if self.ended is not None:
            return
        assert self._fetching is not None
        fragment = fetch.fragment
        self._keep(fetch, fetched)
        self._fetching.got(fragment, fetched.version)
        if self.boundary is None:
            self._joined[fragment] = fetched
            self._fetch()
            self._begin_if_ready()
        else:
            self._waiting = self._body.arrival(fragment, fetched)
            self._deliver()
            if not self._stepping:
                self._at_boundary()

    # ---- its region -------------------------------------------------------------

    def neighbour(self, name: str) -> VirtualIsland | None:
        """Return another island's process; None if it cannot be reached. Fleets and
        emulations have no regions."""
        return None

    def gives(self, fetch: Fetch) -> VirtualFetch | None:
        """Return what another island fetches; None if it is not here."""
        return self._given.get((fetch.fragment, fetch.want))

    def is_past(self, fetch: Fetch) -> bool:
        """Tell whether it has what another island fetches, or had it."""
        fetching = self._fetching
        return fetching is not None and fetching.order(fetch.fragment) >= fetch.want

    def _keep(self, fetch: Fetch, fetched: VirtualFetch) -> None:
        """Keep the publishes that were fetched, for others of the region."""
        if not fetch.gives or not isinstance(fetched.data, list):
            return
        first = fetched.version.number + 1 - len(fetched.data)
        for number, publish in enumerate(fetched.data, first):
            version = fetched.version._replace(number=number)
            given = VirtualFetch(version, fetched.nbytes, [publish])
            self._given[fetch.fragment, version] = given
        while len(self._given) > KEPT:
            del self._given[next(iter(self._given))]

    def _ask(
        self, line: Line, fetch: Fetch, donors: Sequence[Donor], until: float = 0.0
    ) -> None:
        """Ask these donors, one after the other, and the first of them until that time,
        or as long as a donor is asked; then the coordinator."""
        if self.ended is not None or not line.open:
            return
        if not donors:
            self._from_service(line, fetch)
            return
        assert fetch.sources is not None
        assert self._fetching is not None
        assert self._coordinator is not None
        donor, now = donors[0].island, self._clock.now
        until = until or now + fetch.sources.within_s
        other = self.neighbour(donor)
        found = other.gives(fetch) if other is not None else None
        again_s = min(ASK_AGAIN_S, until - now)
        past = found is None and other is not None and other.is_past(fetch)
        late = gave_up_late(fetch.sources, fetch.sources.within_s - (until - now))
        if found is not None and found.data[0].hex() == fetch.sources.stripes[""]:
            given = functools.partial(self._was_given, line, fetch, found)
            self._clock.after(GIVEN_S, given)
        elif past and not late:
            self._ask(line, fetch, donors[1:])
        elif found is None and not past and again_s > 0:
            again = functools.partial(self._ask, line, fetch, donors, until)
            self._clock.after(again_s, again)
        else:
            rests_s = DONOR_RESTS * self._coordinator.config.lease_s
            self._fetching.rest(donor, now + rests_s)
            self._say(DonorFailed(island=donor))
            self._ask(line, fetch, donors[1:])

    def _was_given(self, line: Line, fetch: Fetch, given: VirtualFetch) -> None:
        if line.open:
            self._fetched(fetch, given)

    def _deliver(self) -> None:
        """Hand over the version that waits for room, and fetch what comes after it."""
        arrival = self._waiting
        if arrival is None:
            return
        fragment, chain = arrival.fragment, arrival.chain
        if self._conversation.has_room(fragment, chain):
            self._waiting = None
            self._arrivals.put(arrival)
            self._conversation.arrived(fragment, arrival.version, chain)
            self._fetch()

    # ---- its deltas and anchors -------------------------------------------------

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
        assert self._fetching is not None
        if not (self._fetching.joined and self._compiled) or self.ended is not None:
            return
        joined, self._joined = self._joined, {}
        restored = self._body.begin(joined)
        versions = [joined[fragment].version for fragment in range(len(joined))]
        books = Books(versions, ADOPT_RULES.find(self._run.sync.adopt))
        books.begin()
        if restored is not None:
            incarnation, steps, _, residuals, unheard = restored
            books.restored(incarnation, steps, residuals, unheard)
            self._pace = Pace(self._run, self._goal, warm=True)
        self.boundary = Boundary(
            books,
            self._goal,
            arrays=self._body,
            incoming=self._arrivals,
            outgoing=self,
            data=self.positions,
        )
        self._at_boundary()
        self._fetch()

    def _at_boundary(self) -> None:
        boundary = self.boundary
        if boundary is None or self.ended is not None:
            self._report()
            return
        decision = self._ahead.next(self._conversation.decide())
        log_refused(boundary.act(decision, self.steps))
        for asked in decision.anchors:
            self.send_anchor(asked)
        self._deliver()
        status = boundary.status(self.steps, self._measures)
        self._conversation.post(status, boundary.books.drain())
        self._report()
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
