"""The facts about a process on which the bits of its results depend, for the tape."""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata
from pathlib import Path

from diloco_jax import libtpu, machine
from diloco_jax.before_jax import FLAG_LISTS

VECTOR_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
"""Instruction sets for which XLA compiles different code, as Linux names them."""


STEERING = ("JAX_", "XLA_", "TPU_", "LIBTPU_")
"""Beginnings of the names of variables that jax and its libraries read."""
NOT_STEERING = (
    *FLAG_LISTS,
    *("JAX_COORDINATOR_", "TPU_WORKER_", "TPU_PROCESS_ADDRESSES"),
)
"""Variables that are left out: the tape has flags as facts of their own, and the others
only name the places of hosts."""
LONGEST = 4096
"""Characters of a fact."""


def describe() -> dict[str, str | int]:
    """Return versions, flags, device kind; counts of devices, processes, threads."""
    import jax

    device = jax.devices()[0]
    return {
        "diloco_jax": metadata.version("diloco-jax"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "threads": _threads(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu": libtpu.installed_version(),
        "libtpu_flags": os.environ.get(libtpu.VARIABLE, ""),
        "variables": _variables(),
    }


def _variables() -> str:
    """Return the other variables that steer jax, as NAME=VALUE."""
    found = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(STEERING) and not name.startswith(NOT_STEERING)
    ]
    return " ".join(found)[:LONGEST]


def _threads() -> int:
    """Count the threads of XLA's pool, which decide how long sums are cut."""
    if nproc := os.environ.get("NPROC"):
        return int(nproc)
    return machine.schedulable()


def _cpu() -> str:
    """Return the name and instruction sets of the processor, if the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip().lower(), value.strip())
    flags = machine.instructions().split()
    sets = [name for name in VECTOR_SETS if name in flags]
    return " ".join((facts.get("model name", platform.machine()), *sets))
