"""Coordinator and islands that are watched and that may die."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_jax.config import RunConfig
from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.core.adopt import RULES as ADOPT_RULES
from diloco_jax.protocol.coordinator.events import Event, Persist
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.holding import Commit
from diloco_jax.protocol.values import DeltaKey
from diloco_jax.simulation.faults.arrays import Anchors, DigestBody
from diloco_jax.simulation.faults.disk import DiskError
from diloco_jax.simulation.faults.gatherer import VirtualGatherer
from diloco_jax.simulation.faults.invariants import Monitor
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.connection import Connection
from diloco_jax.simulation.virtual.coordinator import VirtualCoordinator
from diloco_jax.simulation.virtual.island import IslandSpec, VirtualIsland

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld


class FaultyCoordinator(VirtualCoordinator):
    """One life of a coordinator. Its world may end it before any effect.

    While a record would find no space on the disk, the record's effects and all events
    wait, as they do for the service's thread.
    """

    def __init__(
        self, world: FaultyWorld, state: State, anchors: Anchors, clock_offset: float
    ) -> None:
        super().__init__(
            world.config,
            world.clock,
            state,
            anchors,
            world.persist,
            merge_seconds=lambda merge: world.schedule.merge_s,
            clock_offset=clock_offset,
            written=functools.partial(world.write, anchors),
        )
        self.anchors, self._world = anchors, world
        self._effects: deque[AnyEffect] = deque()
        """Decided effects that are not carried out yet."""
        self._later: deque[Callable[[], None]] = deque()
        """Events that came while a record waited for space."""

    @property
    def waits(self) -> bool:
        """True while a record waits for space."""
        return bool(self._effects)

    def go_on(self) -> None:
        """Go on after a wait, now that there is space."""
        self._act()
        while self._later and not self._effects and not self.dead:
            self._later.popleft()()
        if not self.dead and not self._effects:
            self._set_timer()

    def hear(self, event: Event) -> None:
        """See VirtualCoordinator."""
        if self._effects:
            self._wait(event)
        else:
            super().hear(event)

    def step(self, event: Event, now: float) -> None:
        """See Engine."""
        self._effects.extend(self.decide(event, now))
        self._act()

    def _act(self) -> None:
        """Carry out what is decided, up to a record that finds no space."""
        while self._effects and not self.dead:
            if (
                isinstance(self._effects[0], Persist)
                and not self._world.disk.has_space()
            ):
                return
            self.carry_out(self._effects.popleft())

    def _wait(self, event: Event) -> None:
        came = self.clock.now + self.clock_offset
        self._later.append(lambda: self.step(event, came))

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """See VirtualCoordinator."""
        if key.fragment not in self.dead_fragments:
            self._world.monitor.arrived(key)
        super().arrived(key, encoded)

    def decide(self, event: Event, now: float) -> list[AnyEffect]:
        effects = super().decide(event, now)
        self._world.monitor.decided(self.state, effects)
        return effects

    def carry_out(self, effect: AnyEffect) -> None:
        self._world.worker_crashes.strike_if_due()
        if not self._world.survives():
            return
        self._world.monitor.carrying_out(effect)
        try:
            super().carry_out(effect)
        except DiskError:
            self._world.disk_failed()
        if isinstance(effect, Commit) and effect.fragment not in self.dead_fragments:
            anchor = self.anchors.anchors[effect.fragment]
            self._world.monitor.published(effect.fragment, anchor)


class FaultyIsland(VirtualIsland):
    """One incarnation.

    refused: called if the coordinator refuses it or puts it out. postponed: called with
    a connection that the coordinator ends so that the island comes again.
    """

    def __init__(
        self,
        spec: IslandSpec,
        incarnation: int,
        run: RunConfig,
        clock: Clock,
        report_s: float,
        monitor: Monitor,
        refused: Callable[[FaultyIsland], None],
        postponed: Callable[[Connection], None],
    ) -> None:
        self.who = (spec.name, incarnation)
        self.body = DigestBody(
            ADOPT_RULES.find(run.sync.adopt),
            functools.partial(self._seen, monitor.adopted),
            functools.partial(self._seen, monitor.trained),
        )
        self.takes: Counter[int] = Counter()
        """Takes by fragment."""
        self._monitor, self._refused, self._postponed = monitor, refused, postponed
        super().__init__(spec, incarnation, run, clock, self.body, report_s)

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        assert self.boundary is not None
        self.takes[fragment] += 1
        for take in self.boundary.books.outstanding():
            if take.fragment == fragment:
                self._seen(self._monitor.took, take, encoded)
        super().put(fragment, tick, encoded)

    def send_anchor(self, fragment: int) -> None:
        line, gatherer = self.line, self._coordinator
        if line is None or not isinstance(gatherer, VirtualGatherer):
            return
        anchor = self.body.anchor(fragment)
        line.upload(0, lambda: gatherer.anchor(self.who, fragment, anchor))

    def turned_away(self, reason: str) -> None:
        super().turned_away(reason)
        self._refused(self)

    def postponed(self, connection: Connection) -> None:
        self._postponed(connection)

    def _seen(
        self, observe: Callable[..., None], *observation: Any, **facts: Any
    ) -> None:
        """Pass an observation on, if its process is in the run."""
        if self._monitor.names.belong_to(self.who, self.session):
            observe(self.who, *observation, **facts)
