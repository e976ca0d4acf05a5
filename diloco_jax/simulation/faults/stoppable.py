"""A coordinator that may be stopped: what comes meanwhile waits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol.coordinator.events import Event, MachineSlept
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import AnchorRequest, Hello
from diloco_jax.protocol.values import DeltaKey, Prepared, Version
from diloco_jax.simulation.faults.arrays import Anchor, Anchors
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.network import BOTH
from diloco_jax.simulation.faults.observing import Incarnation
from diloco_jax.simulation.virtual.arrays import VirtualFetch
from diloco_jax.simulation.virtual.island import Connection

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld


class StoppableCoordinator(FaultyCoordinator):
    """One life of a coordinator that is not always awake, with its workers."""

    def __init__(
        self, world: FaultyWorld, state: State, anchors: Anchors, clock_offset: float
    ) -> None:
        super().__init__(world, state, anchors, clock_offset)
        self._stopped = False
        self._waiting: list[Callable[[], None]] = []
        """Calls that wait until it is awake."""

    @property
    def stopped(self) -> bool:
        """True while it does nothing."""
        return self._stopped

    @property
    def waits(self) -> bool:
        """See FaultyCoordinator; True as well while it is stopped."""
        return super().waits or self.stopped

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
        """See FaultyCoordinator."""
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

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """See VirtualCoordinator."""
        if self.stopped:
            self.when_awake(functools.partial(self.arrived, key, encoded))
        else:
            super().arrived(key, encoded)

    def anchor(
        self,
        who: Incarnation,
        asked: AnchorRequest,
        anchor: Anchor,
        wanted: Callable[[], bool],
    ) -> None:
        """See FaultyCoordinator."""
        take_in = functools.partial(super().anchor, who, asked, anchor, wanted)
        self.when_awake(take_in)

    def hear(self, event: Event) -> None:
        """See VirtualCoordinator."""
        if self.stopped:
            self.when_awake(functools.partial(self.hear, event))
        else:
            super().hear(event)

    def go_on(self) -> None:
        """See FaultyCoordinator."""
        self.when_awake(super().go_on)

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """See VirtualCoordinator; None also while it is stopped, or dead."""
        if self.stopped or self.dead:
            return None
        return super().fetch(fragment, want, have)

    def _prepare(self, merge: Merge, prepared: Prepared) -> None:
        if self.stopped:
            self.when_awake(functools.partial(self._prepare, merge, prepared))
        else:
            super()._prepare(merge, prepared)
