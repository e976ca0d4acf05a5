"""A coordinator of a fault schedule: it may die or sleep, and invariants watch it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.coordinator.holding.anchors import WRITE_AGAIN_S
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import (
    Event,
    FragmentsLost,
    MachineSlept,
    Persist,
)
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.holding import (
    AnchorKept,
    AwaitAnchor,
    Commit,
    Merge,
    ToHolder,
)
from diloco_jax.protocol.messages import AnchorRequest, Hello
from diloco_jax.protocol.records import Durable
from diloco_jax.protocol.values import DeltaKey, Prepared, Version
from diloco_jax.simulation.faults.arrays import Anchor, Anchors
from diloco_jax.simulation.faults.disk import Disk, DiskError
from diloco_jax.simulation.faults.network import BOTH, Way
from diloco_jax.simulation.faults.observing import Incarnation, Invariant
from diloco_jax.simulation.faults.schedule import RETRY_S, Schedule
from diloco_jax.simulation.virtual.arrays import VirtualFetch
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.coordinator import VirtualCoordinator
from diloco_jax.simulation.virtual.island import Connection


class Surroundings(Protocol):
    """The surroundings of a coordinator; see `world.FaultyWorld`."""

    @property
    def schedule(self) -> Schedule:
        """Schedule that is played."""

    @property
    def config(self) -> PolicyConfig:
        """Config of the run's decisions."""

    @property
    def clock(self) -> Clock:
        """Virtual time."""

    @property
    def disk(self) -> Disk:
        """Disk of the coordinator."""

    @property
    def monitor(self) -> Invariant:
        """Invariants that are told of everything."""

    def persisted(self, by: FaultyCoordinator, record: Durable) -> None:
        """Note a record that is on the disk."""

    def survives(self, coordinator: FaultyCoordinator) -> bool:
        """Tell whether a coordinator lives to carry out its next effect."""

    def disk_failed(self, coordinator: FaultyCoordinator) -> None:
        """End a coordinator that could not write a record."""

    def hold(self, name: str, ways: Iterable[Way], for_s: float) -> None:
        """Hold an island's messages in these directions back."""


