"""Islands of several hosts as real processes, watched by `host_process.py`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from runtime_support import PATIENCE_S, coordinator, make_config, placed

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import Config
from diloco_jax.config.loading import write_config_json

HOST = Path(__file__).with_name("host_process.py")
TIMEOUT_S = 240.0


@contextlib.contextmanager
def hosts(
    config: Config,
    names: Iterable[str],
    address: str,
    folder: Path,
    how: str,
) -> Iterator[dict[str, subprocess.Popen]]:
    """Every host of these islands as `host_process.py`, NAME.INDEX; until the block
    ends."""
    path = folder / "config.json"
    write_config_json(config, path)
    children = {}
    try:
        for name in names:
            world = f"127.0.0.1:{free_port()}"
            for index in range(config.islands[name].hosts):
                arguments = [path, name, address, folder, world, index, how]
                with (folder / f"{name}.{index}.log").open("wb") as log:
                    children[f"{name}.{index}"] = subprocess.Popen(
                        [sys.executable, str(HOST), *map(str, arguments)],
                        stdout=log,
                        stderr=log,
                    )
        yield children
    finally:
        for child in children.values():
            child.kill()
            child.wait(TIMEOUT_S)


def run_processes(config: Config, folder: Path, how: str) -> dict[str, np.ndarray]:
    """A whole run of processes; the global parameters."""
    with (
        coordinator(config, folder / "run") as service,
        hosts(config, config.islands, service.address, folder, how) as children,
    ):
        for name, child in children.items():
            code = child.wait(TIMEOUT_S)
            assert code == 0, (folder / f"{name}.log").read_text()[-3000:]
        return service.holder.store.params()


def patient_config(text: Path, **sync: Any) -> Config:
    """Return a config for processes that may pause for long: no peer counts as gone."""
    return placed(make_config(text, **sync), time_budget_s=PATIENCE_S)


def fetched_bytes(folder: Path, name: str, hosts: int) -> dict[tuple[int, int], int]:
    """Bytes of one fetch over all hosts, by fragment and number of publishes."""
    found: dict[tuple[int, int], int] = {}
    for index in range(hosts):
        text = (folder / f"{name}.{index}.fetched").read_text()
        mine = {(fragment, count): size for fragment, count, size in json.loads(text)}
        for kind, size in mine.items():
            found[kind] = found.get(kind, 0) + size
    return found
