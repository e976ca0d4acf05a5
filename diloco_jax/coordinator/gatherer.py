"""A coordinator without its state: takes offers and anchors from islands until a new
term can begin. Calls become events of `policy.gathering`, which decides.

Nothing is written before that. Islands train on; their control streams stay open, and
all else that they send is answered "later".
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import msgspec

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.coordinator.inbox import DeltaKey, Inbox
from diloco_jax.coordinator.likeness import Likeness
from diloco_jax.coordinator.rooms import Rooms
from diloco_jax.core.codecs.codec import get_codec
from diloco_jax.core.fragments import FragmentPlan, Params, from_pieces
from diloco_jax.core.payload import PayloadLayout
from diloco_jax.policy import gathering
from diloco_jax.policy.offers import (
    Admit,
    Arrived,
    Ask,
    Discard,
    Effect,
    Event,
    GiveUp,
    Heard,
    Lost,
    Offer,
    Open,
    Postpone,
    Tick,
)
from diloco_jax.policy.state import PolicyConfig
from diloco_jax.wire import messages
from diloco_jax.wire.errors import Busy, Refused
from diloco_jax.wire.server import FetchSource
from diloco_jax.wire.session import Session

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 0.5
NO_STATE = "this coordinator has lost its state and gathers anchors of islands"

Before = Callable[[], None]


class Gathered(NamedTuple):
    """What a new term begins with."""

    opened: Open
    params: Params
    """The anchors, as a nested dict."""


class Gatherer:
    """The `Handlers` of the wire's server until `gather` returns."""

    def __init__(
        self,
        run: RunConfig,
        config: PolicyConfig,
        plan: FragmentPlan,
        names: frozenset[str],
    ) -> None:
        """names: of the config's islands. config: without a run id."""
        self._likeness = Likeness(run, plan)
        self._config, self._plan, self._names = config, plan, names
        self._codec = get_codec("f32")
        self._layouts = [PayloadLayout.of(self._codec, p) for p in plan.fragments]
        total = sum(layout.total_bytes for layout in self._layouts)
        # One of each fragment, and one that was given up and is still arriving; and as
        # much for parts on their way.
        self._inbox = Inbox(self._layouts, Rooms(4 * total))
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        """The newest stream by the session name of its Hello."""
        self._arriving: set[DeltaKey] = set()
        self._arrays: dict[str, jax.Array] = {}
        """Anchors by piece."""
        self._queue: queue.Queue[tuple[Event, Before | None]] = queue.Queue()
        self._state = gathering.begin(config, names, time.monotonic())
        self._opened: Open | None = None
        self._given_up = ""

    def gather(self) -> Gathered:
        """Waits for islands, until a deadline, and for their anchors.

        Raises ConfigError that says why there will be no term.
        """
        logger.warning("%s %s", NO_STATE, sorted(self._names))
        while self._opened is None:
            now = time.monotonic()
            due = gathering.next_deadline(self._state, now)
            wait_s = min(LONGEST_WAIT_S, due - now)
            event: Event = Tick()
            before: Before | None = None
            with contextlib.suppress(queue.Empty):
                event, before = self._queue.get(timeout=max(wait_s, 0.0))
            if before is not None:
                before()
            self._step(event)
            if self._given_up:
                raise ConfigError(self._given_up)
        return Gathered(self._opened, from_pieces(self._plan, self._arrays))

    # ---- calls of islands, on many threads ----------------------------------------

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """An island offers what it has."""
        with self._lock:
            self._sessions[hello.session] = session
        offer = Offer(
            island=hello.island,
            incarnation=hello.incarnation,
            session=hello.session,
            run_id=hello.run_id,
            differences=tuple(self._likeness.differences(hello)),
            term=hello.term,
            versions=hello.versions,
            tokens=hello.tokens,
            next_position=hello.next_position,
            step_seconds=hello.step_seconds,
            sequences_per_step=hello.sequences_per_step,
        )
        self._queue.put((offer, None))

    def receive(
        self, session: Session, message: messages.Report | messages.Goodbye
    ) -> None:
        """What reports say comes again, in the new term; a goodbye ends the session."""
        hello = session.hello
        if isinstance(message, messages.Report):
            heard = Heard(island=hello.island, session=hello.session)
            self._queue.put((heard, None))

    def disconnect(self, session: Session) -> None:
        """A control stream ended."""
        hello = session.hello
        with self._lock:
            if self._sessions.get(hello.session) is not session:
                return
            del self._sessions[hello.session]
        self._queue.put((Lost(island=hello.island, session=hello.session), None))

    def upload_begin(self, start: messages.UploadStart) -> memoryview:
        """The place of an anchor's stripe, if it was asked for."""
        asked = self._state.asked.get(start.fragment)
        member = self._state.members.get(start.island)
        if (
            start.version is None
            or asked is None
            or member is None
            or asked.island != start.island
            or member.offer.incarnation != start.incarnation
        ):
            raise Refused("gathering", f"{NO_STATE}; this one was not asked for")
        place = self._inbox.begin(_keyed(start))
        with self._lock:
            self._arriving.add(_key(start))
        return place

    def upload_end(self, start: messages.UploadStart, place: memoryview) -> bool:
        """A stripe is in its place; the last one makes the anchor an event."""
        if not self._inbox.end(_keyed(start), place):
            return False
        assert start.version is not None
        arrived = Arrived(
            island=start.island,
            incarnation=start.incarnation,
            fragment=start.fragment,
            version=start.version,
        )
        self._queue.put((arrived, lambda: self._decode(_key(start))))
        return True

    def upload_abort(self, start: messages.UploadStart) -> None:
        """A stripe broke off: it comes again, to the same place."""

    def fetch(self, request: messages.FetchRequest) -> FetchSource:
        """There is nothing to fetch yet."""
        raise Busy(f"{NO_STATE}; come again")

    def status(self) -> dict[str, Any]:
        """What `diloco status` shows."""
        state = self._state
        return {
            "run_id": "",
            "phase": "gathering",
            "tokens": 0,
            "total_tokens": self._config.total_tokens,
            "progress": 0.0,
            "merges": 0,
            "goodput": 0.0,
            "alerts": [
                f"{NO_STATE}: {len(state.got)} of {self._config.fragments} fragments "
                f"are here"
            ],
            "versions": [],
            "islands": {
                name: {
                    "state": "offering" if member.connected else "absent",
                    "incarnation": member.offer.incarnation,
                }
                for name, member in sorted(state.members.items())
            },
        }

    # ---- decisions, on one thread ---------------------------------------------------

    def _step(self, event: Event) -> None:
        self._state, effects = gathering.step(
            self._config, self._state, event, time.monotonic()
        )
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Admit():
                offer = self._state.members[effect.island].offer
                logger.info(
                    "island %s offers its anchors: versions %s",
                    effect.island,
                    [tuple(version) for version in offer.versions],
                )
                welcome = messages.Welcome(
                    run_id=offer.run_id, term=0, resumed=True, versions=()
                )
                self._send(effect.session, welcome)
            case Postpone():
                session = self._session(effect.session)
                if session is not None:
                    session.fail(Busy(effect.message))
            case Ask():
                asked = messages.AnchorRequest(fragment=effect.fragment)
                self._send(effect.session, asked)
            case Discard():
                logger.warning(
                    "fragment %d did not come from island %s",
                    effect.fragment,
                    effect.island,
                )
                self._drop(effect)
            case Open():
                self._opened = effect
            case GiveUp():
                self._given_up = effect.message

    def _decode(self, key: DeltaKey) -> None:
        layout = self._layouts[key.fragment]
        with self._lock:
            waited_for = key in self._arriving and key.fragment not in self._state.got
        if not waited_for:
            self._inbox.drop(key)
            return
        payload = self._inbox.payload(key)
        for placed, encoded in zip(
            layout.placed, layout.unpack(payload.data), strict=True
        ):
            piece = placed.piece
            self._arrays[piece.name] = self._codec.decode(encoded, piece.shape)
        self._inbox.drop(key)

    def _drop(self, effect: Discard) -> None:
        whose = (effect.island, effect.incarnation, effect.fragment)
        with self._lock:
            gone = {key for key in self._arriving if key[:3] == whose}
            self._arriving -= gone
        for key in gone:
            self._inbox.drop(key)

    def _send(self, name: str, message: messages.FromCoordinator) -> None:
        session = self._session(name)
        if session is not None:
            session.send(message)

    def _session(self, name: str) -> Session | None:
        with self._lock:
            return self._sessions.get(name)


def _keyed(start: messages.UploadStart) -> messages.UploadStart:
    """With the version for a tick: anchors of two versions are not put together."""
    assert start.version is not None
    return msgspec.structs.replace(start, tick=start.version.number)


def _key(start: messages.UploadStart) -> DeltaKey:
    tick = _keyed(start).tick
    return DeltaKey(start.island, start.incarnation, start.fragment, tick)
