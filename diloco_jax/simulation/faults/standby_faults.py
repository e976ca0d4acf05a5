"""Faults of a coordinator's standby, and of what lies between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from diloco_jax.simulation.faults.fault import DrawnFault, Restart

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.apart_world import ApartWorld
    from diloco_jax.simulation.faults.standby_node import Node
    from diloco_jax.simulation.faults.standby_world import StandbyWorld
    from diloco_jax.simulation.faults.world import FaultyWorld

Part = Literal["primary", "standby"]
Reached = Literal["primary", "standby", "both"]


def _node(world: StandbyWorld, part: Part) -> Node | None:
    """Return the node whose process has this part now, if one has."""
    parts = {
        "primary" if node.leads else "standby": node
        for node in world.nodes.values()
        if node.machine is not None
    }
    return parts.get(part)


def _reached(world: StandbyWorld, to: Reached) -> list[Node]:
    parts: tuple[Part, ...] = ("primary", "standby")
    found = [_node(world, part) for part in parts if to in (part, "both")]
    return [node for node in found if node is not None]


class StandbyFault(DrawnFault, frozen=True):
    """Base: a fault that needs a standby."""


class StandbyCrash(StandbyFault, frozen=True):
    """The standby dies, and starts again."""

    down_s: float

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        node = _node(world, "standby")
        if node is None:
            return False
        world.kill_standby(node, self.down_s)
        return world.begun(self, self.down_s)


class LoadCrash(StandbyFault, frozen=True):
    """The primary dies, starts again, and dies again `loading_s` later: most often
    before it has loaded its state."""

    down_s: float
    loading_s: float
    restart: Restart

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        node = _node(world, "primary")
        if node is None or node.coordinator is None:
            return False
        world.crash(node, Restart(down_s=self.down_s))
        again_s = self.down_s + self.loading_s
        world.clock.after(again_s, lambda: world.crash(node, self.restart))
        lasts_s = max(self.restart.down_s, self.restart.noticed_s)
        return world.begun(self, again_s + lasts_s)


class NodeLoss(StandbyFault, frozen=True):
    """A process dies, and its disk is lost for good.

    renamed: with the file that has the node's name; otherwise that alone is left.
    """

    part: Part
    restart: Restart
    renamed: bool = False

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        node = _node(world, self.part)
        if node is None:
            return False
        world.lose(node, self.restart, renamed=self.renamed)
        return world.begun(self, max(self.restart.down_s, self.restart.noticed_s))


class DiskDamage(StandbyFault, frozen=True):
    """The primary dies, and finds its disk damaged as it starts again."""

    restart: Restart

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        node = _node(world, "primary")
        if node is None or node.coordinator is None:
            return False
        node.disk.damaged = True
        world.crash(node, self.restart)
        return world.begun(self, max(self.restart.down_s, self.restart.noticed_s))


class StandbyFull(StandbyFault, frozen=True):
    """The standby's disk has no room for anything, for a while."""

    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        node = _node(world, "standby")
        if node is None or node.disk.full:
            return False
        world.fill(node.disk, self.for_s, brimful=True)
        return world.begun(self, self.for_s)


class NodeStop(StandbyFault, frozen=True):
    """A process is stopped for a while, as by SIGSTOP: its clock goes on."""

    part: Part
    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        node = _node(world, self.part)
        if node is None or node.paused or node.gatherer is not None:
            return False
        world.stop(node, self.for_s)
        return world.begun(self, self.for_s)


class StandbyPartition(StandbyFault, frozen=True):
    """Nothing comes through between the two. Both reach islands and the mandate."""

    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        if world.between.parted:
            return False
        world.between.parted = True
        world.clock.after(self.for_s, world.between.heal)
        return world.begun(self, self.for_s)


class MandateAway(StandbyFault, frozen=True):
    """The object of the mandate answers one of the two, or neither, for a while."""

    to: Reached
    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        nodes = _reached(world, self.to)
        if not nodes or not all(node.reaches_object for node in nodes):
            return False
        for node in nodes:
            node.reaches_object = False

        def back() -> None:
            for node in nodes:
                node.reaches_object = True

        world.clock.after(self.for_s, back)
        return world.begun(self, self.for_s)


class MandateLate(StandbyFault, frozen=True):
    """Questions to the object of the mandate arrive `late_s` later, for a while, and so
    do the answers. The node that asked has given up, or is dead.
    """

    to: Reached
    for_s: float
    late_s: float

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("StandbyWorld", world)
        nodes = _reached(world, self.to)
        if not nodes or any(node.late_s for node in nodes):
            return False
        for node in nodes:
            node.late_s = self.late_s

        def in_time() -> None:
            for node in nodes:
                node.late_s = 0.0

        world.clock.after(self.for_s, in_time)
        return world.begun(self, self.for_s + self.late_s)


class WorkerCut(StandbyFault, frozen=True):
    """Nothing comes through between a worker on a machine of its own and one of the two
    nodes, or both. Islands reach all of them."""

    worker: int
    to: Reached
    for_s: float

    def strike(self, world: FaultyWorld) -> bool:
        world = cast("ApartWorld", world)
        nodes = _reached(world, self.to)
        return world.cut(self, self.worker, nodes, self.for_s)


AnyStandbyFault = (
    StandbyCrash
    | DiskDamage
    | StandbyFull
    | StandbyPartition
    | LoadCrash
    | NodeLoss
    | NodeStop
    | MandateAway
    | MandateLate
    | WorkerCut
)
