"""Command lines and environment of the child processes."""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path

from diloco_jax import before_jax, run_files
from diloco_jax.compilation import VARIABLE, of_user
from diloco_jax.wire import addresses

DILOCO = (sys.executable, "-P", "-m", "diloco_jax.cli")
"""The command, in whose process no file of the current folder replaces a module."""
ALLOCATOR = {
    "GLIBC_TUNABLES": (
        "glibc.malloc.hugetlb=1"
        ":glibc.malloc.mmap_threshold=33554432"
        ":glibc.malloc.trim_threshold=268435456"
    )
}
"""Settings of the allocator: huge pages, and up to 256 MiB of freed memory are kept.
XLA allocates its temporaries, and gRPC its messages, anew every time. Page faults cost
more than the arithmetic of a merge, a third of a step and a sixth of a transfer."""

_given: deque[int] = deque(maxlen=128)
"""Ports that `free_port` gave lately: not in use yet, perhaps, and not free."""


def coordinator_command(workdir: Path, bind: str, *how: str) -> list[str]:
    """Return the `diloco coordinator` command for the run in `workdir`.

    how: `--init` or `--resume` for the first start, nothing for later ones."""
    command = [*DILOCO, "coordinator", str(workdir / run_files.CONFIG)]
    command += ["--workdir", str(workdir), "--bind", bind, *_keys(workdir)]
    return [*command, *how]


def island_commands(
    workdir: Path, name: str, hosts: int, coordinator: str, incarnation: int
) -> list[list[str]]:
    """Return the `diloco island` commands of one attempt, one for each host."""
    command = [*DILOCO, "island", str(workdir / run_files.CONFIG), "--name", name]
    command += ["--coordinator", coordinator, "--workdir", str(workdir)]
    command += ["--incarnation", str(incarnation), *_keys(workdir)]
    if hosts == 1:
        return [command]
    world = ["--world", f"127.0.0.1:{free_port()}"]
    return [[*command, *world, "--host-index", str(n)] for n in range(hosts)]


def _keys(workdir: Path) -> list[str]:
    """Return the option that gives a child the keys of the run, if it has some."""
    folder = workdir / run_files.KEYS
    return ["--certificates", str(folder)] if folder.is_dir() else []


def free_port() -> int:
    """Return a free port of this machine, the one after it free, too, both out of reach
    of outgoing connections and neither given lately. If another program takes it before
    its use, the attempt fails and the next one asks again."""
    while True:
        address, beside = addresses.reserve("127.0.0.1:0")
        beside.close()
        port = addresses.parse_address(address)[1]
        if port not in _given and port + 1 not in _given:
            _given.extend((port, port + 1))
            return port


def eval_command(workdir: Path) -> list[str]:
    """Return the `diloco eval` command for a finished run."""
    return [*DILOCO, "eval", str(workdir), "--json"]


def dashboard_command(workdir: Path, port: int) -> list[str]:
    """Return the `diloco dashboard` command for a run of this machine."""
    return [*DILOCO, "dashboard", str(workdir), "--port", str(port)]


def coordinator_environment() -> dict[str, str]:
    """Return the coordinator's additions to this process's environment."""
    return {**_environment(), "JAX_PLATFORMS": "cpu"}


def island_environment() -> dict[str, str]:
    """Return an island's additions to this process's environment.

    Islands on one machine compute on its CPU, unless JAX_PLATFORMS says otherwise.
    Raises ConfigError if jax cannot have its platform or flags here.
    """
    before_jax.require_platforms()
    before_jax.require_flags()
    platforms = os.environ.get("JAX_PLATFORMS") or "cpu"
    return {**_environment(), "JAX_PLATFORMS": platforms}


def _environment() -> dict[str, str]:
    """Return what both add. Without a home, each process has the cache of the run."""
    cache = of_user()
    return ALLOCATOR if cache is None else {VARIABLE: str(cache), **ALLOCATOR}
