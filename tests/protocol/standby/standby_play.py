"""Schedules of two coordinators: what goes wrong, and when."""

from __future__ import annotations

from standby_parts import TIMING, Plant
from standby_world import World

from diloco_jax.protocol.standby import primary
from diloco_jax.protocol.standby.events import DiskBroken

STRIKES = (
    ["crash", "loss", "full", "pause", "line", "line", "store"] + ["start"] * 2
)  # fmt: skip


def beat(world: World, every_s: float = 0.5) -> None:
    """A primary gives its standby signs of life."""
    for node in world.nodes.values():
        leads = isinstance(node.machine, primary.Primary) and node.line is not None
        if leads and world.now >= node.paused_until:
            world.send(node, ("alive", len(node.disk) - node.first))
    world.at(every_s, lambda: beat(world, every_s))


def strike(world: World, strikes: list[str]) -> None:
    """Let something go wrong now and again, and mend it."""
    draw = world.random
    name = draw.choice("AB")
    match draw.choice(strikes):
        case "crash" | "loss" as what:
            world.crash(name, disk_lost=what == "loss")
            role = draw.choice(["primary", "standby"])
            world.at(draw.uniform(0.5, 40), lambda: world.start(name, role))
        case "full":
            node = world.nodes[name]
            node.full = True
            world.at(draw.uniform(0.5, 20), lambda: setattr(node, "full", False))
        case "pause":
            world.pause(name, draw.uniform(0.5, 30))
        case "line":
            world.cut.add("line")
            world.at(draw.uniform(0.5, 20), lambda: world.cut.discard("line"))
        case "store":
            world.cut.add(name)
            world.at(draw.uniform(0.5, 20), lambda: world.cut.discard(name))
        case "damage":
            world.crash(name)
            world.start(name, "primary")
            node = world.nodes[name]
            world.at(draw.uniform(0.5, 8), lambda: world._give(node, DiskBroken()))
        case "dying":
            # The process ends, once it has ceded or after that time.
            node = world.nodes[name]
            life = node.life
            world._give(node, DiskBroken())
            end_s = TIMING.valid_s
            world.at(end_s, lambda: node.life == life and world.crash(name))
            role = draw.choice(["primary", "standby"])
            world.at(end_s + draw.uniform(0, 20), lambda: world.start(name, role))
        case "start":
            world.start(name, draw.choice(["primary", "standby"]))
    world.at(draw.expovariate(1 / 6), lambda: strike(world, strikes))


def play(seed: int, plant: Plant, strikes: list[str] = STRIKES) -> World:
    """Play a rough schedule; raises BrokenError."""
    world = World(seed, plant)
    world.start("A", "primary")
    world.at(1.0, lambda: world.start("B", "standby"))
    world.at(2.0, lambda: beat(world))
    world.at(8.0, lambda: strike(world, strikes))
    world.run(150.0)
    return world


def calm() -> World:
    """A primary and a standby that is in step."""
    world = World(0, Plant(), rough=False)
    world.start("A", "primary")
    world.start("B", "standby")
    beat(world)
    world.run(20.0)
    assert named(world) == "B"
    assert world.visible
    return world


def named(world: World) -> str:
    """Whom the mandate calls in step."""
    assert world.mandate is not None
    return world.mandate.in_step
