"""TPUs: slices by topology, the published rates of their chips, and those of this
machine.

A topology is written GENERATION:SHAPE, as in "v5p:4x4x4" or "v6e:16x16". Facts that a
provider may change stand in the tables here, and nowhere else.

Rates, looked up 2026-11-20, per chip: peak bf16 FLOP/s, HBM bandwidth and the ICI total
of both directions from Google's pages on each generation (cloud.google.com/tpu/docs/v4,
v5e, v5p, v6e, tpu7x); links and wrap-around from "How to Scale Your Model"
(jax-ml.github.io/scaling-book), which has HBM bandwidth and links up to 12 % lower. It
alone has v4's links: six of 45 GB/s. `hbm_bytes` is what libtpu 0.0.42.1's compiler
says it has for a program (2026-11-30). Zones: cloud.google.com/tpu/docs/regions-zones,
2026-11-30. Shapes: the pages of the generations.

This machine's TPUs are known by its devices and its PCI bus, without jax.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from diloco_jax.config import ConfigError, IslandConfig, suggest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The facts that all slices of one generation share."""

    name: str
    shapes: tuple[str, ...]
    """Shapes that have an accelerator type, smallest first."""
    devices_per_chip: int = 1
    """Devices that JAX has for a chip: 2 where its two halves do not act as one."""
    chip_config: str = ""
    """Name that libtpu's compiler needs in order to take a chip as one device."""
    type_name: str
    """Name of the generation in the Cloud TPU API; empty where that has none, nor
    SkyPilot, which asks it."""
    counted_per_chip: int
    """An accelerator type counts chips (1) or their cores (2): "v6e-16", "v5p-16"."""
    runtime_version: str
    """Name of the machines' image in the Cloud TPU API."""
    by_policy: bool = False
    """True if GKE places slices of several hosts by a workload policy, and not by
    `--tpu-topology` (docs.cloud.google.com/kubernetes-engine/docs/concepts/
    tpu-ironwood)."""
    node_label: str
    """Value of GKE's node label `gke-tpu-accelerator`."""
    machine_types: dict[int, str]
    """Machine types by chips per host."""
    cube: int
    """Number whose multiples along every axis are shapes too; 0 = no other shapes."""
    max_chips: int
    zones: tuple[str, ...]
    """Zones known to offer it, for messages; the provider has the last word."""
    flops_per_s: float
    """Peak of a chip for bf16, and for f32 operands at the default precision, which
    rounds to bf16. This and what follows is of a chip, whatever its devices."""
    hbm_bytes: int
    """Bytes of a chip's HBM that a program may use."""
    hbm_bytes_per_s: float
    ici_bytes_per_s: float
    """Bytes per second of all links of a chip, two per axis, in one direction."""
    wraps_from: int
    """An axis is a ring if its length is a multiple of this, in chips, else a line."""
    wraps_together: bool
    """True if it is one only where this holds for all axes."""
    device_kinds: tuple[str, ...]
    """Names under which JAX shows the chip (`Device.device_kind`)."""


GIB = 1 << 30
CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
    *("8x8x8", "8x8x16", "8x16x16"),
)
"""Shapes that all generations with three axes have."""
SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
GENERATIONS = {
    "v4": Generation(
        name="v4",
        shapes=CUBES,
        chip_config="megacore",
        type_name="v4",
        counted_per_chip=2,
        runtime_version="tpu-ubuntu2204-base",
        node_label="tpu-v4-podslice",
        machine_types={4: "ct4p-hightpu-4t"},
        cube=4,
        max_chips=4096,
        zones=("us-central2-b",),
        flops_per_s=275e12,
        hbm_bytes=int(30.75 * GIB),
        hbm_bytes_per_s=1200e9,
        ici_bytes_per_s=270e9,
        wraps_from=4,
        wraps_together=True,
        device_kinds=("TPU v4",),
    ),
    "v5e": Generation(
        name="v5e",
        shapes=SQUARES,
        type_name="v5litepod",
        counted_per_chip=1,
        runtime_version="v2-alpha-tpuv5-lite",
        node_label="tpu-v5-lite-podslice",
        machine_types={
            1: "ct5lp-hightpu-1t",
            4: "ct5lp-hightpu-4t",
            8: "ct5lp-hightpu-8t",
        },
        cube=0,
        max_chips=256,
        zones=("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a"),
        flops_per_s=197e12,
        hbm_bytes=int(15.75 * GIB),
        hbm_bytes_per_s=819e9,
        ici_bytes_per_s=200e9,
        wraps_from=16,
        wraps_together=False,
        device_kinds=("TPU v5 lite", "TPU v5e"),
    ),
    "v5p": Generation(
        name="v5p",
        shapes=(*CUBES, "16x16x24"),
        type_name="v5p",
        counted_per_chip=2,
        runtime_version="v2-alpha-tpuv5",
        node_label="tpu-v5p-slice",
        machine_types={4: "ct5p-hightpu-4t"},
        cube=4,
        max_chips=6144,
        zones=("us-central1-a", "us-east5-a", "europe-west4-b"),
        flops_per_s=459e12,
        hbm_bytes=int(95.74 * GIB),
        hbm_bytes_per_s=2765e9,
        ici_bytes_per_s=600e9,
        wraps_from=4,
        wraps_together=True,
        device_kinds=("TPU v5", "TPU v5p"),
    ),
    "v6e": Generation(
        name="v6e",
        shapes=SQUARES,
        type_name="v6e",
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
        flops_per_s=918e12,
        hbm_bytes=int(31.25 * GIB),
        hbm_bytes_per_s=1638e9,
        ici_bytes_per_s=400e9,
        wraps_from=16,
        wraps_together=False,
        device_kinds=("TPU v6 lite", "TPU v6e"),
    ),
    "tpu7x": Generation(
        name="tpu7x",
        shapes=CUBES,
        devices_per_chip=2,
        type_name="",
        counted_per_chip=2,
        runtime_version="",
        by_policy=True,
        node_label="tpu7x",
        machine_types={4: "tpu7x-standard-4t"},
        cube=4,
        max_chips=9216,
        zones=("us-central1-c", "us-central1-ai1a"),
        flops_per_s=2307e12,
        hbm_bytes=2 * int(94.75 * GIB),
        hbm_bytes_per_s=7380e9,
        ici_bytes_per_s=600e9,
        wraps_from=4,
        wraps_together=True,
        device_kinds=("TPU7x",),
    ),
}


