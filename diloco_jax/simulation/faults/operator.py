"""An operator in a world of faults, who admits islands that the config does not name,
and removes them; who exports the run while it goes on, and stops and resumes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.protocol.coordinator.events import KeepAsked
from diloco_jax.protocol.messages import Steer
from diloco_jax.simulation.faults.fault import DrawnFault

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld

LOOKS_EVERY_S = 0.5
"""Seconds between two looks whether all is as it was ordered."""


class Removal(DrawnFault, frozen=True):
    """An operator removes an island, and admits it again after `for_s`.

    The config does not name such an island: it was admitted as the run began.
    """

    island: str
    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        operator = world.operator
        operator.order(self.island, admitted=False)
        world.clock.after(
            self.for_s, lambda: operator.order(self.island, admitted=True)
        )
        return world.begun(self, self.for_s + LOOKS_EVERY_S)


class Export(DrawnFault, frozen=True):
    """An operator exports the run, so that its present cycle is kept."""

    def strike(self, world: FaultyWorld) -> bool:
        coordinator = world.coordinator
        if coordinator is None or coordinator.waits:
            return False
        coordinator.hear(KeepAsked())
        return world.begun(self, 0.0)


class RunStop(DrawnFault, frozen=True):
    """An operator stops all processes, and resumes the run `for_s` later."""

    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        if not world.stop_run(self.for_s):
            return False
        return world.begun(self, self.for_s)


AnyOrder = Removal | Export | RunStop


class Operator:
    """Repeats orders until the coordinator's state follows them: it may be away, or
    have lost its state."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        self._wanted = dict.fromkeys(sorted(world.schedule.scavenged), True)
        """Islands that the config does not name, and whether they are to be let in."""
        self._look()

    def order(self, name: str, *, admitted: bool) -> None:
        """Let an island in, or no longer."""
        self._wanted[name] = admitted
        self.act()

    def act(self) -> None:
        """Give the orders that the coordinator's state does not follow."""
        for name, admitted in self._wanted.items():
            coordinator = self._world.coordinator
            if coordinator is None or coordinator.waits:
                return
            if (name in coordinator.state.admitted) != admitted:
                order = Steer(how="admit" if admitted else "remove", island=name)
                coordinator.hear(order)

    def _look(self) -> None:
        if self._wanted:
            self.act()
            self._world.clock.after(LOOKS_EVERY_S, self._look)
