"""An island that says it is faster than it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.simulation.faults.fault import DrawnFault

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld


class Boast(DrawnFault, frozen=True):
    """An island says that its steps take `factor` of their time, for a while or until
    its process ends."""

    island: str
    for_s: float
    factor: float

    def strike(self, world: FaultyWorld) -> bool:
        island = world.islands[self.island]
        if island.ended is not None:
            return False
        island.boast = self.factor

        def end() -> None:
            island.boast = 1.0

        world.clock.after(self.for_s, end)
        return world.begun(self, self.for_s)
