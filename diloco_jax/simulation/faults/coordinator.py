"""The coordinators of a fault schedule: one that leads, and one that has lost its state
and gathers anchors. Invariants watch the first, which may die or sleep."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Concatenate, ParamSpec

from diloco_jax.coordinator.engine import AnyEffect, Engine
from diloco_jax.coordinator.holding.anchors import WRITE_AGAIN_S
from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import gathering
from diloco_jax.protocol.coordinator.events import (
    Disconnected,
    Event,
    FragmentsLost,
    MachineSlept,
    Persist,
    Said,
    Timer,
)
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.holding import AnchorKept, AwaitAnchor, Commit, Merge, ToHolder
from diloco_jax.protocol.messages import AnchorRequest, Goodbye, Hello
from diloco_jax.protocol.records import Durable
from diloco_jax.protocol.values import DeltaKey, Prepared, Version
from diloco_jax.simulation.faults.arrays import Anchor, Anchors
from diloco_jax.simulation.faults.disk import Disk, DiskError
from diloco_jax.simulation.faults.facts import Incarnation, Opened
from diloco_jax.simulation.faults.invariants import Monitor
from diloco_jax.simulation.faults.schedule import RETRY_S
from diloco_jax.simulation.virtual.arrays import VirtualFetch
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.coordinator import VirtualCoordinator
from diloco_jax.simulation.virtual.island import Connection

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
        self, world: Any, state: State, anchors: Anchors, clock_offset: float
    ) -> None:
        """world: its `world.FaultyWorld`."""
        super().__init__(
            world.config,
            world.clock,
            state,
            anchors,
            self._append_record,
            merge_seconds=lambda merge: world.schedule.merge_s,
            clock_offset=clock_offset,
            written=self._write_publish,
        )
        self.anchors, self._world = anchors, world
        self.disk: Disk = world.disk
        self.monitor: Monitor = world.monitor
        self._effects: deque[AnyEffect] = deque()
        """Decided effects that are not carried out yet."""
        self._later: deque[Callable[[], None]] = deque()
        """Events that came while a record waited for space, or in the middle of one."""
        self._catches_up = False
        self.stopped = False
        """True while it does nothing."""
        self._waiting: list[Callable[[], None]] = []
        """Calls that wait until it is awake."""
        self.lost_fragments: set[int] = set()
        """Fragments that live workers have lost with their disks."""
        self._awaited: dict[int, AwaitAnchor] = {}
        self._kept: dict[int, Anchor] = {}
        """Anchors that are on disk and not committed."""

    # ---- its disk -------------------------------------------------------------------

    def _append_record(self, record: Durable) -> None:
        try:
            self.disk.append(records.line(record))
        except DiskError as failure:
            if failure.complete:
                self.monitor.persisted(record)
            raise
        self.monitor.persisted(record)

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
        if isinstance(event, FragmentsLost):
            monitor.lost(event.fragments)
        monitor.decided(self.state, effects)
        if before.phase in ("stopping", "flushing"):
            monitor.ending(before, self.state, now)
        return effects

    def carry_out(self, effect: AnyEffect) -> None:
        if not self._world.survives(self):
            return
        self.monitor.carrying_out(effect)
        try:
            super().carry_out(effect)
        except DiskError:
            self._world.disk_failed(self)
        if isinstance(effect, Commit):
            fragment = effect.fragment
            if self.has(fragment):
                self.monitor.published(fragment, self.anchors.anchors[fragment])

    # ---- its workers ----------------------------------------------------------------

    def has(self, fragment: int) -> bool:
        """Tell whether a fragment's worker is there, and has it."""
        return not (fragment in self.dead_fragments or fragment in self.lost_fragments)

    @awake
    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        if key.fragment not in self.lost_fragments:
            if key.fragment not in self.dead_fragments:
                self.monitor.arrived(key)
            super().arrived(key, encoded)

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """See VirtualCoordinator; None also for what is lost, or not committed yet, and
        while it is stopped, or dead."""
        if self.stopped or self.dead or fragment in self.lost_fragments:
            return None
        committed = self.state.fragments[fragment].version
        if self.anchors.anchors[fragment].version < committed:
            return None
        return super().fetch(fragment, want, have)

    def lose(self, fragments: Iterable[int]) -> None:
        super().lose(fragments)
        for fragment in fragments:
            self._awaited.pop(fragment, None)
            self._kept.pop(fragment, None)

    def hold(self, message: ToHolder) -> None:
        if isinstance(message, AwaitAnchor):
            if message.fragment not in self.dead_fragments:
                self._awaited[message.fragment] = message
        elif isinstance(message, Commit) and message.fragment in self.lost_fragments:
            if message.fragment not in self.dead_fragments:
                self._begin_term(message)
        else:
            super().hold(message)

    @awake
    def anchor(
        self,
        who: Incarnation,
        asked: AnchorRequest,
        anchor: Anchor,
        wanted: Callable[[], bool],
    ) -> None:
        """Take in an anchor that has arrived at a worker; write it to disk. A worker
        that has not heard yet who was asked is busy: the island comes again, as long as
        the anchor is `wanted`."""
        fragment, monitor = asked.fragment, self.monitor
        if self.dead or fragment in self.dead_fragments:
            return
        again = functools.partial(self.anchor, who, asked, anchor, wanted)
        of = self._awaited.get(fragment)
        if of is None or (of.island, of.incarnation, of.term) != (*who, asked.term):
            if fragment in self.lost_fragments:
                self.clock.after(RETRY_S, lambda: again() if wanted() else None)
            return
        first = anchor._replace(version=Version(asked.term, anchor.version.number))
        if not self.disk.begin_fragment(fragment, first):
            self.clock.after(WRITE_AGAIN_S, again)
            return
        self._kept[fragment] = first
        digest = first.value.hex()
        monitor.prepared(fragment, first.version, digest)
        kept = AnchorKept(
            fragment=fragment,
            island=who[0],
            incarnation=who[1],
            replaced=anchor.version,
            version=first.version,
            digest=digest,
        )
        self.hear(kept)

    def _begin_term(self, commit: Commit) -> None:
        """Make a kept anchor visible."""
        self.anchors.load(commit.fragment, self._kept.pop(commit.fragment))
        self._awaited.pop(commit.fragment, None)
        self.lost_fragments.discard(commit.fragment)


