"""A coordinator that has lost its state, in virtual time: the production policy of
gathering, with digests for anchors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from diloco_jax.coordinator.inbox import DeltaKey
from diloco_jax.protocol.coordinator.events import Event, Goodbye, Hello, Report
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import AnchorRequest, Welcome
from diloco_jax.protocol.new_term import gathering
from diloco_jax.protocol.new_term.offers import (
    Admit,
    Arrived,
    Ask,
    Effect,
    GiveUp,
    Heard,
    Lost,
    Offer,
    Open,
    Postpone,
    Tick,
)
from diloco_jax.protocol.new_term.offers import Event as Gathered
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.connection import Connection
from diloco_jax.simulation.virtual.merging import Fetched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A new term."""

    state: State
    anchors: tuple[Anchor, ...]
    replaced: tuple[Anchor, ...]
    """As the islands have them, from which they came."""
    offers: Mapping[str, Offer]
    """Of those that were there until the end."""


class Gatherer:
    """postponed: told of connections that it ends, for islands to come again. done:
    called once, with the new term or None: it gave up."""

    serves: ClassVar[bool] = False

    def __init__(
        self,
        config: PolicyConfig,
        names: frozenset[str],
        clock: Clock,
        postponed: Callable[[Connection], None],
        done: Callable[[Opened | None], None],
    ) -> None:
        self.config = config
        self._clock, self._postponed, self._done = clock, postponed, done
        self._state = gathering.begin(config, names, clock.now)
        self._joining: dict[str, Connection] = {}
        self._peers: dict[str, Connection] = {}
        self._anchors: dict[int, Anchor] = {}
        self._set_timer()

    # ---- as of a coordinator ----------------------------------------------------

    def hello(self, hello: Hello, peer: Connection) -> None:
        """An island on a new connection."""
        self._joining[hello.session] = peer
        status = peer.status
        self._step(
            Offer(
                island=hello.island,
                incarnation=hello.incarnation,
                session=hello.session,
                run_id=hello.run_id,
                differences=(),
                term=hello.term,
                versions=status.versions,
                tokens=status.tokens,
                next_position=status.next_position,
                step_seconds=hello.step_seconds,
                sequences_per_step=hello.sequences_per_step,
            )
        )

    def disconnected(self, peer: Connection) -> None:
        """A connection broke, and this end noticed."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            self._step(Lost(island=peer.name, session=peer.session))

    def step(self, event: Event) -> None:
        """A sign of life; what it says comes again. After a goodbye the stream ends."""
        if isinstance(event, Report):
            self._step(Heard(island=event.island, session=event.session))
        elif isinstance(event, Goodbye):
            peer = self._peers.get(event.island)
            if peer is not None and peer.session == event.session:
                self.disconnected(peer)

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """Likewise."""

    def fetch(self, fragment: int, have: Version | None) -> Fetched:
        """There is nothing to fetch."""
        raise AssertionError(f"fragment {fragment} is fetched from one without state")

    def anchor(self, who: tuple[str, int], fragment: int, anchor: Anchor) -> None:
        """An anchor is here."""
        asked = self._state.asked.get(fragment)
        if asked is not None and asked.island == who[0]:
            self._anchors[fragment] = anchor
        if who[0] in self._state.members:
            island, incarnation = who
            self._step(
                Arrived(
                    island=island,
                    incarnation=incarnation,
                    fragment=fragment,
                    version=anchor.version,
                )
            )

    # ---- its decisions ------------------------------------------------------------

    def _step(self, event: Gathered) -> None:
        now = self._clock.now
        self._state, effects = gathering.step(self.config, self._state, event, now)
        for effect in effects:
            self._carry_out(effect)
        self._set_timer()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Admit():
                peer = self._joining.pop(effect.session)
                self._peers[effect.island] = peer
                run_id = self.config.run_id
                peer.receive(Welcome(run_id=run_id, term=0, resumed=True, versions=()))
            case Postpone():
                self._postponed(self._joining.pop(effect.session))
            case Ask():
                asked = AnchorRequest(fragment=effect.fragment)
                self._peers[effect.island].receive(asked)
            case Open():
                self._done(self._opened(effect))
            case GiveUp():
                self._done(None)

    def _opened(self, opened: Open) -> Opened:
        got = [self._anchors[f] for f in range(self.config.fragments)]
        stayed = {
            name: member.offer
            for name, member in self._state.members.items()
            if member.connected
            and self._clock.now < member.gone_at
            and not any(failed == name for failed, _ in self._state.failed)
        }
        return Opened(
            state=gathering.first_state(self.config, opened),
            anchors=tuple(
                anchor._replace(version=version)
                for anchor, version in zip(got, opened.versions, strict=True)
            ),
            replaced=tuple(got),
            offers=stayed,
        )

    def _set_timer(self) -> None:
        at = gathering.next_deadline(self._state, self._clock.now)
        if self._state.phase != "over" and at < float("inf"):
            self._clock.at(at, self._ring)

    def _ring(self) -> None:
        if self._state.phase != "over":
            self._step(Tick())
