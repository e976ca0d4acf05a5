"""A coordinator that leads by the mandate: effects wait at the production gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.coordinator.standby.gate import Gate
from diloco_jax.coordinator.standby.seat import LAPSED
from diloco_jax.coordinator.standby.unseated import Unseated
from diloco_jax.protocol.coordinator.events import (
    Alert,
    AnchorWaits,
    Ignored,
    Note,
    Persist,
)
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.holding import AnchorKept
from diloco_jax.protocol.records import Durable
from diloco_jax.simulation.faults.arrays import Anchors
from diloco_jax.simulation.faults.observing import Invariant
from diloco_jax.simulation.faults.standby_disk import FollowedDisk
from diloco_jax.simulation.faults.stoppable import StoppableCoordinator

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.standby_node import Node
    from diloco_jax.simulation.faults.standby_world import StandbyWorld

UNSEEN = (Persist, Note, Ignored, Alert)
"""Effects that no island and no worker sees."""


class _VirtualSeat(Unseated):
    """The part of a seat that a gate asks."""

    def __init__(self, coordinator: SeatedCoordinator) -> None:
        self._coordinator = coordinator
        self.let_through = 0
        """Number up to which something was let through."""

    @property
    def written(self) -> int:
        """See `Unseated`."""
        return self._coordinator.node.written

    def may_show(self, number: int) -> bool:
        """See `Unseated`."""
        may = not self._coordinator.dead and self._coordinator.node.may_show(number)
        if may:
            self.let_through = max(self.let_through, number)
        return may


class SeatedCoordinator(StoppableCoordinator):
    """One life of a coordinator on a node, which may be stopped."""

    def __init__(
        self,
        world: StandbyWorld,
        node: Node,
        state: State,
        anchors: Anchors,
        clock_offset: float,
    ) -> None:
        super().__init__(world, state, anchors, clock_offset)
        self.node, self._standby_world = node, world
        self.disk: FollowedDisk = node.disk
        self._begun_at = node.disk.last
        """Number of the run's record that the first one of this life follows."""
        self._seat = _VirtualSeat(self)
        self._gate = Gate(self.carry_out, self._seat)
        self._nudged = False

    @property
    def finished(self) -> bool:
        """True once the run is over, and anyone may know."""
        return super().finished and self._gate.empty

    @property
    def waits(self) -> bool:
        """See StoppableCoordinator; True as well once it has ended."""
        return super().waits or self.dead

    @property
    def stopped(self) -> bool:
        """See StoppableCoordinator."""
        return self.node.paused

    def sleep(self, for_s: float) -> None:
        """See StoppableCoordinator; the clock of the mandate counts sleep."""
        self._standby_world.stop(self.node, for_s, asleep=True)

    @property
    def seen_through(self) -> int:
        """Number of the run's last record of which somebody may have seen something."""
        return self._begun_at + self._seat.let_through

    def depose(self) -> None:
        """Be observed no longer: another one has the run's log."""
        self.monitor = Invariant(self.config)

    @property
    def deposed(self) -> bool:
        """True once another one has the run's log."""
        return type(self.monitor) is Invariant

    def nudge(self) -> None:
        """Let through soon what may be seen."""
        if not self._nudged and not self._gate.empty:
            self._nudged = True
            self.clock.after(0.0, lambda: self.node.act(self._flush))

    def _flush(self) -> None:
        self._nudged = False
        if not self.dead:
            self._gate.flush()

    def end_sessions(self) -> None:
        """End all sessions, since the mandate has run out."""
        self._sessions.end_all(LAPSED)

    # ---- effects --------------------------------------------------------------------

    def _pass_on(self, effect: AnyEffect) -> None:
        self._gate.carry_out(effect)

    def carry_out(self, effect: AnyEffect) -> None:
        """See Engine; called by the gate."""
        if self.dead:
            return
        if not isinstance(effect, UNSEEN):
            self._standby_world.shows(self)
        super().carry_out(effect)
        if isinstance(effect, Note) and not self.dead:
            self.disk.note()
            self.node.wrote()

    def _append_record(self, record: Durable) -> None:
        super()._append_record(record)
        self.node.wrote()

    def _anchor_is_here(self, kept: AnchorKept) -> None:
        """Hear of it once the standby has it, unless its worker has died since."""
        schedule, anchor = self._world.schedule, self._kept[kept.fragment]
        assert schedule.standby is not None
        waits = AnchorWaits(
            fragment=kept.fragment, island=kept.island, incarnation=kept.incarnation
        )
        self.hear(waits)

        def tell() -> None:
            if self._kept.get(kept.fragment) is anchor:
                self.hear(kept)

        self.clock.after(schedule.standby.copy_s, tell)

    # ---- what comes while it is stopped ---------------------------------------------

    def after_shown(self, act: Callable[[], None]) -> None:
        """See FaultyCoordinator."""
        self._gate.when_shown(act)

    def when_awake(self, act: Callable[[], None]) -> None:
        """See FaultyCoordinator."""
        self.node.act(act)
