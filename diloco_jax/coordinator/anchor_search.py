"""A coordinator that searches the islands for anchors before it lets anybody in.

Calls become events of `protocol.coordinator.anchors`, which decides. The holder of each
fragment takes its anchor, keeps it on disk, and compares the others' ballots. Islands
train on and their control streams stay open; every other call of theirs is answered
"later".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.coordinator import service
from diloco_jax.coordinator.engine import Engine, Sessions
from diloco_jax.coordinator.holding.holder import FragmentHolder
from diloco_jax.coordinator.lead import EngineThread
from diloco_jax.coordinator.service import Likeness
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import anchors, members
from diloco_jax.protocol.coordinator.events import Disconnected, Said, Timer
from diloco_jax.protocol.coordinator.search import Aim, Event, GiveUp, Offered, Search
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.coordinator.terms import FoundTerm
from diloco_jax.protocol.holding import (
    AnchorCompared,
    AnchorKept,
    FromHolder,
    HolderTroubled,
    ToHolder,
)
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import Busy, Refused, WireError
from diloco_jax.wire.limits import RateLimitedLog
from diloco_jax.wire.session import Handlers, Session

logger = logging.getLogger(__name__)


class Searched(NamedTuple):
    """The end of a search, and the holder that has the anchors."""

    found: FoundTerm
    holder: FragmentHolder
    unheard: Sequence[FromHolder]
    """The holder's messages that are for the lead."""


class TornError(WireError):
    """Two islands differ, and nobody can tell which is right: a person has to."""


class AnchorSearch(Handlers):
    """The answers of the wire's server until `search` returns."""

    def __init__(
        self,
        run: RunConfig,
        config: PolicyConfig,
        plan: FragmentPlan,
        aim: Aim,
        holder_of: Callable[[str, int], FragmentHolder],
    ) -> None:
        """config: with a run id if it is known. holder_of: returns the holder of the
        run's fragments, given its id and the term that begins. It is called once most
        islands are of one run: until then nothing is written."""
        self._likeness = Likeness(run, plan)
        self._config, self._holder_of = config, holder_of
        self._sessions, self._lines = Sessions(), RateLimitedLog()
        self._holder: FragmentHolder | None = None
        self._found: FoundTerm | None = None
        self._unheard: list[FromHolder] = []
        engine: Engine[Search, Event] = Engine(
            anchors.step,
            config,
            anchors.begin(config, aim, time.monotonic()),
            sender=self._sessions,
            holder=self,
            searcher=self,
        )
        self._thread = EngineThread(
            engine, anchors.next_deadline, Timer(), self._peer, lambda: None
        )

    def search(self) -> Searched:
        """Wait for islands until a deadline, and for their anchors.

        Raises ConfigError that says why there will be no term.
        """
        logger.warning("%s", self._waits)
        self._thread.run()
        assert self._found is not None
        assert self._holder is not None
        return Searched(self._found, self._holder, self._unheard)

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
        """Note a sign of life; a report comes again in the new term, and a goodbye ends
        the stream."""
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
        member, holder = self._thread.state.members.get(start.island), self._holder
        if (
            start.version is None
            or holder is None
            or member is None
            or member.offer.incarnation != start.incarnation
            or member.offer.session != start.session
        ):
            raise Refused("gathering", f"{self._waits}; this one was not asked for")
        return holder.upload_begin(start)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place; the last one makes the anchor an event."""
        assert self._holder is not None
        return self._holder.upload_end(start, place)

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
            "alerts": [self._waits, *anchors.notices(state)],
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
        return None

    @property
    def _waits(self) -> str:
        """Describe the wait, for people."""
        return anchors.waits_for(self._thread.state)

    # ---- what was decided, on one thread -------------------------------------------

    def alert(self, text: str, island: str = "") -> None:
        """See engine.Searcher."""
        # Two processes of one island may come in turn, each with another config.
        self._lines.log(logger, logging.WARNING, "what people should see", text)

    def hold(self, message: ToHolder) -> None:
        """Pass a message to the holder; see engine.Holder."""
        if self._holder is None:
            state = self._thread.state
            self._holder = self._holder_of(state.run_id, state.term)
            self._holder.answer(self._heard, self._thread.fail)
            self._sessions.completed = self._holder.completed
        self._holder.hold(message)

    def over(self, end: FoundTerm | GiveUp) -> None:
        """See engine.Searcher."""
        if isinstance(end, FoundTerm):
            self._found = end
            self._thread.stop()
        else:
            kind = TornError if end.torn else ConfigError
            self._thread.fail(kind(end.message))

    def _heard(self, message: FromHolder) -> None:
        if isinstance(message, AnchorKept | AnchorCompared):
            self._thread.post(message)
        else:
            self._unheard.append(message)
            if isinstance(message, HolderTroubled):
                logger.warning("%s", message.text)
