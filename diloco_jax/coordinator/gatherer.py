"""A coordinator without its state: it takes offers and anchors from islands until a new
term can begin, or a run whose first parameters an island gives.

Calls become events of `protocol.new_term.gathering` or `giving`, which decide. Nothing
is written before the new term. Islands train on and their control streams stay open;
every other call of theirs is answered "later".
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple, NoReturn

import jax

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.coordinator import service
from diloco_jax.coordinator.engine import Engine
from diloco_jax.coordinator.holding.anchors import key_of, keyed, layouts_of, values_of
from diloco_jax.coordinator.holding.inbox import Inbox, Rooms
from diloco_jax.coordinator.lead import EngineThread
from diloco_jax.coordinator.service import Likeness
from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.core.fragments import FragmentPlan, Params, from_pieces
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import gathering, giving, members
from diloco_jax.protocol.coordinator.events import Disconnected, Said, Timer
from diloco_jax.protocol.coordinator.gathering import (
    AnchorArrived,
    Discard,
    Event,
    GiveUp,
    Offered,
    Open,
)
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.values import DeltaKey
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import Busy, Refused
from diloco_jax.wire.limits import RateLimitedLog
from diloco_jax.wire.session import Handlers, Session

logger = logging.getLogger(__name__)

NO_STATE = "this coordinator has lost its state and gathers anchors of islands"


class Gathered(NamedTuple):
    """The state that a new term begins with."""

    opened: Open
    params: Params
    """Anchors as a nested dict."""


class Gatherer(Handlers):
    """The answers of the wire's server until `gather` returns."""

    def __init__(
        self,
        run: RunConfig,
        config: PolicyConfig,
        plan: FragmentPlan,
        names: frozenset[str],
        *,
        new: bool = False,
    ) -> None:
        """names: the config's islands. config: with a run id if it is known. new: the
        run is new, and has its first parameters from the one island."""
        self._likeness = Likeness(run, plan)
        self._config, self._plan, self._names = config, plan, names
        self._layouts = layouts_of(plan.fragments)
        total = sum(layout.total_bytes for layout in self._layouts)
        # One anchor of each fragment, and one that was given up and is still arriving.
        # The same again is for parts on their way.
        self._inbox = Inbox(self._layouts, Rooms(4 * total))
        self._sessions, self._lines = Sessions(), RateLimitedLog()
        self._lock = threading.Lock()
        self._arriving: set[DeltaKey] = set()
        self._arrays: dict[str, jax.Array] = {}
        """Anchors by piece."""
        self._opened: Open | None = None
        half, self._new = giving if new else gathering, new
        begun = half.begin(config, names, time.monotonic())
        engine: Engine[gathering.Gathering, Event] = Engine(
            half.step, config, begun, sender=self._sessions, gatherer=self
        )
        self._thread = EngineThread(
            engine, half.next_deadline, Timer(), self._peer, lambda: None
        )

    def gather(self) -> Gathered:
        """Wait for islands until a deadline, and for their anchors.

        Raises ConfigError that says why there will be no term.
        """
        logger.warning("%s %s", self._waits, sorted(self._names))
        self._thread.run()
        assert self._opened is not None
        # It stays the server's handler for as long as the coordinator starts.
        arrays, self._arrays = self._arrays, {}
        self._inbox = Inbox(self._layouts, Rooms(0))
        params = from_pieces(self._plan, arrays)
        del arrays
        give_memory_back()
        return Gathered(self._opened, params)

    # ---- calls of islands, on many threads ----------------------------------------

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Take the offer of an island that connects."""
        service.check_hello(hello)
        service.check_incarnation(hello, 0, time.time())
        if unknown := members.unknown(self._config, hello.island):
            raise Refused("unknown_island", unknown)
        self._sessions.arrived(session)
        differences = tuple(self._likeness.differences(hello))
        self._thread.post(Offered(hello=hello, differences=differences))

    def receive(
        self, session: Session, message: messages.Report | messages.Goodbye
    ) -> None:
        """End the session on a goodbye; ignore reports, which come again in the new
        term."""
        hello = session.hello
        if isinstance(message, messages.Report):
            said = Said(island=hello.island, session=hello.session, message=message)
            self._thread.post(said)

    def disconnect(self, session: Session) -> None:
        """Note that a control stream ended."""
        hello = session.hello
        if self._sessions.gone(session):
            lost = Disconnected(island=hello.island, session=hello.session)
            self._thread.post(lost)

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the place of an anchor's stripe, if the anchor was asked for."""
        asked = self._thread.state.asked.get(start.fragment)
        member = self._thread.state.members.get(start.island)
        if (
            start.version is None
            or asked is None
            or member is None
            or asked.island != start.island
            or member.offer.incarnation != start.incarnation
            or member.offer.session != start.session
        ):
            raise Refused("gathering", f"{self._waits}; this one was not asked for")
        place = self._inbox.begin(keyed(start))
        with self._lock:
            self._arriving.add(key_of(start))
        return place

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place; the last one makes the anchor an event."""
        if not self._inbox.end(keyed(start), place):
            return False
        assert start.version is not None
        arrived = AnchorArrived(
            island=start.island,
            incarnation=start.incarnation,
            fragment=start.fragment,
            version=start.version,
        )
        self._thread.post(arrived, lambda: self._decode(key_of(start)))
        return True

    def refuse(self) -> NoReturn:
        """Answer Busy: there is nothing to fetch, keep or change yet."""
        raise Busy(f"{self._waits}; come again")

    def status(self) -> dict[str, Any]:
        """Return what `diloco status` shows."""
        state = self._thread.state
        return {
            "run_id": "",
            "phase": "gathering",
            "tokens": 0,
            "total_tokens": self._config.total_tokens,
            "progress": 0.0,
            "merges": 0,
            "goodput": 0.0,
            "alerts": [self._waits, *gathering.notices(state)],
            "versions": [],
            "islands": {
                name: {
                    "state": "offering" if member.connected else "absent",
                    "incarnation": member.offer.incarnation,
                }
                for name, member in sorted(state.members.items())
            },
        }

    def _peer(self, event: Event | None) -> Disconnected | None:
        match event:
            case Offered(hello=hello):
                return Disconnected(island=hello.island, session=hello.session)
            case Said() | Disconnected():
                return Disconnected(island=event.island, session=event.session)
            case AnchorArrived():
                member = self._thread.state.members.get(event.island)
                session = member.offer.session if member is not None else ""
                return Disconnected(island=event.island, session=session)
        return None

    @property
    def _waits(self) -> str:
        """Describe the wait, for people."""
        state, fragments = self._thread.state, self._config.fragments
        if self._new:
            return giving.waits_for(state, fragments)
        got = f"{len(state.got)} of {fragments} fragments have arrived"
        return f"{NO_STATE}: {got}"

    # ---- what was decided, on one thread -------------------------------------------

    def alert(self, text: str, island: str = "") -> None:
        # Two processes of one island may come in turn, each with another config.
        self._lines.log(logger, logging.WARNING, "offers that do not fit", text)

    def discard(self, discard: Discard) -> None:
        logger.warning(
            "fragment %d did not come from island %s", discard.fragment, discard.island
        )
        whose = (discard.island, discard.incarnation, discard.fragment)
        with self._lock:
            gone = {key for key in self._arriving if key[:3] == whose}
            self._arriving -= gone
        for key in gone:
            self._inbox.drop(key)

    def open(self, opened: Open) -> None:
        self._opened = opened
        self._thread.stop()

    def give_up(self, reason: GiveUp) -> None:
        self._thread.fail(ConfigError(reason.message))

    def _decode(self, key: DeltaKey) -> None:
        layout = self._layouts[key.fragment]
        with self._lock:
            waited_for = (
                key in self._arriving and key.fragment not in self._thread.state.got
            )
        if not waited_for:
            self._inbox.drop(key)
            return
        values = values_of(layout, self._inbox.payload(key).data)
        for placed, value in zip(layout.placed, values, strict=True):
            self._arrays[placed.piece.name] = value
        self._inbox.drop(key)
