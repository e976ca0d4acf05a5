"""The coordinators of a fault schedule: one that leads, and one that has lost its state
and gathers anchors. Invariants watch the first, which may die or sleep."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from diloco_jax.coordinator.holding.fragment_snapshots import WRITE_AGAIN_S
from diloco_jax.coordinator.lead import AnyEffect, Log
from diloco_jax.protocol.coordinator import anchors, members, recovery, search
from diloco_jax.protocol.coordinator.state import (
    Event,
    MachineSlept,
    Persist,
    PolicyConfig,
    Said,
    SaidAhead,
    State,
)
from diloco_jax.protocol.holding import (
    AnchorCompared,
    AnchorKept,
    AwaitAnchor,
    Commit,
    Merge,
    ToHolder,
)
from diloco_jax.protocol.messages import (
    AnchorRequest,
    DeltaKey,
    Goodbye,
    Hello,
    Prepared,
    Version,
)
from diloco_jax.simulation.clock import Clock
from diloco_jax.simulation.coordinator import VirtualCoordinator, VirtualEngine
from diloco_jax.simulation.faults.arrays import Anchor, Anchors
from diloco_jax.simulation.faults.disk import Disk, DiskError
from diloco_jax.simulation.faults.facts import Incarnation, Opened
from diloco_jax.simulation.island import Connection, VirtualFetch
from diloco_jax.wire.errors import Busy, Refused


class FaultyCoordinator(VirtualCoordinator):
    """One life of a coordinator, with its workers. Its world may end it before any
    effect, or stop it. What comes while it is stopped, or while a record would find no
    space on the disk, waits, as it does for the service's thread.
    """

    def __init__(
        self, unit: Any, world: Any, state: State, anchors: Anchors, offset_s: float
    ) -> None:
        """unit: its `unit.Unit`. world: its `world.FaultyWorld`."""
        super().__init__(
            world.config,
            world.clock,
            state,
            anchors,
            unit.append,
            merge_seconds=lambda merge: world.schedule.merge_s,
            clock_offset=offset_s,
            written=self._write_publish,
        )
        self.anchors, self._world, self._unit = anchors, world, unit
        self.disk: Disk = unit.disk
        self.monitor: Any = world.monitor
        """The `invariants.Monitor`, or one that is blind: see `Unwatched`."""
        self._effects: deque[AnyEffect] = deque()
        """Decided effects that are not carried out yet."""
        self._came: deque[tuple[Event, float]] = deque()
        """Events that are not decided yet, and when they came."""
        self._works = False
        self._slept_at: float | None = None
        """Reading of its clock, which stands still, while its machine sleeps."""

    def _write_publish(self, merge: Merge, prepared: Prepared) -> bool:
        """Write the publish of a computed merge; False if it cannot be just now."""
        fragment, version = merge.fragment, merge.version
        written = not self.stopped and self.disk.prepare(
            fragment, version, self.anchors.publish(fragment)
        )
        if written:
            self.monitor.prepared(fragment, version, prepared.digest)
        return written

    # ---- its sleep ------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """True while it does nothing."""
        return self._slept_at is not None

    @property
    def waits(self) -> bool:
        """True while a record waits for space, or while it is stopped."""
        return bool(self._effects) or self.stopped

    @property
    def now(self) -> float:
        return super().now if self._slept_at is None else self._slept_at

    def sleep(self, for_s: float) -> None:
        """Sleep with its machine: its clock stands still, and what comes waits."""
        self._slept_at = self.now
        self.clock.after(for_s, lambda: self._wake_up(for_s))

    def _wake_up(self, slept_s: float) -> None:
        """Hear that the clock stood still, then go on with what came meanwhile."""
        self._slept_at = None
        self.clock_offset -= slept_s
        self._came.appendleft((MachineSlept(seconds=slept_s), self.now))
        self.go_on()

    # ---- its decisions --------------------------------------------------------------

    def hello(self, hello: Hello, peer: Connection) -> None:
        if how := members.how_ahead(self.config, self.state, hello):
            # As the service does.
            self.hear(SaidAhead(island=hello.island, how=how))
            peer.fail(Busy(how))
        else:
            super().hello(hello, peer)

    def hear(self, event: Event) -> None:
        self._came.append((event, self.now))
        self.go_on()

    def go_on(self) -> None:
        """Carry out and decide what waits, up to a record that finds no space."""
        if self._works:
            return  # In the middle of an effect; what came has its turn.
        self._works = True
        while not (self.stopped or self.dead):
            if self._effects:
                writes = isinstance(self._effects[0], Persist)
                if writes and not self.disk.has_space():
                    break
                self.carry_out(self._effects.popleft())
            elif self._came:
                self._effects.extend(self.decide(*self._came.popleft()))
            else:
                self._set_timer()
                break
        self._works = False

    def decide(self, event: Event, now: float) -> list[AnyEffect]:
        before, monitor = self.state, self.monitor
        effects = super().decide(event, now)
        monitor.decided(self.state, effects)
        if before.phase in ("stopping", "flushing"):
            monitor.ending(before, self.state, now)
        return effects

    def carry_out(self, effect: AnyEffect) -> None:
        for fault in self._world.met("effects", self._unit):
            self._world.begun(fault, fault.happen(self._world, self._unit))
        if self.dead:
            return
        self.monitor.carrying_out(effect)
        try:
            super().carry_out(effect)
        except DiskError:
            assert self.dead
        except Refused as refused:
            if refused.code != "outdated":
                raise
            self._world.outdated(self._unit)
        if isinstance(effect, Commit):
            fragment = effect.fragment
            if self.has(fragment):
                self.monitor.published(fragment, self.anchors.anchors[fragment])

    # ---- its workers ----------------------------------------------------------------

    def has(self, fragment: int) -> bool:
        """Tell whether a fragment's worker is there."""
        return fragment not in self.dead_fragments

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        if self.has(key.fragment):
            self.monitor.arrived(key)
        super().arrived(key, encoded)

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """See VirtualCoordinator; None also for what is not committed yet, and while it
        is stopped, or dead."""
        if self.stopped or self.dead:
            return None
        committed = self.state.fragments[fragment].version
        if self.anchors.anchors[fragment].version < committed:
            return None
        return super().fetch(fragment, want, have)


