"""The environment that jax must find when it is imported; imports no jax itself."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import metadata, util
from pathlib import Path

from diloco_jax import libtpu, machine
from diloco_jax.config import IslandConfig

HOST_DEVICES = "--xla_force_host_platform_device_count"
MIN_NPROC = 16
MULTI_SLICE = "MEGASCALE_"
GOOGLE = "0x1ae0"
"""Vendor number of TPUs, and of some network cards, on the PCI bus."""
GENERATIONS = {"0x0062": "v5p", "0x006f": "v6e"}
"""TPU generations by their device number on the PCI bus, with jax's numbers."""


def prepare_island(
    island: IslandConfig,
    environment: MutableMapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> None:
    """Make the process one host of the island; call before importing jax.

    libtpu's flags are those of the island's topology, or else of this machine's TPUs.
    """
    prepare_environment(island.devices // island.hosts, environment)
    generation = libtpu.generation_of(island.topology) or generation_here(root)
    libtpu.set_flags(generation, environment)


def prepare_environment(
    devices: int, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Give the process `devices` virtual CPU devices; call before importing jax.

    Variables of a multi-slice job that it inherited are cleared: an island's world is
    one slice, and with them jax would wait for the others. Real accelerators are not
    touched.
    """
    for name in [name for name in environment if name.startswith(MULTI_SLICE)]:
        del environment[name]
    flags = environment.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if flag.split("=")[0] != HOST_DEVICES]
    environment["XLA_FLAGS"] = " ".join([*flags, f"{HOST_DEVICES}={devices}"])
    machine.fit_threads(environment, MIN_NPROC if devices > 1 else 1)


def skip_absent_tpu(
    environment: MutableMapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Choose the CPU if jax could find nothing else; call before importing jax.

    Otherwise jax would ask an installed libtpu for a TPU, which asks a metadata server
    and complains on standard error. Nothing is chosen if a platform is set already, or
    if there is a sign of a TPU or a plugin for another accelerator.
    """
    chosen = "JAX_PLATFORMS" in environment
    named = any(name.startswith(("TPU_", "JAX_FORCE_TPU")) for name in environment)
    if not (chosen or named or _plugins() or _google_devices(root)):
        environment["JAX_PLATFORMS"] = "cpu"


def generation_here(root: Path = Path("/")) -> str:
    """Return the generation of this machine's TPUs; empty if it has no known one."""
    cards = root.glob("sys/bus/pci/devices/*")
    ids = [(_read(card / "vendor"), _read(card / "device")) for card in cards]
    known = [GENERATIONS.get(device) for vendor, device in ids if vendor == GOOGLE]
    return next(filter(None, known), "")


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _plugins() -> bool:
    """Tell if jax has plugins, which is how it finds GPUs."""
    entry_points = metadata.entry_points(group="jax_plugins")
    return bool(entry_points) or util.find_spec("jax_plugins") is not None


def _google_devices(root: Path) -> bool:
    """Tell if any device here may be a TPU."""
    if any(any(root.glob(pattern)) for pattern in ("dev/accel*", "dev/vfio/[0-9]*")):
        return True
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    return any(_read(vendor) == GOOGLE for vendor in vendors)
