"""What the child processes are started with: command lines and environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DILOCO = (sys.executable, "-m", "diloco_jax.cli")


def coordinator_command(workdir: Path, bind: str, init: bool) -> list[str]:
    """`diloco coordinator` for the run in `workdir`; `init` on its first start only."""
    command = [*DILOCO, "coordinator", str(workdir / "config.json")]
    command += ["--workdir", str(workdir), "--bind", bind]
    return [*command, "--init"] if init else command


def island_command(
    workdir: Path, name: str, coordinator: str, incarnation: int
) -> list[str]:
    """`diloco island` for one attempt of one island."""
    command = [*DILOCO, "island", str(workdir / "config.json"), "--name", name]
    command += ["--coordinator", coordinator, "--workdir", str(workdir)]
    return [*command, "--incarnation", str(incarnation)]


def eval_command(workdir: Path) -> list[str]:
    """`diloco eval` of a finished run."""
    return [*DILOCO, "eval", str(workdir), "--json"]


def coordinator_environment() -> dict[str, str]:
    """What is added to this process's environment for the coordinator."""
    return {
        **_compilation_cache(),
        "JAX_PLATFORMS": "cpu",
        # Page faults cost more than the arithmetic of a merge.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def island_environment() -> dict[str, str]:
    """What is added to this process's environment for an island.

    Islands on one machine compute on its CPU, unless JAX_PLATFORMS says otherwise.
    """
    platforms = os.environ.get("JAX_PLATFORMS") or "cpu"
    return {**_compilation_cache(), "JAX_PLATFORMS": platforms}


def _compilation_cache() -> dict[str, str]:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(home).expanduser() / "diloco_jax" / "jax"
    return {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", str(folder)
        )
    }
