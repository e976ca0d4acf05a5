"""A world whose coordinator dies at given merges, and comes back from its log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from diloco_jax.cluster.restarts import crashes_in_a_row
from diloco_jax.config import RunConfig
from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.events import Merge
from diloco_jax.protocol.coordinator.state import PolicyConfig, initial
from diloco_jax.protocol.records import Durable, Merged
from diloco_jax.simulation.virtual.body import Body
from diloco_jax.simulation.virtual.coordinator import VirtualCoordinator
from diloco_jax.simulation.virtual.island import VirtualIsland
from diloco_jax.simulation.virtual.line import Line, LineSpeed
from diloco_jax.simulation.virtual.merging import Merging
from diloco_jax.simulation.virtual.world import World


class MortalWorld(World):
    """As `World`, and every island has a line of its own speed.

    dies_at: merges that are the last thing a coordinator does; their records are in
      the log.
    down_s: until the next one is there. resume_s: from then until an island is back.
    compiled_s, recompiled_s: until the first one, or the next one from when it is
      there, has compiled what merges need; merges wait for it.
    """

    def __init__(
        self,
        run: RunConfig,
        config: PolicyConfig,
        merging: Merging,
        *,
        report_s: float,
        line_speeds: Mapping[str, LineSpeed],
        make_body: Callable[[str], Body],
        merge_seconds: float,
        compiled_s: float,
        recompiled_s: float,
        dies_at: Iterable[int],
        down_s: float,
        resume_s: float,
    ) -> None:
        super().__init__(
            run,
            config,
            merging,
            report_s=report_s,
            make_body=make_body,
            persist=self._persist,
            merge_seconds=self._merge_time,
        )
        self._config, self._merging = config, merging
        self._line_speeds, self._merge_seconds = line_speeds, merge_seconds
        self._dies_at = frozenset(dies_at)
        self._down_s, self._resume_s = down_s, resume_s
        self._compiled_at, self._recompiled_s = compiled_s, recompiled_s
        self.crashes = 0
        """Of the coordinator in a row, at most."""
        self._in_a_row, self._began = 0, 0.0
        self._log: list[Durable] = []
        self._merges = 0
        self._away = False

    def connect(self, island: VirtualIsland) -> None:
        """See World; while nobody serves, it waits."""
        if not self._away:
            speed = self._line_speeds[island.name]
            island.connect(self.coordinator, Line(self.clock, speed))

    def _persist(self, record: Durable) -> None:
        self._log.append(record)
        if isinstance(record, Merged):
            self._merges += 1
            if self._merges in self._dies_at:
                self._die()

    def _die(self) -> None:
        self._away = True
        lived_s = self.clock.now - self._began
        self._in_a_row = crashes_in_a_row(self._in_a_row, lived_s)
        self.crashes = max(self.crashes, self._in_a_row)
        self.coordinator.die()
        for island in self.islands.values():
            island.disconnect()
        self.clock.after(self._down_s, self._recover)

    def _recover(self) -> None:
        config, now = self._config, self.clock.now
        self._began, self._compiled_at = now, now + self._recompiled_s
        self.coordinator = VirtualCoordinator(
            config,
            self.clock,
            recovery.recover(config, initial(config), self._log, now),
            self._merging,
            self._persist,
            merge_seconds=self._merge_time,
        )
        self.clock.after(self._resume_s, self._resume)

    def _resume(self) -> None:
        self._away = False
        for island in self.islands.values():
            if island.ended is None and island.line is None:
                self.connect(island)

    def _merge_time(self, merge: Merge) -> float:
        return max(self._compiled_at - self.clock.now, 0.0) + self._merge_seconds
