"""The parts of a world of faults: its processes, their connections, its disk."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from diloco_jax.config import RunConfig
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.messages import AnchorRequest, Steer
from diloco_jax.simulation.faults.arrays import Anchor, DigestBody
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.gatherer import VirtualGatherer
from diloco_jax.simulation.faults.invariants import Monitor
from diloco_jax.simulation.faults.network import FaultyLine, Network, Way
from diloco_jax.simulation.faults.schedule import LEASE_S, RETRY_S, DrawnFault, Schedule
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.island import (
    Connection,
    IslandSpec,
    VirtualIsland,
    VirtualService,
)


class FaultyIsland(VirtualIsland):
    """One incarnation.

    refused: called if the coordinator refuses it or puts it out. postponed: called with
    a connection that the coordinator ends so that the island comes again.
    """

    def __init__(
        self,
        spec: IslandSpec,
        incarnation: int,
        run: RunConfig,
        clock: Clock,
        report_s: float,
        monitor: Monitor,
        refused: Callable[[FaultyIsland], None],
        postponed: Callable[[Connection], None],
    ) -> None:
        self.who = (spec.name, incarnation)
        self.body = DigestBody(
            ADOPT_RULES.find(run.sync.adopt),
            run.inner.learning_rate,
            functools.partial(self._seen, monitor.adopted),
            functools.partial(self._seen, monitor.trained),
        )
        self.takes: Counter[int] = Counter()
        """Takes by fragment."""
        self._anchors: dict[int, Anchor] = {}
        """The anchor that was sent last, by lost fragment."""
        self._monitor, self._refused, self._postponed = monitor, refused, postponed
        super().__init__(spec, incarnation, run, clock, self.body, report_s)

    @property
    def service(self) -> VirtualService | None:
        """The service to which it was connected last."""
        return self._coordinator

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        assert self.boundary is not None
        self.takes[fragment] += 1
        for take in self.boundary.books.outstanding():
            if take.fragment == fragment:
                self._seen(self._monitor.took, take, encoded)
        super().put(fragment, tick, encoded)

    def send_anchor(self, asked: AnchorRequest) -> None:
        line, to = self.line, self._coordinator
        anchor = self.body.anchor(asked.fragment)
        if line is None:
            return
        if isinstance(to, VirtualGatherer):
            line.upload(0, lambda: to.anchor(self.who, asked.fragment, anchor))
        elif isinstance(to, FaultyCoordinator):
            self._anchors[asked.fragment] = anchor

            def wanted() -> bool:
                newest = self._anchors[asked.fragment] is anchor
                return newest and self.line is line and self.ended is None

            line.upload(0, lambda: to.anchor(self.who, asked, anchor, wanted))

    def turned_away(self, reason: str) -> None:
        super().turned_away(reason)
        self._refused(self)

    def postponed(self, connection: Connection) -> None:
        self._postponed(connection)

    def _seen(
        self, observe: Callable[..., None], *observation: Any, **facts: Any
    ) -> None:
        """Pass an observation on, if its process is in the run."""
        if self._monitor.names.belong_to(self.who, self.session):
            observe(self.who, *observation, **facts)


Peer = FaultyCoordinator | VirtualGatherer


class Scene:
    """Everything that a world of faults has, and the connections in it."""

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
        self.extensions = 0
        """Times that the run was over, and went on to more tokens."""
        self.merges = [0] * self.config.fragments
        self.coordinator: FaultyCoordinator | None = None
        self.gatherer: VirtualGatherer | None = None
        """A coordinator without state, which gathers anchors instead."""
        self.islands: dict[str, FaultyIsland] = {}
        """Newest incarnation of each island, by name."""
        self.processes: list[FaultyIsland] = []
        """All processes that run, stale ones too."""

    def begun(self, fault: DrawnFault, lasts_s: float) -> bool:
        """Note that a fault happens now; return True."""
        self.struck[fault.kind] += 1
        if not fault.awaits_end:
            self.clock.after(lasts_s, self.fault_ended)
        return True

    def fault_ended(self) -> None:
        """Note that a fault is over for which others wait."""
        raise NotImplementedError

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
        self, name: str, away_s: float, *, noticed: bool, lingers: bool
    ) -> bool:
        """Break the connection of the newest incarnation; False if there is none."""
        island = self.islands[name]
        line = island.line
        if island.ended is not None or not isinstance(line, FaultyLine):
            return False
        if lingers:
            line.linger()
        self.lose_connection(island, away_s)
        if noticed:
            self._notice(island)
        return True

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
        peer = self._peer_of(island)
        if peer is not None and island.peer is not None:
            peer.disconnected(island.peer)

    def _peer_for(self, island: FaultyIsland) -> Peer | None:
        """Return the peer that an island's next attempt reaches, if it reaches one."""
        return self.coordinator or self.gatherer

    def _peer_of(self, island: FaultyIsland) -> Peer | None:
        """Return the peer that may see that an island's connection is gone."""
        return self.coordinator or self.gatherer


LOOKS_EVERY_S = 0.5
"""Seconds between two looks whether all is as it was ordered."""
ROUND_EVERY_S = 6.0
"""Seconds for a round of snapshots of all fragments."""
ROUND_S = 0.7
"""Seconds for writing all fragments, while the run goes on."""


class SnapshotRounds:
    """Write the snapshots of whoever leads."""

    def __init__(self, world: Scene) -> None:
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


class Operator:
    """Repeats orders until the coordinator's state follows them: it may be away, or
    have lost its state."""

    def __init__(self, world: Scene) -> None:
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
