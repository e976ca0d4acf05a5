"""The parts of a world of faults: its processes, their connections, its disk."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.messages import AnchorRequest
from diloco_jax.simulation.faults.arrays import Anchor, DigestBody
from diloco_jax.simulation.faults.coordinator import (
    FaultyCoordinator,
    Peer,
    VirtualGatherer,
)
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.faults import LEASE_S, Fault
from diloco_jax.simulation.faults.invariants import Monitor
from diloco_jax.simulation.faults.network import FaultyLine, Network, Way
from diloco_jax.simulation.faults.schedule import RESTART_S, RETRY_S, Schedule
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.island import Connection, IslandSpec, VirtualIsland

REPORT_S = LEASE_S / 3


class FaultyIsland(VirtualIsland):
    """One incarnation. Its scene starts the next one."""

    def __init__(self, scene: Scene, spec: IslandSpec, incarnation: int) -> None:
        self.who = (spec.name, incarnation)
        self._scene, self._monitor = scene, scene.monitor
        self.body = DigestBody(
            ADOPT_RULES.find(scene.run.sync.adopt),
            scene.run.inner.learning_rate,
            functools.partial(self._seen, scene.monitor.adopted),
            functools.partial(self._seen, scene.monitor.trained),
        )
        self.takes: Counter[int] = Counter()
        """Takes by fragment."""
        self._anchors: dict[int, Anchor] = {}
        """The anchor that was sent last, by lost fragment."""
        super().__init__(spec, incarnation, scene.run, scene.clock, self.body, REPORT_S)

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        assert self.boundary is not None
        self.takes[fragment] += 1
        for take in self.boundary.books.outstanding():
            if take.fragment == fragment:
                self._seen(self._monitor.took, take, encoded)
        super().put(fragment, tick, encoded)

    def send_anchor(self, asked: AnchorRequest) -> None:
        line, to = self.line, cast(Peer, self._coordinator)
        if line is None:
            return
        anchor = self._anchors[asked.fragment] = self.body.anchor(asked.fragment)

        def wanted() -> bool:
            newest = self._anchors[asked.fragment] is anchor
            return newest and self.line is line and self.ended is None

        line.upload(0, lambda: to.anchor(self.who, asked, anchor, wanted))

    def turned_away(self, reason: str) -> None:
        super().turned_away(reason)
        self._scene.refused(self)

    def postponed(self, connection: Connection) -> None:
        newest = self._scene.islands[self.name] is self
        if newest and self.line is connection.line:
            self._scene.lose_connection(self, RETRY_S)

    def _seen(
        self, observe: Callable[..., None], *observation: Any, **facts: Any
    ) -> None:
        """Pass an observation on, if its process is in the run."""
        if self._monitor.belong_to(self.who, self.session):
            observe(self.who, *observation, **facts)


class Scene:
    """Everything that a world of faults has, its islands, and the connections in it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.run, self.config = schedule.configs()
        self.clock = Clock()
        self.networks = {
            name: Network(schedule.latency_s, schedule.transfer_s)
            for name in schedule.islands
        }
        self.monitor = Monitor(self.config)
        self.disk = Disk()
        self.struck: Counter[str] = Counter()
        """Faults that happened, by kind."""
        self.crashes = 0
        self.coordinator: FaultyCoordinator | None = None
        self.gatherer: VirtualGatherer | None = None
        """A coordinator without state, which gathers anchors instead."""
        self.islands: dict[str, FaultyIsland] = {}
        """Newest incarnation of each island, by name."""
        self.processes: list[FaultyIsland] = []
        """All processes that run, stale ones too."""
        self.slowness = dict.fromkeys(schedule.islands, 1.0)

    @property
    def merges(self) -> list[int]:
        """Merges by fragment."""
        return self.monitor.merges

    def begun(self, fault: Fault, lasts_s: float) -> bool:
        """Note that a fault happens now; return True."""
        self.struck[fault.kind] += 1
        if not fault.awaits_end:
            self.clock.after(lasts_s, self.fault_ended)
        return True

    def fault_ended(self) -> None:
        """Note that a fault is over for which others wait."""
        raise NotImplementedError

    def set_for(
        self, for_s: float, of: object, field: str, value: Any, usual: Any = 1.0
    ) -> None:
        """Set a field of an object for a while, and then to its usual value again."""
        setattr(of, field, value)
        self.clock.after(for_s, lambda: setattr(of, field, usual))

    # ---- islands ------------------------------------------------------------------

    def make_island(self, name: str, incarnation: int) -> FaultyIsland:
        """Make a process that has not said hello yet."""
        plan = self.schedule.islands[name]
        spec = IslandSpec(
            name=name,
            batch_size=plan.batch_size,
            step_seconds=lambda step: plan.step_s * self.slowness[name],
            join_seconds=plan.join_s,
            lead=plan.lead,
        )
        island = FaultyIsland(self, spec, incarnation)
        self.processes = [p for p in self.processes if p.ended is None]
        self.processes.append(island)
        return island

    def start_island(self, name: str) -> None:
        """Start the next incarnation of an island."""
        before = self.islands.get(name)
        incarnation = before.incarnation + 1 if before is not None else 1
        self.islands[name] = self.make_island(name, incarnation)
        self.connect(self.islands[name])

    def start_island_after(self, seconds: float, name: str) -> None:
        """Start an island later, unless another one started."""
        before = self.islands[name]

        def start() -> None:
            if self.islands[name] is before:
                self.start_island(name)

        self.clock.after(seconds, start)

    def crash_island(
        self, name: str, down_s: float, noticed: bool = True, lingers: bool = False
    ) -> None:
        """Kill the newest incarnation of an island, unless it has ended; start the
        next one later."""
        island = self.islands[name]
        if island.ended is not None:
            return
        self.crashes += 1
        if lingers:
            _linger(island)
        island.die()
        if noticed:
            self._notice(island)
        self.start_island_after(down_s, name)

    def refused(self, island: FaultyIsland) -> None:
        """Start a refused island anew, as its operator would, unless it is replaced."""
        if self.islands[island.name] is island:
            self.start_island_after(RESTART_S, island.name)

    # ---- connections ----------------------------------------------------------------

    def connect(self, island: FaultyIsland) -> None:
        """Try until the island is connected, or has ended."""
        if island.ended is not None or island.line is not None:
            return
        network, peer = self.networks[island.name], self._peer_for(island)
        if peer is None or network.held:
            self.clock.after(RETRY_S, lambda: self.connect(island))
        else:
            island.connect(peer, FaultyLine(self.clock, network))

    def break_connection(
        self, island: FaultyIsland, away_s: float, noticed: bool, lingers: bool
    ) -> None:
        """Break the connection of an island."""
        if lingers:
            _linger(island)
        self.lose_connection(island, away_s)
        if noticed:
            self._notice(island)

    def hold(self, name: str, ways: Iterable[Way], for_s: float) -> None:
        """Hold all messages in these directions back for `for_s` seconds.

        After a lease of silence both ends give the connection up.
        """
        network = self.networks[name]
        network.held |= set(ways)
        island = self.islands[name]
        line = island.line

        def release() -> None:
            network.held -= set(ways)
            for process in self.processes:
                if isinstance(process.line, FaultyLine) and process.name == name:
                    process.line.release()

        def give_up() -> None:
            if island.line is line and line is not None:
                self.lose_connection(island, 0.0)
                self._notice(island)

        self.clock.after(for_s, release)
        if for_s > LEASE_S:
            self.clock.after(LEASE_S, give_up)

    def lose_connection(self, island: FaultyIsland, noticed_s: float) -> None:
        """Cut the island's line; it notices after `noticed_s` and tries again."""
        line = island.line
        if line is None:
            return
        line.cut()

        def notice() -> None:
            if island.line is line:
                island.disconnect()
                self.connect(island)

        self.clock.after(noticed_s, notice)

    def _notice(self, island: FaultyIsland) -> None:
        """Let the coordinator see that the connection is gone."""
        peer = self.coordinator or self.gatherer
        if peer is not None and island.peer is not None:
            peer.disconnected(island.peer)

    def _peer_for(self, island: FaultyIsland) -> Peer | None:
        """Return the peer that an island's next attempt reaches, if it reaches one."""
        return self.coordinator or self.gatherer


def _linger(island: FaultyIsland) -> None:
    if isinstance(island.line, FaultyLine):
        island.line.linger()
