"""The environment that jax must find when it is imported; imports no jax itself."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import metadata, util
from pathlib import Path

HOST_DEVICES = "--xla_force_host_platform_device_count"
MIN_NPROC = 16
MULTI_SLICE = "MEGASCALE_"
GOOGLE = "0x1ae0"
"""Vendor of TPUs, and of some network cards, on the PCI bus."""
LIBTPU_FLAGS = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
"""Without them no all-gather of a step overlaps with its matrix products."""


def prepare_environment(
    devices: int, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Gives the process `devices` virtual CPU devices; call before importing jax.

    Variables of a multi-slice job that it inherited are cleared: an island's world is
    one slice, and with them jax would wait for the others. Real accelerators are not
    touched. NPROC sizes XLA's thread pool: with as many threads as two cores suggest,
    several devices and steps dispatched ahead, jax 0.10.2 waits for itself forever.
    One device needs no more threads than cores. libtpu is told to overlap what can
    be; flags that are set already stay.
    """
    for name in [name for name in environment if name.startswith(MULTI_SLICE)]:
        del environment[name]
    flags = environment.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if flag.split("=")[0] != HOST_DEVICES]
    environment["XLA_FLAGS"] = " ".join([*flags, f"{HOST_DEVICES}={devices}"])
    if devices > 1 and int(environment.get("NPROC") or 0) < MIN_NPROC:
        environment["NPROC"] = str(MIN_NPROC)
    told = environment.get("LIBTPU_INIT_ARGS", "").split()
    names = {flag.split("=")[0] for flag in told}
    missing = [flag for flag in LIBTPU_FLAGS if flag.split("=")[0] not in names]
    environment["LIBTPU_INIT_ARGS"] = " ".join([*told, *missing])


def skip_absent_tpu(
    environment: MutableMapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Where the CPU is all that jax can find, has it look no further; call before
    importing jax.

    With libtpu installed it would ask that for a TPU, which asks a metadata server and
    complains on standard error. Nothing is hidden: with a platform chosen, a sign of a
    TPU, or a plugin for another accelerator, jax looks for itself.
    """
    chosen = "JAX_PLATFORMS" in environment
    told = any(name.startswith(("TPU_", "JAX_FORCE_TPU")) for name in environment)
    if not (chosen or told or _plugins() or _google_devices(root)):
        environment["JAX_PLATFORMS"] = "cpu"


def _plugins() -> bool:
    """Whether jax has any, which is how it finds GPUs."""
    entry_points = metadata.entry_points(group="jax_plugins")
    return bool(entry_points) or util.find_spec("jax_plugins") is not None


def _google_devices(root: Path) -> bool:
    """Whether anything here may be a TPU."""
    if any(any(root.glob(pattern)) for pattern in ("dev/accel*", "dev/vfio/[0-9]*")):
        return True
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    return any(vendor.read_text().strip() == GOOGLE for vendor in vendors)
