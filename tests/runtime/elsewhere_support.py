"""Workers that run as on other machines: with workdirs and keys of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from pathlib import Path

from runtime_support import PATIENCE_S

from diloco_jax.cluster.cluster import DILOCO, free_port
from diloco_jax.config import Config
from diloco_jax.wire.certificates import make_certificates

CHECKPOINTS = Path("checkpoints") / "coordinator"
"""In a workdir, the folder of snapshots."""


def with_workers_elsewhere(config: Config, folder: Path, **changes) -> Config:
    """The config with two workers at addresses of their own, and its certificates."""
    make_certificates(folder, [], 1, islands=list(config.islands), workers=2)
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))
    placement = dataclasses.replace(
        config.placement,
        workers=2,
        worker_addresses=addresses,
        certificates=str(folder),
        **changes,
    )
    return dataclasses.replace(config, placement=placement).validate()


class WorkerProcess:
    """`diloco worker`, as on a machine of its own."""

    def __init__(self, config: Path, index: int, workdir: Path) -> None:
        words = [*DILOCO, "worker", str(config), "--index", str(index)]
        words += ["--workdir", str(workdir)]
        self.log = workdir.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it, however it is."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()


@contextlib.contextmanager
def two_workers(config_path: Path, folder: Path):
    """Two `diloco worker`, with workdirs of their own."""
    made = [
        WorkerProcess(config_path, index, folder / f"worker-{index}")
        for index in range(2)
    ]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def snapshots_in(workdir: Path) -> list[int]:
    """The fragments of which a workdir has a snapshot."""
    folder = workdir / CHECKPOINTS
    return sorted({int(path.parent.name) for path in folder.glob("*/*.snapshot")})
