"""TPU slices by topology: the names of each, and the machines it is made of.

A topology is written GENERATION:SHAPE, as in "v5p:4x4x4" or "v6e:16x16". Facts that a
provider may change stand in one table here, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math

from diloco_jax.config import ConfigError, IslandConfig, suggest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The facts that all slices of one generation share."""

    name: str
    shapes: tuple[str, ...]
    """Shapes that have an accelerator type, smallest first."""
    counted_per_chip: int
    """An accelerator type counts chips (1) or their cores (2): "v6e-16", "v5p-16"."""
    runtime_version: str
    """Name of the machines' image in the Cloud TPU API."""
    node_label: str
    """Value of GKE's node label `gke-tpu-accelerator`."""
    machine_types: dict[int, str]
    """Machine types by chips per host."""
    cube: int
    """Number whose multiples along every axis are shapes too; 0 = no other shapes."""
    max_chips: int
    zones: tuple[str, ...]
    """Zones known to offer it, for messages; the provider has the last word."""


GENERATIONS = {
    "v5p": Generation(
        name="v5p",
        shapes=(
            *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
            *("8x8x8", "8x8x16", "8x16x16", "16x16x24"),
        ),
        counted_per_chip=2,
        runtime_version="v2-alpha-tpuv5",
        node_label="tpu-v5p-slice",
        machine_types={4: "ct5p-hightpu-4t"},
        cube=4,
        max_chips=6144,
        zones=("us-central1-a", "us-east5-a", "europe-west4-b"),
    ),
    "v6e": Generation(
        name="v6e",
        shapes=("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
        counted_per_chip=1,
        runtime_version="v2-alpha-tpuv6e",
        node_label="tpu-v6e-slice",
        machine_types={
            1: "ct6e-standard-1t",
            4: "ct6e-standard-4t",
            8: "ct6e-standard-8t",
        },
        cube=0,
        max_chips=256,
        zones=(
            *("us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b"),
            *("europe-west4-a", "asia-northeast1-b", "southamerica-west1-a"),
        ),
    ),
}


HOST_MACHINES = {
    "ct5p-hightpu-4t": (208, 448),
    "ct6e-standard-1t": (44, 176),
    "ct6e-standard-4t": (180, 720),
    "ct6e-standard-8t": (360, 1440),
}
"""(vCPUs, GB of memory) of the hosts' machine types."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """One TPU slice. JAX has one device per chip on these generations."""

    generation: Generation
    shape: str

    @property
    def topology(self) -> str:
        """Topology as a config writes it."""
        return f"{self.generation.name}:{self.shape}"

    @property
    def chips(self) -> int:
        """Number of chips, each of which is one JAX device."""
        return math.prod(self.axes)

    @property
    def axes(self) -> tuple[int, ...]:
        """Number of chips along each axis."""
        return tuple(_axes(self.shape))

    @property
    def chips_per_host(self) -> int:
        """Number of chips per host: 4, except in v6e slices of one chip or one 8-chip
        host."""
        return self.chips if self.chips in self.generation.machine_types else 4

    @property
    def hosts(self) -> int:
        """Number of machines, each of which runs the island's command."""
        return self.chips // self.chips_per_host

    @property
    def machine_type(self) -> str:
        """Machine type of the hosts."""
        return self.generation.machine_types[self.chips_per_host]

    @property
    def accelerator_type(self) -> str:
        """Accelerator type such as "v5p-128"; empty for a shape that shares its size
        with a usual one."""
        if self.shape not in self.generation.shapes:
            return ""
        return f"{self.generation.name}-{self.chips * self.generation.counted_per_chip}"


def slice_of(name: str, island: IslandConfig) -> Slice:
    """Return the TPU slice of the island, which its mesh fills.

    Raises ConfigError naming field, value and remedy.
    """
    field = f"islands.{name}.topology"
    if not island.topology:
        raise ConfigError(
            f"{field} is empty: name the slice that the island runs on, such as "
            f"'v5p:2x2x1' or 'v6e:4x4'"
        )
    found = find_slice(island.topology, field)
    if island.devices != found.chips:
        raise ConfigError(
            f"islands.{name}: its mesh has {island.devices} devices, and "
            f"{found.topology} has {found.chips} chips, one device each; choose mesh_* "
            f"whose product is {found.chips}, or another topology"
        )
    if island.hosts not in (1, found.hosts):
        raise ConfigError(
            f"islands.{name}.hosts = {island.hosts}, and {found.topology} has "
            f"{found.hosts}; leave it out, the topology says it"
        )
    return found


def find_slice(topology: str, field: str) -> Slice:
    """Return the slice of that topology.

    Raises ConfigError naming `field` and the nearest topologies if there is none.
    """
    name, _, shape = topology.partition(":")
    generation = GENERATIONS.get(name)
    if generation is None:
        known = [f"{g}:{s}" for g, made in GENERATIONS.items() for s in made.shapes]
        for entry in known:
            if find_slice(entry, field).accelerator_type == topology:
                raise ConfigError(f"{field} = {topology!r}; write {entry!r}")
        raise ConfigError(
            f"{field} = {topology!r} is no TPU topology{suggest(topology, known)}; "
            f"write GENERATION:SHAPE with a generation of {', '.join(GENERATIONS)}"
        )
    if not _exists(generation, shape):
        raise ConfigError(
            f"{field} = {topology!r} does not exist; the nearest "
            f"{name} topologies are {', '.join(_nearest(generation, shape))}"
        )
    return Slice(generation, shape)


def _exists(generation: Generation, shape: str) -> bool:
    if shape in generation.shapes:
        return True
    axes, cube = _axes(shape), generation.cube
    return bool(
        cube
        and len(axes) == len(_axes(generation.shapes[0]))
        and axes == sorted(axes)
        and all(axis and axis % cube == 0 for axis in axes)
        and math.prod(axes) <= generation.max_chips
    )


def _nearest(generation: Generation, shape: str) -> list[str]:
    """Return up to three topologies: first the same numbers in order, then by size."""
    axes = _axes(shape)
    ordered = "x".join(map(str, sorted(axes)))
    chips = max(math.prod(axes), 1) if axes else 1
    near = sorted(
        generation.shapes,
        key=lambda known: abs(math.log(math.prod(_axes(known)) / chips)),
    )
    if _exists(generation, ordered):
        near.insert(0, ordered)
    return [f"{generation.name}:{known}" for known in list(dict.fromkeys(near))[:3]]


def _axes(shape: str) -> list[int]:
    """Return the numbers of a shape; empty if it is not made of numbers."""
    parts = shape.split("x")
    return [int(part) for part in parts] if all(map(str.isdecimal, parts)) else []