class VirtualGatherer(VirtualEngine[search.Search, search.Event], Log):
    """A coordinator that searches islands for anchors, with digests for them.

    keep: writes the first anchor of a fragment in a term, and tells whether there was
    room. done: called once, with the new term, or with None if it gave up.
    """

    serves: ClassVar[bool] = False

    def __init__(
        self,
        config: PolicyConfig,
        aim: search.Aim,
        clock: Clock,
        keep: Callable[[int, Anchor], bool],
        done: Callable[[Opened | None], None],
    ) -> None:
        super().__init__(
            clock,
            anchors.step,
            anchors.next_deadline,
            config,
            anchors.begin(config, aim, clock.now),
            holder=self,
            log=self,
            over=self.over,
        )
        self._keep, self._done = keep, done
        self._connections: dict[str, Connection] = {}
        """Newest connections by session."""
        self._awaited: dict[tuple[int, str], AwaitAnchor] = {}
        self._kept: dict[int, tuple[Anchor, Anchor]] = {}
        """Anchors as they came, and as the term calls them."""
        self._set_timer()

    # ---- as of a coordinator ----------------------------------------------------

    def hello(self, hello: Hello, peer: Connection) -> None:
        self._connections[hello.session] = peer
        super().hello(hello, peer)

    def hear(self, event: Any) -> None:
        """Hear an offer, the end of a connection, or a sign of life, whose content
        comes again. A goodbye ends the stream."""
        match event:
            case Hello():
                super().hear(search.Offered(hello=event))
            case Said(message=Goodbye()):
                if (peer := self._connections.get(event.session)) is not None:
                    self.disconnected(peer)
            case _:
                super().hear(event)

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """Ignore a delta."""

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        """Raise AssertionError: there is nothing to fetch."""
        raise AssertionError(f"fragment {fragment} is fetched from one without state")

    def anchor(self, who: Incarnation, asked: AnchorRequest, anchor: Anchor) -> None:
        """Take in an anchor, or a ballot of it, that has arrived."""
        fragment, (island, incarnation) = asked.fragment, who
        awaited = self._awaited.get((fragment, island))
        if awaited is None or (awaited.incarnation, awaited.term, awaited.sample) != (
            incarnation,
            asked.term,
            asked.sample,
        ):
            return
        of: dict[str, Any] = {
            "fragment": fragment,
            "island": island,
            "incarnation": incarnation,
        }
        if asked.sample:
            kept, _ = self._kept[fragment]
            compared = AnchorCompared(
                **of,
                version=anchor.version,
                equal=anchor.value == kept.value,
                apart=math.inf if anchor.is_made_up or kept.is_made_up else 0.0,
            )
            self.hear(compared)
            return
        first = anchor._replace(version=Version(asked.term, anchor.version.number))
        if not self._keep(fragment, first):
            self.clock.after(WRITE_AGAIN_S, lambda: self.anchor(who, asked, anchor))
            return
        self._kept[fragment] = anchor, first
        event = AnchorKept(
            **of,
            replaced=anchor.version,
            version=first.version,
            digest=first.value.hex(),
        )
        self.hear(event)

    # ---- what was decided -------------------------------------------------------

    def hold(self, message: ToHolder) -> None:
        """See `lead.Holder`."""
        assert isinstance(message, AwaitAnchor)
        if not message.sample:
            for key in [k for k in self._awaited if k[0] == message.fragment]:
                del self._awaited[key]
        self._awaited[message.fragment, message.island] = message

    def alert(self, text: str, island: str = "") -> None:
        """See `lead.Log`. Nobody reads it."""

    def over(self, end: search.FoundTerm | search.GiveUp) -> None:
        """End the search."""
        self.die()
        if isinstance(end, search.GiveUp):
            self._done(None)
            return
        state, kept = self.state, [self._kept[a.fragment] for a in end.anchors]
        stayed = {
            name: member.offer
            for name, member in state.members.items()
            if member.connected
            and self.clock.now < member.gone_at
            and not any(failed == name for failed, _ in state.failed)
        }
        self._done(
            Opened(
                found=end,
                state=recovery.first_state(self.config, end),
                anchors=tuple(first for _, first in kept),
                replaced=tuple(replaced for replaced, _ in kept),
                offers=stayed,
                unchecked=state.unchecked,
            )
        )
