"""A world of faults whose coordinator has a standby, on a machine of its own.

A mandate outside of both says which of the two leads. Islands know both addresses.
"""

from __future__ import annotations

import functools
from typing import cast

from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.records import Durable
from diloco_jax.protocol.standby.events import (
    FromStore,
    MandateWritten,
    PrimaryLost,
    ReadMandate,
    StandbyAttached,
    StateGathered,
    StateLoaded,
    WriteMandate,
)
from diloco_jax.simulation.faults.arrays import Anchors
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.fault import Restart
from diloco_jax.simulation.faults.gatherer import Opened, VirtualGatherer
from diloco_jax.simulation.faults.island import FaultyIsland
from diloco_jax.simulation.faults.lineage import Lineage
from diloco_jax.simulation.faults.links import Peer
from diloco_jax.simulation.faults.mandate_object import MandateObject
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    RESTART_S,
    RETRY_S,
    Schedule,
)
from diloco_jax.simulation.faults.seated import SeatedCoordinator
from diloco_jax.simulation.faults.standby_line import FollowLine, StandbyNetwork
from diloco_jax.simulation.faults.standby_node import Node, Role
from diloco_jax.simulation.faults.world import FaultyWorld

NODES = ("first", "second")


class StandbyWorld(FaultyWorld):
    """World with two coordinators' machines. `disk`, `coordinator` and `monitor` are
    those of the run's log: of the node that led last."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        drawn = schedule.standby
        assert drawn is not None
        self.lineage = Lineage(self.config)
        self.monitor = self.lineage
        self.object = MandateObject()
        self.between = StandbyNetwork(self.clock, schedule.latency_s, drawn.copy_s)
        self.nodes = {
            name: self._node(name, rate)
            for name, rate in zip(NODES, drawn.rates, strict=True)
        }
        self._both = tuple(self.nodes.values())
        self.disk = self._both[0].disk
        self._load_s = drawn.load_s
        self._seen = -1
        """Number of the last record of which anyone may have seen something."""
        self._attempts: dict[str, int] = dict.fromkeys(schedule.islands, 0)
        self._leading: Node = self.nodes[NODES[0]]
        self._went_back = False
        """A person has started the older log: the terms opened since are lost."""
        self._names = 0
        """Names that were drawn for nodes that had lost theirs."""

    def _node(self, name: str, rate: float) -> Node:
        return Node(self, name, rate)

    def _is_over(self) -> bool:
        """Tell whether the run is over, and so are both processes."""
        if super()._is_over():
            cast(SeatedCoordinator, self.coordinator).node.finish()
        first, second = self._both
        return first.retired and second.retired

    # ---- processes ------------------------------------------------------------------

    def _start_coordinator(self, clock_s: float) -> None:
        """Start the first coordinator of the run, and its standby."""
        primary, standby = self.nodes.values()
        primary.start("primary", clock_s)
        standby.start("standby", clock_s)

    def other(self, node: Node) -> Node:
        """Return the other node."""
        first, second = self.nodes.values()
        return second if node is first else first

    def ended(self, node: Node, role: Role, after_s: float) -> None:
        """End a node's process, and start it again."""
        if node.coordinator is not None:
            self._lose_islands(node.coordinator, 0.0)
            if self.coordinator is node.coordinator:
                self.coordinator = None
        elif node.gatherer is not None:
            self._lose_islands(node.gatherer, 0.0)
        node.kill()
        self._start_again(node, role, after_s, self.clock.now)

    def _start_again(
        self, node: Node, role: Role, after_s: float, clock_s: float
    ) -> None:
        life = node.life

        def start() -> None:
            if node.life == life:
                node.start(role, clock_s)

        self.clock.after(after_s, start)

    def _went_down(self, dead: FaultyCoordinator, restart: Restart) -> None:
        node = cast(SeatedCoordinator, dead).node
        if self.coordinator is dead:
            self.coordinator = None
        self._lose_islands(dead, restart.noticed_s)
        role = node.role
        node.kill()
        self._start_again(node, role, restart.down_s, restart.clock_s)

    def _start_again_after(self, seconds: float, last: FaultyCoordinator) -> None:
        """See FaultyWorld. Both have ended; the one that led is started first."""
        self.coordinator = None
        led = cast(SeatedCoordinator, last).node
        for node, later_s in ((led, 0.0), (self.other(led), 2 * LEASE_S)):
            node.retired = False
            self._start_again(node, node.role, seconds + later_s, self.clock.now)

    def kill_standby(self, node: Node, down_s: float) -> None:
        """Kill a process that does not lead; it starts again."""
        self.crashes += 1
        role = node.role
        node.kill()
        self._start_again(node, role, down_s, self.clock.now)

    def crash(self, node: Node, restart: Restart) -> None:
        """Kill the process of a node, if it has one, whatever it does; it starts
        again."""
        if node.coordinator is not None:
            self.crash_coordinator(node.coordinator, restart)
        elif node.machine is not None:
            if node.gatherer is not None:
                self._lose_islands(node.gatherer, restart.noticed_s)
            self.kill_standby(node, restart.down_s)

    def lose(self, node: Node, restart: Restart, *, renamed: bool) -> None:
        """Kill a process whose disk is lost; it starts again with an empty one."""
        node.disk.lose_all()
        self.crash(node, restart)
        if renamed:
            self._names += 1
            node.name = f"{node.name.partition('.')[0]}.{self._names}"

    def stop(self, node: Node, for_s: float, *, asleep: bool = False) -> None:
        """Stop a process for a while. asleep: with its machine."""
        life, service = node.life, node.coordinator
        node.stop()

        def go_on() -> None:
            if node.life == life:
                node.go_on(for_s if asleep else 0.0)

        def give_up() -> None:
            if service is not None and node.paused and node.life == life:
                self._lose_islands(service, 0.0)

        self.clock.after(for_s, go_on)
        self.clock.after(LEASE_S, give_up)

    def _lose_islands(self, service: Peer, noticed_s: float) -> None:
        for island in self.processes:
            if island.service is service:
                self.lose_connection(island, noticed_s)

    # ---- who leads ------------------------------------------------------------------

    def reign(self, node: Node, clock_s: float, *, gathers: bool) -> None:
        """Let a node lead that has won the mandate."""
        if gathers:
            node.gatherer = VirtualGatherer(
                self.config,
                frozenset(self.schedule.islands),
                self.clock,
                functools.partial(self._node_gathered, node, node.life),
            )
            return
        life = node.life

        def loaded() -> None:
            if node.life == life:
                self._read(node, clock_s)

        self.clock.after(self._load_s, lambda: node.act(loaded))

    def _read(self, node: Node, clock_s: float) -> None:
        """Go on once the state of a node is read from its disk."""
        self._loaded(node, clock_s)

    def _loaded(self, node: Node, clock_s: float) -> None:
        mandate = self.object.mandate
        if node.disk.damaged and node.cede():
            return
        if mandate is None or mandate.holder != node.name:
            # Nothing that it begins may ever be seen: it ends once it reads that.
            self.ended(node, "standby", RESTART_S)
            return
        self.monitor.goes_on(node.name, node.disk.last, self._seen)
        self._lead(node)
        went_back, self._went_back = self._went_back, False
        self.lineage.take_back(node.disk.last, node.disk.terms if went_back else None)
        super()._start_coordinator(clock_s)
        node.give(StateLoaded())

    def _lead(self, node: Node) -> None:
        """Let the run's log be this node's."""
        for other in self.nodes.values():
            if other.coordinator is not None:
                other.coordinator.depose()
        before, self.disk, self._leading = self.disk, node.disk, node
        self.coordinator = None
        if before is not node.disk:
            # What is armed strikes the disk that is written.
            armed = before.fails_in, before.written_share
            before.fails_in, self.disk.fails_in = None, armed[0]
            self.disk.written_share = armed[1]

    def _made(
        self, state: State, merging: Anchors, offset_s: float
    ) -> FaultyCoordinator:
        node = self._leading
        node.coordinator = SeatedCoordinator(self, node, state, merging, offset_s)
        return node.coordinator

    def _node_gathered(self, node: Node, life: int, opened: Opened | None) -> None:
        if node.life != life:
            return
        node.act(lambda: self._open(node, opened) if node.life == life else None)

    def _open(self, node: Node, opened: Opened | None) -> None:
        gatherer, node.gatherer = node.gatherer, None
        assert gatherer is not None
        self._lose_islands(gatherer, 0.0)
        if opened is None:
            if all(p.boundary is None for p in self.processes if p.ended is None):
                # No process has an anchor: the run is lost but for the other disk.
                self._go_back()
            else:
                self.ended(node, "standby", RETRY_S)
        else:
            self._begin_term(node, opened)

    def _begin_term(self, node: Node, opened: Opened) -> None:
        mandate = self.object.mandate
        if mandate is None or mandate.holder != node.name:
            # Nothing that it begins may ever be seen: it ends once it reads that.
            self.ended(node, "standby", RESTART_S)
            return
        self._lead(node)
        self.lineage.take_back(self._seen)
        node.disk.begin(opened.state, opened.anchors)
        self.monitor.opened(opened)
        node.disk.last = self._seen = self.lineage.last
        node.disk.terms = self.lineage.terms
        node.disk.empty = False
        node.give(StateGathered())
        super()._start_coordinator(self.clock.now)

    def _go_back(self) -> None:
        """Do what a person does for a lost run whose other disk has a state: remove the
        mandate, and start that coordinator."""
        for node in self.nodes.values():
            self.ended(node, "standby", RESTART_S)
        self._leading.disk.find_again()
        best = max(
            self.nodes.values(),
            key=lambda node: (
                not node.disk.empty,
                node.disk.terms,
                node.disk is self._leading.disk,  # The other's may be a side branch.
                node.disk.last,
            ),
        )
        self.object.remove()
        self._went_back = True
        best.kill()
        self._start_again(best, "primary", RESTART_S, self.clock.now)

    def carry_out(self, request: ReadMandate | WriteMandate) -> FromStore:
        """Let the object answer."""
        before = self.object.mandate
        found = self.object.carry_out(request)
        if isinstance(request, WriteMandate):
            if isinstance(found, MandateWritten) and before is not None:
                self.monitor.holds(request.mandate.holder, before)
            self._check_named()
        return found

    def shows(self, coordinator: SeatedCoordinator) -> None:
        """Note that a coordinator is about to let something be seen."""
        mandate = self.object.mandate
        holder = "nobody" if mandate is None else mandate.holder
        self.monitor.shows(coordinator.node.name, holder)
        if not coordinator.deposed:
            self._seen = max(self._seen, coordinator.seen_through)
            self._check_named()

    def _check_named(self) -> None:
        mandate = self.object.mandate
        name = "" if mandate is None else mandate.in_step
        for node in self.nodes.values():
            if node.name == name and not node.disk.lost:
                self.monitor.named(name, node.disk.last, self._seen)

    def persisted(self, by: FaultyCoordinator, record: Durable) -> None:
        """See FaultyWorld; what a deposed one writes does not count."""
        if not cast(SeatedCoordinator, by).deposed:
            super().persisted(by, record)

    def _free(self, disk: Disk) -> None:
        disk.full = disk.brimful = False
        for node in self.nodes.values():
            if node.disk is disk and node.coordinator is not None:
                node.coordinator.go_on()

    # ---- connections ----------------------------------------------------------------

    def dial(self, standby: Node) -> None:
        """Let a standby ask the other node to be followed."""
        life, primary = standby.life, self.other(standby)

        def refuse() -> None:
            if standby.life == life and standby.line is None:
                standby.act(lambda: standby.give(PrimaryLost()))

        def arrive() -> None:
            if standby.life != life or standby.line is not None:
                return
            if primary.paused:
                return  # Its patience ends that.
            if primary.coordinator is None or primary.line is not None:
                self.between.carry(refuse)
                return
            line = FollowLine(self.between, primary, standby)
            primary.line = standby.line = line
            primary.give(StandbyAttached(node=standby.name))

        self.between.carry(arrive)

    def connect(self, island: FaultyIsland) -> None:
        """See Links. An island that is not welcomed tries the other address."""
        super().connect(island)
        line, service = island.line, island.service

        def look() -> None:
            if island.line is line and not island.is_welcome:
                self.lose_connection(island, 0.0)
                self._notice(island)

        if line is not None and isinstance(service, SeatedCoordinator):
            self.clock.after(LEASE_S, look)

    def _peer_for(self, island: FaultyIsland) -> Peer | None:
        attempt = self._attempts[island.name] = self._attempts[island.name] + 1
        nodes = list(self.nodes.values())
        for node in nodes if attempt % 2 else reversed(nodes):
            if not node.paused and (peer := node.coordinator or node.gatherer):
                return peer
        return None

    def _peer_of(self, island: FaultyIsland) -> Peer | None:
        service = island.service
        live = [n.coordinator or n.gatherer for n in self.nodes.values()]
        return next((peer for peer in live if peer is service), None)