class FaultyCoordinator(VirtualCoordinator):
    """One life of a coordinator, with its workers. Its world may end it before any
    effect, or stop it: then what comes waits.

    While a record would find no space on the disk, the record's effects and all events
    wait, as they do for the service's thread.
    """

    def __init__(
        self, world: Surroundings, state: State, anchors: Anchors, clock_offset: float
    ) -> None:
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
        self.monitor: Invariant = world.monitor
        self._effects: deque[AnyEffect] = deque()
        """Decided effects that are not carried out yet."""
        self._later: deque[Callable[[], None]] = deque()
        """Events that came while a record waited for space, or in the middle of one."""
        self._catches_up = False
        self._stopped = False
        self._waiting: list[Callable[[], None]] = []
        """Calls that wait until it is awake."""
        self.lost_fragments: set[int] = set()
        """Fragments that live workers have lost with their disks."""
        self._awaited: dict[int, AwaitAnchor] = {}
        self._kept: dict[int, Anchor] = {}
        """Anchors that are on disk and not committed."""

    def _append_record(self, record: Durable) -> None:
        try:
            self.disk.append(records.line(record))
        except DiskError as failure:
            if failure.complete:
                self.monitor.persisted(record)
            raise
        self.monitor.persisted(record)
        self._world.persisted(self, record)

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

    @property
    def stopped(self) -> bool:
        """True while it does nothing."""
        return self._stopped

    def sleep(self, for_s: float) -> None:
        """Sleep with its machine: nothing reaches it, and its clock stands still."""
        self._stopped = True
        for name in self._world.schedule.islands:
            self._world.hold(name, BOTH, for_s)
        self.clock.after(for_s, lambda: self._wake_up(for_s))

    def _wake_up(self, slept_s: float) -> None:
        """Go on with what came meanwhile."""
        self._stopped = False
        self.slept(slept_s)
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            if not self.dead:
                act()

    def slept(self, seconds: float) -> None:
        """Hear that its own clock stood still for so long, before anything else."""
        self.clock_offset -= seconds
        self.hear(MachineSlept(seconds=seconds))

    def when_awake(self, act: Callable[[], None]) -> None:
        """Do something now, or once its process is no longer stopped."""
        if self._stopped:
            self._waiting.append(act)
        else:
            act()

    def hello(self, hello: Hello, peer: Connection) -> None:
        """See VirtualCoordinator."""
        if self.stopped:
            self.when_awake(functools.partial(self.hello, hello, peer))
        else:
            super().hello(hello, peer)

    def disconnected(self, peer: Connection) -> None:
        """See VirtualCoordinator."""
        if self.stopped:
            self.when_awake(functools.partial(self.disconnected, peer))
        else:
            super().disconnected(peer)

    def go_on(self) -> None:
        """Go on after a wait, now that there is space."""
        self.when_awake(self._go_on)

    def _go_on(self) -> None:
        self._act()
        self._catch_up()
        if not self.dead and not self._effects:
            self._set_timer()

    def hear(self, event: Event) -> None:
        """See VirtualCoordinator."""
        if self.stopped:
            self.when_awake(functools.partial(self.hear, event))
        elif self._effects:
            self._wait(event)
        else:
            super().hear(event)

    def step(self, event: Event, now: float) -> None:
        """See Engine."""
        self._effects.extend(self.decide(event, now))
        self._act()
        if self._later and not self._catches_up:
            self._catch_up()  # With what came in the middle of it.

    def _act(self) -> None:
        """Carry out what is decided, up to a record that finds no space."""
        while self._effects and not self.dead:
            if isinstance(self._effects[0], Persist) and not self.disk.has_space():
                return
            self._pass_on(self._effects.popleft())

    def _catch_up(self) -> None:
        """Handle the events that waited, up to a record that finds no space."""
        self._catches_up = True
        while self._later and not self._effects and not self.dead:
            self._later.popleft()()
        self._catches_up = False

    def _pass_on(self, effect: AnyEffect) -> None:
        self.carry_out(effect)

    def _wait(self, event: Event) -> None:
        came = self.clock.now + self.clock_offset
        self._later.append(lambda: self.step(event, came))

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """See VirtualCoordinator."""
        if self.stopped:
            self.when_awake(functools.partial(self.arrived, key, encoded))
            return
        if key.fragment in self.lost_fragments:
            return
        if key.fragment not in self.dead_fragments:
            self.monitor.arrived(key)
        super().arrived(key, encoded)

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """See VirtualCoordinator; None also for what is lost, or not committed yet, and
        while it is stopped, or dead."""
        if self.stopped or self.dead:
            return None
        here = self.anchors.anchors[fragment].version
        if (
            fragment in self.lost_fragments
            or here < self.state.fragments[fragment].version
        ):
            return None
        return super().fetch(fragment, want, have)

    def lose(self, fragments: Iterable[int]) -> None:
        """See VirtualCoordinator."""
        super().lose(fragments)
        for fragment in fragments:
            self._awaited.pop(fragment, None)
            self._kept.pop(fragment, None)

    # ---- its workers ----------------------------------------------------------------

    def has(self, fragment: int) -> bool:
        """Tell whether a fragment's worker is there, and has it."""
        return not (fragment in self.dead_fragments or fragment in self.lost_fragments)

    def hold(self, message: ToHolder) -> None:
        """See VirtualCoordinator."""
        if isinstance(message, AwaitAnchor):
            if message.fragment not in self.dead_fragments:
                self._awaited[message.fragment] = message
        elif isinstance(message, Commit) and message.fragment in self.lost_fragments:
            if message.fragment not in self.dead_fragments:
                self._begin_term(message)
        else:
            super().hold(message)

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
        self.when_awake(functools.partial(self._anchor, who, asked, anchor, wanted))

    def _anchor(
        self,
        who: Incarnation,
        asked: AnchorRequest,
        anchor: Anchor,
        wanted: Callable[[], bool],
    ) -> None:
        fragment, awaited = asked.fragment, self._awaited.get(asked.fragment)
        if self.dead or fragment in self.dead_fragments:
            return
        again = functools.partial(self.anchor, who, asked, anchor, wanted)
        if awaited is None or (awaited.island, awaited.incarnation, awaited.term) != (
            *who,
            asked.term,
        ):
            if fragment in self.lost_fragments:
                self.clock.after(RETRY_S, lambda: again() if wanted() else None)
            return
        first = anchor._replace(version=Version(asked.term, anchor.version.number))
        if not self.disk.begin_fragment(fragment, first):
            self.clock.after(WRITE_AGAIN_S, again)
            return
        self._kept[fragment] = first
        digest, monitor = first.value.hex(), self.monitor
        monitor.worker_back([fragment])
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

    def _prepare(self, merge: Merge, prepared: Prepared) -> None:
        if self.stopped:
            self.when_awake(functools.partial(self._prepare, merge, prepared))
        else:
            super()._prepare(merge, prepared)

    def _begin_term(self, commit: Commit) -> None:
        """Make a kept anchor visible."""
        self.anchors.load(commit.fragment, self._kept.pop(commit.fragment))
        self._awaited.pop(commit.fragment, None)
        self.lost_fragments.discard(commit.fragment)

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
        world = self._world
        if not world.survives(self):
            return
        self.monitor.carrying_out(effect)
        try:
            super().carry_out(effect)
        except DiskError:
            world.disk_failed(self)
        if isinstance(effect, Commit) and self.has(effect.fragment):
            anchor = self.anchors.anchors[effect.fragment]
            self.monitor.published(effect.fragment, anchor)
