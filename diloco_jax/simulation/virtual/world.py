"""Coordinator, islands and the lines between them, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from diloco_jax.config import RunConfig
from diloco_jax.protocol.coordinator.state import PolicyConfig, initial
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.records import Durable
from diloco_jax.simulation.virtual.body import Body, NoBody
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.coordinator import VirtualCoordinator
from diloco_jax.simulation.virtual.island import IslandSpec, VirtualIsland
from diloco_jax.simulation.virtual.line import Line, LineSpeed
from diloco_jax.simulation.virtual.merging import Merging


class World:
    """A run whose coordinator and connections never fail; islands come and go.

    make_body: makes the body of an incarnation of the named island.
    persist, alert: see `VirtualCoordinator`.
    report_s: longest time in seconds between two reports of an island.
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
    ) -> None:
        self.clock = Clock()
        self.coordinator = VirtualCoordinator(
            config,
            self.clock,
            initial(config),
            merging,
            persist,
            alert,
            merge_seconds,
        )
        self.islands: dict[str, VirtualIsland] = {}
        """Newest incarnation of each island, by name."""
        self._run, self._report_s = run, report_s
        self._line_speed = line_speed or LineSpeed()
        self._make_body = make_body

    def start(self, spec: IslandSpec) -> VirtualIsland:
        """Start a new incarnation of an island, which says hello."""
        before = self.islands.get(spec.name)
        island = VirtualIsland(
            spec,
            before.incarnation + 1 if before is not None else 1,
            self._run,
            self.clock,
            self._make_body(spec.name),
            self._report_s,
        )
        self.islands[spec.name] = island
        self.connect(island)
        return island

    def connect(self, island: VirtualIsland) -> None:
        """Give the island a line, on which it says hello."""
        island.connect(self.coordinator, Line(self.clock, self._line_speed))

    def kill(self, name: str) -> None:
        """Kill the island's process; its connection breaks at once."""
        island = self.islands[name]
        island.die()
        assert island.peer is not None
        self.coordinator.disconnected(island.peer)

    def run(self, until: float = float("inf")) -> None:
        """Run until the run is over, at most until `until` (seconds)."""
        self.clock.run(until, lambda: self.coordinator.finished)
