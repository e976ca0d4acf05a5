"""The environment that jax must find when it is imported; imports no jax itself."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib import metadata, util
from pathlib import Path

from diloco_jax import libtpu, machine
from diloco_jax.errors import ConfigError
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
    touched. Raises ConfigError as `require_flags` and `require_platforms` do.
    """
    require_flags(environment)
    require_platforms(environment)
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
    if there is a sign of a TPU or a plugin for another accelerator. Raises ConfigError
    as `require_flags` and `require_platforms` do.
    """
    require_flags(environment)
    require_platforms(environment, root)
    chosen = "JAX_PLATFORMS" in environment
    if not (chosen or _plugins() or _may_have_tpu(environment, root)):
        environment["JAX_PLATFORMS"] = "cpu"


def require_platforms(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Raise ConfigError if JAX_PLATFORMS names what cannot be here: jax ends then, for
    some platforms without a word."""
    value = environment.get("JAX_PLATFORMS", "")
    here = {"cpu"}
    if libtpu.installed_version() and _may_have_tpu(environment, root):
        here.add("tpu")
    missing = {name.strip() for name in value.split(",")} - {"", *here}
    if missing and not (_plugins() and "tpu" not in missing):
        raise ConfigError(
            f"JAX_PLATFORMS = {value!r}, and jax has {', '.join(sorted(here))} here; "
            f"unset it, or pip install 'diloco-jax[tpu]' or 'diloco-jax[cuda]' on a "
            f"machine that has one"
        )


def require_flags(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if XLA does not take XLA_FLAGS: it ends the process."""
    given = environment.get("XLA_FLAGS", "").split()
    flags = " ".join(flag for flag in given if flag.split("=")[0] != HOST_DEVICES)
    # jax, where it is imported, has threads, beside which no fork is safe.
    if flags and "jax" not in sys.modules and (said := _refusal(flags)):
        raise ConfigError(f"XLA_FLAGS = {flags!r}: {said}; take that flag out")


@functools.cache
def _refusal(flags: str) -> str:
    """Return what XLA says against flags, or nothing. A fork of this process asks, as
    nothing but an end tells; it has no import to do, and takes milliseconds."""
    from jaxlib import xla_client

    ears, mouth = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.environ["XLA_FLAGS"] = flags
            os.dup2(mouth, 2)
            xla_client.CompileOptions()  # Reads them.
        finally:
            os._exit(0)
    os.close(mouth)
    with open(ears, errors="replace") as told:
        said = told.read().partition("\n")[0].rpartition("] ")[2]
    return said if os.waitpid(child, 0)[1] else ""


def _may_have_tpu(environment: Mapping[str, str], root: Path) -> bool:
    named = any(name.startswith(("TPU_", "JAX_FORCE_TPU")) for name in environment)
    return named or tpus.may_be_here(root)


def _plugins() -> bool:
    """Tell if jax has plugins, which is how it finds GPUs."""
    entry_points = metadata.entry_points(group="jax_plugins")
    return bool(entry_points) or util.find_spec("jax_plugins") is not None
