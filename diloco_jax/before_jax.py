"""The environment that jax must find when it is imported; imports no jax itself."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import metadata, util
from pathlib import Path

from diloco_jax import libtpu, machine
from diloco_jax.hardware import tpus

FLAG_LISTS = ("XLA_FLAGS", libtpu.VARIABLE)
"""Variables whose values are lists of flags. An unknown flag ends the process."""
HOST_DEVICES = "--xla_force_host_platform_device_count"
MULTI_SLICE = "MEGASCALE_"
"""Beginning of the names of a multi-slice job's variables."""
MIN_NPROC = 16


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


def dial_directly(host: str, environment: MutableMapping[str, str]) -> None:
    """Have gRPC of jax dial a host without the proxy that variables may name; call it
    before jax does. Its own variable replaces the general ones."""
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
    others = next((environment[name] for name in names if environment.get(name)), "")
    environment[names[0]] = f"{others},{host}" if others else host


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
    if not (chosen or named or _plugins() or tpus.may_be_here(root)):
        environment["JAX_PLATFORMS"] = "cpu"


def _plugins() -> bool:
    """Tell if jax has plugins, which is how it finds GPUs."""
    entry_points = metadata.entry_points(group="jax_plugins")
    return bool(entry_points) or util.find_spec("jax_plugins") is not None
