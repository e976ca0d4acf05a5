"""The snapshots of a world of faults: fragment by fragment, then the state."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from diloco_jax.simulation.faults.fault import DrawnFault

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld

ROUND_EVERY_S = 6.0
"""Seconds for a round of snapshots of all fragments."""
ROUND_S = 0.7
"""Seconds for writing all fragments, while the run goes on."""


class SnapshotRounds:
    """Write the snapshots of whoever leads."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        self._failures: list[DrawnFault] = []

    def begin(self) -> None:
        """Write the first one in its turn."""
        self._later(0)

    def fail(self, fault: DrawnFault) -> None:
        """Arm a failure of the next snapshot."""
        self._failures.append(fault)

    def _later(self, fragment: int) -> None:
        world = self._world
        every_s = ROUND_EVERY_S / world.config.fragments
        world.clock.after(every_s, functools.partial(self._write, fragment))

    def _write(self, fragment: int) -> None:
        """Write a fragment; after the last one, the state. The next has its turn."""
        world, count = self._world, self._world.config.fragments
        self._later((fragment + 1) % count)
        coordinator, disk = world.coordinator, world.disk
        if coordinator is None or coordinator.waits or not coordinator.has(fragment):
            return
        newest, state = coordinator.anchors.anchors, coordinator.state
        anchor = newest[fragment]
        number = disk.rotate() if fragment == count - 1 else None
        if self._failures:
            world.begun(self._failures.pop(), 0.0)
            return

        def complete() -> None:
            if (
                world.coordinator is not coordinator
                or not coordinator.has(fragment)
                or anchor.version.term != newest[fragment].version.term
            ):
                return
            if disk.save_fragment(fragment, anchor):
                world.monitor.cut(
                    fragment, disk.saved(fragment), disk.published(fragment)
                )
            if number is not None:
                disk.save_state(number, state)

        world.clock.after(ROUND_S / count, complete)
