"""The coordinators of a fault schedule: one that leads, and one that has lost its state
and gathers anchors. Invariants watch the first, which may die or sleep."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, ParamSpec

from diloco_jax.coordinator.holding.fragment_snapshots import WRITE_AGAIN_S
from diloco_jax.coordinator.lead import AnyEffect, Engine, Log, Sessions
from diloco_jax.protocol.coordinator import anchors, members, recovery, search
from diloco_jax.protocol.coordinator.state import (
    Disconnected,
    Event,
    MachineSlept,
    Persist,
    PolicyConfig,
    Said,
    SaidAhead,
    State,
    Timer,
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
from diloco_jax.simulation.coordinator import VirtualCoordinator
from diloco_jax.simulation.faults.arrays import Anchor, Anchors
from diloco_jax.simulation.faults.disk import Disk, DiskError
from diloco_jax.simulation.faults.facts import Incarnation, Opened
from diloco_jax.simulation.island import Connection, VirtualFetch
from diloco_jax.wire.errors import Busy, Refused

P = ParamSpec("P")
Method = Callable[Concatenate[Any, P], None]


def awake(method: Method[P]) -> Method[P]:
    """Let calls of a method wait as long as the coordinator's machine sleeps."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.stopped:
            self.when_awake(functools.partial(method, self, *args, **kwargs))
        else:
            method(self, *args, **kwargs)

    return call


