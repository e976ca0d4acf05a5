"""A coordinator whose workers are on other machines: it decides, and holds nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.holding import ToHolder
from diloco_jax.protocol.messages import AnchorRequest
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.simulation.faults.arrays import Anchor, Anchors
from diloco_jax.simulation.faults.observing import Incarnation
from diloco_jax.simulation.faults.stoppable import StoppableCoordinator
from diloco_jax.simulation.virtual.arrays import VirtualFetch

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.apart_lead import Leading
    from diloco_jax.simulation.faults.apart_world import ApartWorld


class ApartCoordinator(StoppableCoordinator):
    """One life of a coordinator. What islands send goes to its workers, which are
    there while it is stopped, and once it is dead."""

    def __init__(
        self, world: ApartWorld, leading: Leading, state: State, clock_offset: float
    ) -> None:
        super().__init__(world, state, Anchors(()), clock_offset)
        self._apart_world, self._workers = world, leading
        self._worker_of = world.worker_of

    @property
    def waits(self) -> bool:
        """See StoppableCoordinator; True as well once it has ended."""
        return super().waits or self.dead

    def sleep(self, for_s: float) -> None:
        """See StoppableCoordinator. Islands and workers reach each other."""
        self._stopped = True
        self.clock.after(for_s, lambda: self._wake_up(for_s))
        self._apart_world.lead_sleeps(self, for_s)

    def in_turn(self, act: Callable[[], None]) -> None:
        """Do something after all events that wait for space."""
        if self._effects:
            self._later.append(act)
        else:
            act()

    def has(self, fragment: int) -> bool:
        """See FaultyCoordinator: here is no fragment."""
        return False

    def hold(self, message: ToHolder) -> None:
        """See VirtualCoordinator."""
        self._workers.hold(message)

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """See VirtualCoordinator."""
        process = self._worker_of(key.fragment).process
        if process is not None:
            process.upload(key, encoded)

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """See VirtualCoordinator. A lead that has died may know less than the
        island."""
        process = self._worker_of(fragment).process
        return None if process is None else process.fetch(fragment, want, have)

    def anchor(
        self,
        who: Incarnation,
        asked: AnchorRequest,
        anchor: Anchor,
        wanted: Callable[[], bool],
    ) -> None:
        """See FaultyCoordinator."""
        process = self._worker_of(asked.fragment).process
        if process is not None:
            process.anchor(who, asked, anchor, wanted)
