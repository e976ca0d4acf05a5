"""Connections of islands: made, tried again, broken."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.gatherer import VirtualGatherer
from diloco_jax.simulation.faults.island import FaultyIsland
from diloco_jax.simulation.faults.network import FaultyLine, Network, Way
from diloco_jax.simulation.faults.schedule import LEASE_S, RETRY_S
from diloco_jax.simulation.virtual.clock import Clock

Peer = FaultyCoordinator | VirtualGatherer


class Links:
    """Connections between the processes of a world."""

    def __init__(self, clock: Clock, networks: dict[str, Network]) -> None:
        self.clock, self.networks = clock, networks
        self.coordinator: FaultyCoordinator | None = None
        self.gatherer: VirtualGatherer | None = None
        """A coordinator without state, which gathers anchors instead."""
        self.islands: dict[str, FaultyIsland] = {}
        """Newest incarnation of each island, by name."""
        self.processes: list[FaultyIsland] = []
        """All processes that run, stale ones too."""

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