HOST_MACHINES = {
    "ct4p-hightpu-4t": (240, 407),
    "ct5lp-hightpu-1t": (24, 48),
    "ct5lp-hightpu-4t": (112, 192),
    "ct5lp-hightpu-8t": (224, 384),
    "ct5p-hightpu-4t": (208, 448),
    "ct6e-standard-1t": (44, 176),
    "ct6e-standard-4t": (180, 720),
    "ct6e-standard-8t": (360, 1440),
    "tpu7x-standard-4t": (224, 960),
}
"""(vCPUs, GB of memory) of the hosts' machine types
(cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus, 2026-11-20)."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """One TPU slice."""

    generation: Generation
    shape: str

    @property
    def topology(self) -> str:
        """Topology as a config writes it."""
        return f"{self.generation.name}:{self.shape}"

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.axes)

    @property
    def devices(self) -> int:
        """Number of JAX devices, which an island's mesh has."""
        return self.chips * self.generation.devices_per_chip

    @property
    def hbm_bytes(self) -> int:
        """Bytes of a device's HBM that a program may use."""
        return self.generation.hbm_bytes // self.generation.devices_per_chip

    @property
    def hbm_bytes_per_s(self) -> float:
        """Bytes per second between a device and its HBM."""
        return self.generation.hbm_bytes_per_s / self.generation.devices_per_chip

    @property
    def flops_per_s(self) -> float:
        """Peak of the whole slice."""
        return self.chips * self.generation.flops_per_s

    @property
    def axes(self) -> tuple[int, ...]:
        """Number of chips along each axis."""
        return tuple(_axes(self.shape))

    @property
    def chips_per_host(self) -> int:
        """Number of chips per host: 4, except in v5e and v6e slices of one chip or one
        8-chip host."""
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
        with a usual one, and for a generation that the Cloud TPU API does not have."""
        kind = self.generation
        if self.shape not in kind.shapes or not kind.type_name:
            return ""
        return f"{kind.type_name}-{self.chips * kind.counted_per_chip}"


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
    if island.devices != found.devices:
        each = "two devices" if found.devices > found.chips else "one device"
        raise ConfigError(
            f"islands.{name}: its mesh has {island.devices} devices, and "
            f"{found.topology} has {found.chips} chips, {each} each; choose mesh_* "
            f"whose product is {found.devices}, or another topology"
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
            if topology == find_slice(entry, field).accelerator_type != "":
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
        and shape == "x".join(map(str, axes))
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


def peak_flops_per_s(device_kind: str) -> float | None:
    """Return the peak of a device by the name that JAX has for it; None if that is not
    in the table."""
    for generation in GENERATIONS.values():
        if device_kind in generation.device_kinds:
            return generation.flops_per_s / generation.devices_per_chip
    return None


def ici_bytes_per_s(found: Slice) -> float:
    """Return the bytes per second that one device can send to neighbours of its chip.

    A ring axis has two links per chip, a line has one, and an axis of one chip has
    none. The devices of a chip share its links. The result is 0 for a single chip.
    """
    chip, axes = found.generation, found.axes
    rings = [axis % chip.wraps_from == 0 for axis in axes]
    if chip.wraps_together:
        rings = [all(rings)] * len(axes)
    used = sum(
        0 if axis == 1 else 2 if ring else 1
        for axis, ring in zip(axes, rings, strict=True)
    )
    return chip.ici_bytes_per_s * used / (2 * len(axes)) / chip.devices_per_chip


GOOGLE_VENDOR = "0x1ae0"
"""Vendor number of TPUs, and of some network cards, on the PCI bus."""
PCI_DEVICES = {
    "0x005e": "v4",
    "0x0063": "v5e",
    "0x0062": "v5p",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}
"""TPU generations by their device number on the PCI bus, with jax's numbers."""


def generation_here(root: Path = Path("/")) -> str:
    """Return the generation of this machine's TPUs; empty if it has no known one."""
    cards = root.glob("sys/bus/pci/devices/*")
    ids = [(_read(card / "vendor"), _read(card / "device")) for card in cards]
    known = [
        PCI_DEVICES.get(device) for vendor, device in ids if vendor == GOOGLE_VENDOR
    ]
    return next(filter(None, known), "")


def may_be_here(root: Path = Path("/")) -> bool:
    """Tell if any device of this machine may be a TPU."""
    if any(any(root.glob(pattern)) for pattern in ("dev/accel*", "dev/vfio/[0-9]*")):
        return True
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    return any(_read(vendor) == GOOGLE_VENDOR for vendor in vendors)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
