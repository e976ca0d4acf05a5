"""A primary, its standby and two islands as real processes, with a link between the
two coordinators that can be cut."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import support
from runtime_support import make_config, placed, with_run

from diloco_jax.chaos.relay import Relay
from diloco_jax.cluster import commands
from diloco_jax.cluster.commands import free_port
from diloco_jax.config import Config
from diloco_jax.config.loading import write_config_json
from diloco_jax.deadlines import Deadlines
from diloco_jax.observability.tape import read_tape
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import WireError

STEP_SECONDS, TRAINING_SECONDS = 0.25, 30
BUDGET_S, TIMEOUT_S = 4.0, 150.0
CYCLE_STEPS = 6


class Site:
    """The processes, by name: "one" leads at first, "two" is its standby."""

    def __init__(self, text: Path, folder: Path) -> None:
        self.folder = folder
        config = make_config(text, steps_per_cycle=CYCLE_STEPS, fragments=3, quorum=1)
        steps = round(TRAINING_SECONDS / STEP_SECONDS)
        tokens = steps * (2 + 4) * config.run.sequence_length
        islands = {
            name: dataclasses.replace(island, step_seconds=STEP_SECONDS)
            for name, island in config.islands.items()
        }
        self.addresses = {n: f"127.0.0.1:{free_port()}" for n in ("one", "two")}
        config = with_run(config, total_tokens=tokens)
        self.config: Config = placed(
            dataclasses.replace(config, islands=islands),
            time_budget_s=BUDGET_S,
            evaluate_every_steps=0,
            snapshot_every_s=2.0,
            mandate=str(folder / "mandate"),
            standby=self.addresses["two"],
        )
        write_config_json(self.config, folder / "config.json")
        self.link = Relay(self.addresses["one"])
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *how: str) -> None:
        """Start a coordinator."""
        command = [*support.DILOCO, "coordinator", str(self.folder / "config.json")]
        command += ["--workdir", str(self.workdir(name)), *how]
        command += ["--bind", self.addresses[name]]
        self._start(name, command, commands.coordinator_environment())

    def start_islands(self) -> None:
        islands = self.folder / "islands"
        islands.mkdir()
        write_config_json(self.config, islands / "config.json")
        for name, island in self.config.islands.items():
            (train,) = commands.island_commands(
                islands, name, island.hosts, self.addresses["one"], 1
            )
            self._start(name, train, commands.island_environment())

    def _start(self, name: str, command: list[str], more: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as output:
            self.running[name] = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | more
            )

    def workdir(self, name: str) -> Path:
        return self.folder / name

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait(self, name: str) -> int:
        """The exit code of a process."""
        try:
            return self.running[name].wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log(name)) from None

    def await_status(
        self, name: str, holds: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """The status of a coordinator, once it is so."""
        deadline = time.monotonic() + TIMEOUT_S
        client = Client(
            self.addresses[name],
            tls=None,
            deadlines=Deadlines(BUDGET_S),
            bulk_channels=1,
        )
        last: object = None
        with contextlib.closing(client):
            while time.monotonic() < deadline:
                with contextlib.suppress(WireError):
                    last = status = client.status(1.0)
                    if holds(status):
                        return status
                time.sleep(0.05)
        raise AssertionError(f"{last}\n{self.log(name)}")

    def tape(self, name: str) -> list[dict[str, Any]]:
        return list(read_tape(self.workdir(name) / "tape.jsonl"))

    def summary(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.workdir(name) / "summary.json").read_bytes()
        )
        return found

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        self.link.close()


@contextlib.contextmanager
def trained(text: Path, folder: Path, merges: int) -> Iterator[Site]:
    """A site whose islands have trained for so many merges, with a standby in step."""
    site = Site(text, folder)
    try:
        site.start("one", "--init")
        site.start("two", "--standby-of", site.link.address)
        site.start_islands()
        site.await_status(
            "one",
            lambda s: s["merges"] >= merges and s["mandate"]["state"] == "in_step",
        )
        yield site
    finally:
        site.close()