class FaultyCoordinator(VirtualCoordinator):
    """One life of a coordinator, with its workers. Its world may end it before any
    effect, or stop it: then what comes waits.

    While a record would find no space on the disk, the record's effects and all events
    wait, as they do for the service's thread.
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
        self._later: deque[Callable[[], None]] = deque()
        """Events that came while a record waited for space, or in the middle of one."""
        self._catches_up = False
        self.stopped = False
        """True while it does nothing."""
        self._waiting: list[Callable[[], None]] = []
        """Calls that wait until it is awake."""

    # ---- its disk -------------------------------------------------------------------

    def _write_publish(self, merge: Merge, prepared: Prepared) -> bool:
        """Write the publish of a computed merge; False if the disk is full."""
        fragment, version = merge.fragment, merge.version
        written = self.disk.prepare(fragment, version, self.anchors.publish(fragment))
        if written:
            self.monitor.prepared(fragment, version, prepared.digest)
        return written

    @property
    def waits(self) -> bool:
        """True while a record waits for space, or while it is stopped."""
        return bool(self._effects) or self.stopped

    # ---- its sleep ------------------------------------------------------------------

    def sleep(self, for_s: float) -> None:
        """Sleep with its machine: its clock stands still, and what comes waits."""
        self.stopped = True
        self.clock.after(for_s, lambda: self._wake_up(for_s))

    def _wake_up(self, slept_s: float) -> None:
        """Hear that the clock stood still, then go on with what came meanwhile."""
        self.stopped = False
        self.clock_offset -= slept_s
        self.hear(MachineSlept(seconds=slept_s))
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            if not self.dead:
                act()

    def when_awake(self, act: Callable[[], None]) -> None:
        """Do something now, or once its process is no longer stopped."""
        if self.stopped:
            self._waiting.append(act)
        else:
            act()

    @awake
    def hello(self, hello: Hello, peer: Connection) -> None:
        if how := members.how_ahead(self.config, self.state, hello):
            # As the service does.
            self.hear(SaidAhead(island=hello.island, how=how))
            peer.fail(Busy(how))
        else:
            super().hello(hello, peer)

    @awake
    def disconnected(self, peer: Connection) -> None:
        super().disconnected(peer)

    @awake
    def _prepare(self, merge: Merge, prepared: Prepared) -> None:
        super()._prepare(merge, prepared)

    # ---- its decisions --------------------------------------------------------------

    @awake
    def hear(self, event: Event) -> None:
        if self._effects:
            came = self.clock.now + self.clock_offset
            self._later.append(lambda: self.step(event, came))
        else:
            super().hear(event)

    def step(self, event: Event, now: float) -> None:
        self._effects.extend(self.decide(event, now))
        self._act()
        if self._later and not self._catches_up:
            self._catch_up()  # With what came in the middle of it.

    @awake
    def go_on(self) -> None:
        """Go on after a wait, now that there is space."""
        self._act()
        self._catch_up()
        if not self.dead and not self._effects:
            self._set_timer()

    def _act(self) -> None:
        """Carry out what is decided, up to a record that finds no space."""
        while self._effects and not self.dead:
            if isinstance(self._effects[0], Persist) and not self.disk.has_space():
                return
            self.carry_out(self._effects.popleft())

    def _catch_up(self) -> None:
        """Handle the events that waited, up to a record that finds no space."""
        self._catches_up = True
        while self._later and not self._effects and not self.dead:
            self._later.popleft()()
        self._catches_up = False

    def decide(self, event: Event, now: float) -> list[AnyEffect]:
        before, monitor = self.state, self.monitor
        effects = super().decide(event, now)
        monitor.decided(self.state, effects)
        if before.phase in ("stopping", "flushing"):
            monitor.ending(before, self.state, now)
        return effects

    def carry_out(self, effect: AnyEffect) -> None:
        if not self._world.survives(self._unit, self):
            return
        self.monitor.carrying_out(effect)
        try:
            super().carry_out(effect)
        except DiskError:
            self._world.disk_failed(self._unit)
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

    @awake
    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        if key.fragment not in self.dead_fragments:
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


class VirtualGatherer(Log):
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
        self.config = config
        self._clock, self._keep, self._done = clock, keep, done
        self._sessions = Sessions()
        self._connections: dict[str, Connection] = {}
        """Newest connections by session."""
        self._engine: Engine[search.Search, search.Event] = Engine(
            anchors.step,
            config,
            anchors.begin(config, aim, clock.now),
            sessions=self._sessions,
            holder=self,
            log=self,
            over=self.over,
        )
        self._awaited: dict[tuple[int, str], AwaitAnchor] = {}
        self._kept: dict[int, tuple[Anchor, Anchor]] = {}
        """Anchors as they came, and as the term calls them."""
        self._set_timer()

    # ---- as of a coordinator ----------------------------------------------------

    def hello(self, hello: Hello, peer: Connection) -> None:
        """Take in the offer of an island on a new connection."""
        self._sessions.arrived(peer)
        self._connections[hello.session] = peer
        self._step(search.Offered(hello=hello))

    def disconnected(self, peer: Connection) -> None:
        """Note that a connection broke and this end noticed."""
        if self._sessions.gone(peer):
            hello = peer.hello
            self._step(Disconnected(island=hello.island, session=hello.session))

    def hear(self, event: Event) -> None:
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
        if asked.sample:
            kept, _ = self._kept[fragment]
            compared = AnchorCompared(
                fragment=fragment,
                island=island,
                incarnation=incarnation,
                version=anchor.version,
                equal=anchor.value == kept.value,
                apart=math.inf if anchor.is_made_up or kept.is_made_up else 0.0,
            )
            self._step(compared)
            return
        first = anchor._replace(version=Version(asked.term, anchor.version.number))
        if not self._keep(fragment, first):
            self._clock.after(WRITE_AGAIN_S, lambda: self.anchor(who, asked, anchor))
            return
        self._kept[fragment] = anchor, first
        event = AnchorKept(
            fragment=fragment,
            island=island,
            incarnation=incarnation,
            replaced=anchor.version,
            version=first.version,
            digest=first.value.hex(),
        )
        self._step(event)

    # ---- what was decided -------------------------------------------------------

    def hold(self, message: ToHolder) -> None:
        """See `lead.Holder`."""
        assert isinstance(message, AwaitAnchor)
        if not message.sample:
            others = {
                k: v for k, v in self._awaited.items() if k[0] != message.fragment
            }
            self._awaited = others
        self._awaited[message.fragment, message.island] = message

    def alert(self, text: str, island: str = "") -> None:
        """See `lead.Log`. Nobody reads it."""

    def over(self, end: search.FoundTerm | search.GiveUp) -> None:
        """End the search."""
        if isinstance(end, search.GiveUp):
            self._done(None)
            return
        state, kept = self._engine.state, [self._kept[a.fragment] for a in end.anchors]
        stayed = {
            name: member.offer
            for name, member in state.members.items()
            if member.connected
            and self._clock.now < member.gone_at
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

    def _step(self, event: search.Event) -> None:
        if self._engine.state.phase == "over":
            return
        self._engine.step(event, self._clock.now)
        self._set_timer()

    def _set_timer(self) -> None:
        state = self._engine.state
        at = anchors.next_deadline(state, self._clock.now)
        if state.phase != "over" and at < float("inf"):
            self._clock.at(at, lambda: self._step(Timer()))
