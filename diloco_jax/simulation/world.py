"""Coordinator, islands and the lines between them, in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from diloco_jax.config import RunConfig
from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.state import PolicyConfig, initial
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.records import Durable, Merged
from diloco_jax.simulation.clock import Clock, Line, LineSpeed
from diloco_jax.simulation.coordinator import Merging, VirtualCoordinator
from diloco_jax.simulation.island import Body, IslandSpec, NoBody, VirtualIsland


class World:
    """A run whose connections never fail; islands come and go.

    make_body: makes the body of an incarnation of the named island.
    persist, alert: see `VirtualCoordinator`.
    report_s: longest time in seconds between two reports of an island.
    outages: seconds for which the coordinator is away, by the number of merges after
      which it dies, before an island is told of the last one. It comes back with what
      its records say; merges that it had begun are lost. A fault while it is away
      meets nobody.
    """

    def __init__(
        self,
        run: RunConfig,
        config: PolicyConfig,
        merging: Merging,
        *,
        report_s: float,
        line_speed: LineSpeed | None = None,
        make_body: Callable[[str], Body] = lambda name: NoBody(),
        persist: Callable[[Durable], None] = lambda record: None,
        alert: Callable[[str], None] = lambda text: None,
        merge_seconds: Callable[[Merge], float] = lambda merge: 0.0,
        outages: Mapping[int, float] | None = None,
    ) -> None:
        self.clock = Clock()
        self._config, self._outages = config, dict(outages or {})
        self._tell_persisted = persist
        self._lives_from = functools.partial(
            VirtualCoordinator,
            config,
            self.clock,
            merging=merging,
            persist=self._persist if self._outages else persist,
            alert=alert,
            merge_seconds=merge_seconds,
        )
        self.coordinator = self._lives_from(initial(config))
        """Present life of the coordinator, or the last one while it is away."""
        self.away = False
        """True while no coordinator serves."""
        self.islands: dict[str, VirtualIsland] = {}
        """Newest incarnation of each island, by name."""
        self._run, self._report_s = run, report_s
        self._line_speed = line_speed or LineSpeed()
        self._make_body = make_body
        self._log: list[Durable] = []
        """Records from which the coordinator comes back; empty if it has no outages."""
        self._merges = 0

    def start(self, spec: IslandSpec) -> VirtualIsland:
        """Start a new incarnation of an island, which says hello."""
        before = self.islands.get(spec.name)
        incarnation = 1 if before is None else before.incarnation + 1
        body = self._make_body(spec.name)
        island = VirtualIsland(
            spec, incarnation, self._run, self.clock, body, self._report_s
        )
        self.islands[spec.name] = island
        self.connect(island)
        return island

    def connect(self, island: VirtualIsland) -> None:
        """Give the island a line, on which it says hello; while no coordinator serves,
        it waits.
        """
        if not self.away:
            island.connect(self.coordinator, Line(self.clock, self._line_speed))

    def kill(self, name: str) -> None:
        """Kill the island's process; its connection breaks at once."""
        island = self.islands[name]
        island.die()
        if island.peer is not None:
            self.coordinator.disconnected(island.peer)

    def run(self, until: float = float("inf")) -> None:
        """Run until the run is over, at most until `until` (seconds)."""
        self.clock.run(until, lambda: self.coordinator.finished)

    # ---- failures of the coordinator -----------------------------------------------

    def _persist(self, record: Durable) -> None:
        self._log.append(record)
        self._tell_persisted(record)
        if isinstance(record, Merged):
            self._merges += 1
            away_s = self._outages.get(self._merges)
            if away_s is not None:
                # Once the effects of the record are carried out: arrays are as the log
                # says. All that they send is still under way.
                self.clock.after(0.0, functools.partial(self._die, away_s))

    def _die(self, away_s: float) -> None:
        if self.away or self.coordinator.finished:
            return
        self.away = True
        self.coordinator.die()
        for island in self.islands.values():
            island.disconnect()
        self.clock.after(away_s, self._recover)

    def _recover(self) -> None:
        self.away = False
        config, log, now = self._config, self._log, self.clock.now
        state = recovery.recover(config, initial(config), log, now)
        self.coordinator = self._lives_from(state)
        for island in self.islands.values():
            if island.ended is None and island.line is None:
                self.connect(island)
