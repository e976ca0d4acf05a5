"""A coordinator, its standby and their islands as real processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import DILOCO

from diloco_jax import run_files
from diloco_jax.cluster import commands
from diloco_jax.cluster.children import start_child
from diloco_jax.cluster.commands import free_port
from diloco_jax.config import Config
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.mandates.folder import FolderStore
from diloco_jax.coordinator.standby.name import read_name
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.standby.mandate import Mandate

NODES = ("one", "two")
"""Names of the two coordinators; the first one leads at first."""


class Pair:
    """The processes, by name. Call everything from the main thread, with which they
    end."""

    def __init__(
        self, config: Config, folder: Path, keys: Mapping[str, Path] | None = None
    ) -> None:
        """config: resolved; it gets addresses and a mandate in `folder`. keys: folders
        of certificates by name of a process."""
        self.folder, self._keys = folder, keys or {}
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in NODES}
        placement = dataclasses.replace(
            config.placement,
            mandate=str(folder / "mandate"),
            standby=self.addresses["two"],
        )
        self.config = dataclasses.replace(config, placement=placement).validate()
        write_config_json(self.config, folder / run_files.CONFIG)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._store = FolderStore(placement.mandate)

    def start(self, name: str, *how: str) -> None:
        """Start a coordinator. how: `--init` or `--standby-of HOST:PORT`."""
        command = [*DILOCO, "coordinator", str(self.folder / run_files.CONFIG)]
        command += ["--workdir", str(self.workdir(name)), *how]
        command += ["--bind", self.addresses[name]]
        self._start(name, command, commands.coordinator_environment())

    def start_islands(self) -> None:
        """Start the islands, which dial the first coordinator."""
        islands = self.folder / "islands"
        islands.mkdir()
        write_config_json(self.config, islands / run_files.CONFIG)
        for name, island in self.config.islands.items():
            (train,) = commands.island_commands(
                islands, name, island.hosts, self.addresses["one"], 1
            )
            self._start(name, train, commands.island_environment())

    def _start(self, name: str, command: list[str], more: dict[str, str]) -> None:
        if name in self._keys:
            command = [*command, "--certificates", str(self._keys[name])]
        with (self.folder / f"{name}.log").open("ab") as output:
            self.running[name] = start_child(command, more, output, output)

    def workdir(self, name: str) -> Path:
        """Return the workdir of a coordinator."""
        return self.folder / name

    def log(self, name: str) -> str:
        """Return what a process has said."""
        return (self.folder / f"{name}.log").read_text()

    def tape(self, name: str) -> list[dict[str, Any]]:
        """Return the tape of a coordinator, empty if it has none yet."""
        path = self.workdir(name) / run_files.TAPE
        return list(read_tape(path)) if path.exists() else []

    def summary(self, name: str) -> dict[str, Any]:
        """Return the summary that a coordinator wrote."""
        path = self.workdir(name) / run_files.SUMMARY
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found

    def mandate(self) -> Mandate | None:
        """Return the mandate as it is now; None before anybody led."""
        return self._store.read(0.0)[1]

    def named(self, node: str) -> str:
        """Return the coordinator that is this node; empty if none is."""
        for name in NODES:
            path = self.workdir(name) / run_files.NODE
            if node and path.exists() and read_name(self.workdir(name)) == node:
                return name
        return ""

    def close(self) -> None:
        """End all processes now."""
        for process in self.running.values():
            process.kill()
            process.wait()


def other(name: str) -> str:
    """Return the other coordinator."""
    return NODES[1 - NODES.index(name)]
