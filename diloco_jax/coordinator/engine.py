"""Carry out what the coordinator decides: one engine for every clock.

Three shells construct it: the service (`lead.py`), a coordinator in virtual time, and
one that searches islands for lost anchors. They give it different deciding
halves of the protocol, and different logs, messengers and holders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from diloco_jax.protocol.coordinator.events import (
    Alert,
    Effect,
    Ignored,
    Note,
    Outdated,
    Persist,
    Tell,
)
from diloco_jax.protocol.coordinator.search import GiveUp, Postpone
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.coordinator.terms import FoundTerm
from diloco_jax.protocol.holding import (
    AwaitAnchor,
    Commit,
    Drop,
    Forget,
    KeepFragment,
    Merge,
    ToHolder,
)
from diloco_jax.protocol.messages import FromCoordinator, Refused
from diloco_jax.protocol.records import Durable, Noted, TurnedAway
from diloco_jax.wire import errors as wire_errors

S = TypeVar("S")
"""State of the deciding half."""
E = TypeVar("E")
"""Events of the deciding half."""

AnyEffect = Effect | Postpone | FoundTerm | GiveUp

Decide = Callable[[PolicyConfig, S, E, float], tuple[S, Any]]
"""`step(config, state, event, now) -> (state, effects)`."""


class Log(Protocol):
    """The written record of the coordinator. A search writes nothing."""

    def persist(self, record: Durable) -> None:
        """Write a record; durable when this returns."""

    def note(self, record: Noted) -> None:
        """Write a record to the tape."""

    def ignored(self, ignored: Ignored) -> None:
        """Count a message that made no move."""

    def alert(self, text: str, island: str = "") -> None:
        """Report something that a person should look at. island: see `Alert`."""


class Messenger(Protocol):
    """The connected sessions."""

    def tell(self, session: str, message: FromCoordinator) -> None:
        """Send a message; nothing happens if the session is not connected."""

    def postpone(self, session: str, message: str) -> None:
        """End a session for this reason; the island tries again later."""


class Holder(Protocol):
    """Keeps the fragments and the deltas that wait for their merge."""

    def hold(self, message: ToHolder) -> None:
        """Carry out a message. Messages come in order, and may name deltas that are
        unknown here.

        The answer comes later, as an event.
        """


class Searcher(Protocol):
    """The shell of a search."""

    def alert(self, text: str, island: str = "") -> None:
        """Report something that a person should look at. There is no tape yet."""

    def over(self, end: FoundTerm | GiveUp) -> None:
        """End the search."""


class Engine(Generic[S, E]):
    """The deciding half of the protocol, with the objects that carry out its
    effects."""

    def __init__(
        self,
        decide: Decide[S, E],
        config: PolicyConfig,
        state: S,
        *,
        sender: Messenger,
        log: Log | None = None,
        holder: Holder | None = None,
        searcher: Searcher | None = None,
    ) -> None:
        """log: for the usual half; searcher: for a search."""
        self.config, self.state = config, state
        self.dead = False
        """Set by an effect that ends this engine; no later effect is carried out."""
        self._decide = decide
        self._sender = sender
        self._log, self._holder, self._searcher = log, holder, searcher

    def step(self, event: E, now: float) -> None:
        """Apply one event at time `now`: decide, then act, in order."""
        for effect in self.decide(event, now):
            self.carry_out(effect)
            if self.dead:
                return

    def decide(self, event: E, now: float) -> list[AnyEffect]:
        """Decide upon an event; return the effects, none of which is visible yet."""
        effects: list[AnyEffect]
        self.state, effects = self._decide(self.config, self.state, event, now)
        return effects

    def turn_away(self, island: str, session: str, refused: Refused) -> None:
        """End a session by a decision of the service, not of the protocol. The tape
        notes it.
        """
        if self._log is not None:
            note = TurnedAway(island=island, code=refused.code, message=refused.message)
            self._log.note(note)
        self._sender.tell(session, refused)

    def carry_out(self, effect: AnyEffect) -> None:
        """Carry out one effect."""
        match effect:
            case Tell(session=session, message=message):
                self._sender.tell(session, message)
            case Note(record=noted):
                assert self._log is not None
                self._log.note(noted)
            case Persist(record=durable):
                assert self._log is not None
                self._log.persist(durable)
            case Ignored():
                assert self._log is not None
                self._log.ignored(effect)
            case Postpone(session=session, message=reason):
                self._sender.postpone(session, reason)
            case Alert(text=text, island=island):
                told = self._log or self._searcher
                assert told is not None
                told.alert(text, island)
            case Outdated(text=text):
                raise wire_errors.Refused("outdated", text)
            case (
                Merge() | Commit() | KeepFragment() | Drop() | Forget() | AwaitAnchor()
            ):
                assert self._holder is not None
                self._holder.hold(effect)
            case FoundTerm() | GiveUp():
                assert self._searcher is not None
                self._searcher.over(effect)
