"""A coordinator without state, in virtual time: the production engine over the half
that gathers, with digests for anchors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from diloco_jax.coordinator.engine import Engine
from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.protocol.coordinator import gathering
from diloco_jax.protocol.coordinator.events import Disconnected, Said, Timer
from diloco_jax.protocol.coordinator.events import Event as CoordinatorEvent
from diloco_jax.protocol.coordinator.gathering import (
    AnchorArrived,
    Discard,
    Event,
    GiveUp,
    Offered,
    Open,
)
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import Goodbye, Hello
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.virtual.arrays import VirtualFetch
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.island import Connection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A new term."""

    state: State
    anchors: tuple[Anchor, ...]
    replaced: tuple[Anchor, ...]
    """Anchors as the islands offered them."""
    offers: Mapping[str, Hello]
    """Offers of the islands that stayed to the end."""


class VirtualGatherer:
    """A coordinator that gathers anchors.

    done: called once, with the new term, or with None if it gave up.
    """

    serves: ClassVar[bool] = False

    def __init__(
        self,
        config: PolicyConfig,
        names: frozenset[str],
        clock: Clock,
        done: Callable[[Opened | None], None],
    ) -> None:
        self.config = config
        self._clock, self._done = clock, done
        self._sessions = Sessions()
        self._connections: dict[str, Connection] = {}
        """Newest connections by session."""
        self._engine: Engine[gathering.Gathering, Event] = Engine(
            gathering.step,
            config,
            gathering.begin(config, names, clock.now),
            sender=self._sessions,
            gatherer=self,
        )
        self._anchors: dict[int, Anchor] = {}
        self._set_timer()

    # ---- as of a coordinator ----------------------------------------------------

    def hello(self, hello: Hello, peer: Connection) -> None:
        """Take in the offer of an island on a new connection."""
        self._sessions.arrived(peer)
        self._connections[hello.session] = peer
        self._step(Offered(hello=hello))

    def disconnected(self, peer: Connection) -> None:
        """Note that a connection broke and this end noticed."""
        if self._sessions.gone(peer):
            hello = peer.hello
            self._step(Disconnected(island=hello.island, session=hello.session))

    def hear(self, event: CoordinatorEvent) -> None:
        """Hear a sign of life; its content comes again. A goodbye ends the stream."""
        if not isinstance(event, Said):
            return
        if not isinstance(event.message, Goodbye):
            self._step(event)
        elif (peer := self._connections.get(event.session)) is not None:
            self.disconnected(peer)

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """Ignore a delta."""

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        """Raise AssertionError: there is nothing to fetch."""
        raise AssertionError(f"fragment {fragment} is fetched from one without state")

    def anchor(self, who: tuple[str, int], fragment: int, anchor: Anchor) -> None:
        """Take in an anchor that has arrived."""
        state = self._engine.state
        asked = state.asked.get(fragment)
        if asked is not None and asked.island == who[0]:
            self._anchors[fragment] = anchor
        if who[0] in state.members:
            island, incarnation = who
            self._step(
                AnchorArrived(
                    island=island,
                    incarnation=incarnation,
                    fragment=fragment,
                    version=anchor.version,
                )
            )

    # ---- what was decided -------------------------------------------------------

    def alert(self, text: str, island: str = "") -> None:
        """See engine.Gatherer. Nobody reads it."""

    def discard(self, discard: Discard) -> None:
        """See engine.Gatherer. Keeps the anchor, which the next one overwrites."""

    def open(self, opened: Open) -> None:
        got = [self._anchors[f] for f in range(self.config.fragments)]
        state = self._engine.state
        stayed = {
            name: member.offer
            for name, member in state.members.items()
            if member.connected
            and self._clock.now < member.gone_at
            and not any(failed == name for failed, _ in state.failed)
        }
        self._done(
            Opened(
                state=gathering.first_state(self.config, opened),
                anchors=tuple(
                    anchor._replace(version=version)
                    for anchor, version in zip(got, opened.versions, strict=True)
                ),
                replaced=tuple(got),
                offers=stayed,
            )
        )

    def give_up(self, reason: GiveUp) -> None:
        self._done(None)

    def _step(self, event: Event) -> None:
        self._engine.step(event, self._clock.now)
        self._set_timer()

    def _set_timer(self) -> None:
        state = self._engine.state
        at = gathering.next_deadline(state, self._clock.now)
        if state.phase != "over" and at < float("inf"):
            self._clock.at(at, self._ring)

    def _ring(self) -> None:
        if self._engine.state.phase != "over":
            self._step(Timer())