class VirtualGatherer:
    """A coordinator without state: the product's engine over the half that gathers
    anchors.

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
        self._engine: Engine[gathering.Gathering, gathering.Event] = Engine(
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
        self._step(gathering.Offered(hello=hello))

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

    def anchor(
        self,
        who: Incarnation,
        asked: AnchorRequest,
        anchor: Anchor,
        wanted: Callable[[], bool],
    ) -> None:
        """Take in an anchor that has arrived."""
        fragment, state = asked.fragment, self._engine.state
        island, incarnation = who
        awaited = state.asked.get(fragment)
        if awaited is not None and awaited.island == island:
            self._anchors[fragment] = anchor
        if island in state.members:
            came = gathering.AnchorArrived(
                island=island,
                incarnation=incarnation,
                fragment=fragment,
                version=anchor.version,
            )
            self._step(came)

    # ---- what was decided -------------------------------------------------------

    def alert(self, text: str, island: str = "") -> None:
        """See engine.AnchorHolder. Nobody reads it."""

    def discard(self, discard: gathering.Discard) -> None:
        """See engine.AnchorHolder. Keeps the anchor, which the next one overwrites."""

    def open(self, opened: gathering.Open) -> None:
        got = [self._anchors[f] for f in range(self.config.fragments)]
        state = self._engine.state
        failed = {name for name, _ in state.failed}
        stayed = {
            name: member.offer
            for name, member in state.members.items()
            if member.connected
            and self._clock.now < member.gone_at
            and name not in failed
        }
        anchors = zip(got, opened.versions, strict=True)
        term = Opened(
            state=gathering.first_state(self.config, opened),
            anchors=tuple(Anchor(version, anchor.value) for anchor, version in anchors),
            replaced=tuple(got),
            offers=stayed,
        )
        self._done(term)

    def give_up(self, reason: gathering.GiveUp) -> None:
        self._done(None)

    def _step(self, event: gathering.Event) -> None:
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


Peer = FaultyCoordinator | VirtualGatherer
