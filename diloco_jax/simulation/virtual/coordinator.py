"""The coordinator in virtual time: the production policy, driven by a clock.

What `coordinator.engine` does with threads, disks and sockets happens here at once or
after a given delay. Everything that is decided, is decided by `decide.step`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from diloco_jax.coordinator import outbox
from diloco_jax.coordinator.inbox import DeltaKey
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.events import (
    Alert,
    AskResend,
    AskTake,
    DeltaArrived,
    Disconnected,
    DropDelta,
    Effect,
    Event,
    Finish,
    Grant,
    Hello,
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
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import Finished, FromCoordinator
from diloco_jax.protocol.messages import Welcome as WelcomeMessage
from diloco_jax.protocol.records import Durable
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.virtual.clock import Clock, Due
from diloco_jax.simulation.virtual.merging import Fetched, Merging


class Peer(Protocol):
    """A connection, by which an incarnation is reached."""

    @property
    def name(self) -> str:
        """Of the island."""

    @property
    def session(self) -> str:
        """Of the incarnation's process."""

    def receive(self, message: FromCoordinator) -> None:
        """Sends it on its way to the island."""

    def refused(self, refusal: Refuse) -> None:
        """Likewise: the island is not let in, or put out."""


@dataclasses.dataclass
class VirtualCoordinator:
    """One life of a coordinator, from `state` on.

    persist: called with every durable record, before the next effect. alert: with what
    a person should look at.
    merge_seconds: from the order of a merge to its result.
    clock_offset: what its own clock is ahead of virtual time.
    """

    serves: ClassVar[bool] = True

    config: PolicyConfig
    clock: Clock
    state: State
    merging: Merging
    persist: Callable[[Durable], None] = lambda record: None
    alert: Callable[[str], None] = lambda text: None
    merge_seconds: Callable[[Merge], float] = lambda merge: 0.0
    clock_offset: float = 0.0

    def __post_init__(self) -> None:
        self.finished = self.state.phase == "done"
        self.peers: dict[str, Peer] = {}
        """Connected islands."""
        self._joining: dict[str, Peer] = {}
        self._timer: Due | None = None
        self._dead = False

    def die(self) -> None:
        """Nothing that it began happens any more."""
        self._dead = True
        if self._timer is not None:
            self._timer.cancel()

    # ---- what comes in --------------------------------------------------------------

    def hello(self, hello: Hello, peer: Peer) -> None:
        """An island on a new connection."""
        self._joining[hello.session] = peer
        self.step(hello)
        self._joining.pop(hello.session, None)

    def disconnected(self, peer: Peer) -> None:
        """A connection broke, and this end noticed."""
        if self.peers.get(peer.name) is peer:
            del self.peers[peer.name]
            self.step(Disconnected(island=peer.name, session=peer.session))

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """All bytes of a delta."""
        refusal = self.merging.put(key, encoded)
        self.step(DeltaArrived(**key._asdict(), refusal=refusal))

    def fetch(self, fragment: int, have: Version | None) -> Fetched:
        """The newest version of a fragment."""
        version = self.state.fragments[fragment].version
        return self.merging.fetch(fragment, version, have)

    def step(self, event: Event) -> None:
        """One event: policy, then its effects in order."""
        if self._dead:
            return
        for effect in self.decide(event):
            self.carry_out(effect)
            if self._dead:
                return
        self._set_timer()

    def decide(self, event: Event) -> list[Effect]:
        """What the policy makes of an event."""
        now = self.clock.now + self.clock_offset
        self.state, effects = decide.step(self.config, self.state, event, now)
        return effects

    # ---- what goes out --------------------------------------------------------------

    def carry_out(self, effect: Effect) -> None:
        """One effect."""
        match effect:
            case Persist(record=record):
                self.persist(record)
            case Note():
                pass  # There is no tape.
            case Alert(text=text):
                self.alert(text)
            case (
                AskTake()
                | AskResend()
                | TellVerdict()
                | Grant()
                | Progress()
                | StopStepping()
                | LetGo()
            ):
                self._tell(effect.island, outbox.message(effect))
            case Publish(fragment=fragment, version=version):
                self.merging.commit(fragment, version)
                for island in list(self.peers):
                    self._tell(island, outbox.published(effect, island))
            case Merge():
                self._merge(effect)
            case Welcome():
                self.peers[effect.island] = self._joining[effect.session]
                welcome = WelcomeMessage(
                    run_id=self.config.run_id,
                    term=self.state.fragments[0].version.term,
                    resumed=effect.resumed,
                    versions=effect.versions,
                )
                self._tell(effect.island, welcome)
            case Refuse(island=island, session=session):
                peer = self._joining.get(session) or self.peers.get(island)
                if peer is not None and peer.session == session:
                    peer.refused(effect)
            case DropDelta():
                self.merging.drop(
                    DeltaKey(
                        effect.island, effect.incarnation, effect.fragment, effect.tick
                    )
                )
            case Finish():
                for island in list(self.peers):
                    self._tell(island, Finished())
                self.finished = True

    def _tell(self, island: str, message: FromCoordinator) -> None:
        peer = self.peers.get(island)
        if peer is not None:
            peer.receive(message)

    def _merge(self, merge: Merge) -> None:
        # At once: its deltas may be dropped before the result is due.
        digest = self.merging.compute(merge)
        computed = MergeComputed(
            fragment=merge.fragment, version=merge.version, digest=digest
        )

        def done() -> None:
            for c in merge.contributions:
                key = DeltaKey(c.island, c.incarnation, merge.fragment, c.tick)
                self.merging.drop(key)
            self.step(computed)

        self.clock.after(self.merge_seconds(merge), done)

    def _set_timer(self) -> None:
        """Deadlines move with every report: a timer that rings too early is harmless
        and cheaper than one that is always set anew."""
        now = self.clock.now + self.clock_offset
        deadline = decide.next_deadline(self.state, now)
        if deadline is None:
            return
        at = deadline - self.clock_offset
        if at + self.clock_offset < deadline:
            # Rounded down: it would ring before its time, again and again.
            at += math.ulp(at) + math.ulp(deadline)
        at = max(at, self.clock.now)
        if self._timer is not None:
            if self._timer.call is not None and self._timer.at <= at:
                return
            self._timer.cancel()
        self._timer = self.clock.at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.step(Timer())
