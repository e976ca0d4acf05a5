"""Expectations of a world of faults: that they strike, and that progress follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.observing import ViolationError
from diloco_jax.simulation.faults.schedule import PATIENCE_S

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.world import FaultyWorld


class Expectations:
    """Progress is expected from the time at which the last fault has ended, and after
    each extension anew."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        faults = world.schedule.faults
        self._left = sum(not fault.awaits_end for fault in faults)
        """Faults that have not ended."""
        self._down = False
        """All processes have ended, and start again to extend the run."""

    def begin(self) -> None:
        """Expect that all faults strike in time."""
        self._expect_if_calm()
        self._world.clock.after(PATIENCE_S, self._out_of_patience)

    def begin_again(self, after_s: float) -> None:
        """Expect progress of a run that is extended, once its processes have started;
        nothing else any more."""
        self._down = True
        self._world.clock.after(after_s, self._is_up)

    def _is_up(self) -> None:
        self._down = False
        self._expect_if_calm()

    def fault_ended(self) -> None:
        """Expect that the run goes on, if it was the last one."""
        self._left -= 1
        self._expect_if_calm()

    def _expect_if_calm(self) -> None:
        if not self._left and not self._down:
            self._expect()

    def _out_of_patience(self) -> None:
        if self._left:
            what = f"not all faults have struck within {PATIENCE_S} s"
            raise ViolationError(liveness.NAME, what)

    def _expect(self) -> None:
        world, extensions = self._world, self._world.extensions
        schedule, clock = world.schedule, world.clock

        def is_extended() -> bool:
            return world.extensions > extensions

        def is_running() -> bool:
            lead = world.coordinator
            return not is_extended() and (lead is None or lead.state.phase == "running")

        def takes() -> Mapping[tuple[str, int], int]:
            return {
                (name, fragment): island.takes[fragment]
                for name, island in world.islands.items()
                for fragment in range(world.config.fragments)
            }

        liveness.expect(
            "merges of fragments",
            lambda: dict(enumerate(world.merges)),
            clock,
            liveness.merges_within_s(schedule),
            is_running,
        )
        liveness.expect(
            "takes of islands' fragments",
            takes,
            clock,
            liveness.takes_within_s(schedule),
            is_running,
        )
        over_s = liveness.over_within_s(schedule, world.config.total_tokens)
        liveness.expect_end(clock, over_s, is_extended)
