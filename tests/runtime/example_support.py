"""The loops of docs/embed.md and embed_more.md as real processes, and a coordinator of
their config."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from runtime_support import PATIENCE_S, await_that

from diloco_jax.cluster.cluster import free_port
from diloco_jax.observability.tape import read_tape

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("embed.md", "embed_more.md")]
DILOCO = (sys.executable, "-m", "diloco_jax.cli")
TIMEOUT_S = 240.0


def write_files(folder: Path) -> None:
    """Write the files that the pages show."""
    text = "\n".join(page.read_text() for page in PAGES)
    for name, code in re.findall(
        r"^```python file=(\S+)\n(.*?)^```$", text, re.M | re.S
    ):
        (folder / name).write_text(code)


class Example:
    """The page's files, its coordinator and its loops, as real processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workdir = folder, folder / "run"
        self.port = free_port()
        write_files(folder)

    def serve(self, *options: str) -> subprocess.Popen:
        command = [*DILOCO, "coordinator", "run.py", "--workdir", str(self.workdir)]
        command += ["--placement.bind", f"127.0.0.1:{self.port}", *options]
        with (self.folder / "coordinator.log").open("ab") as log:
            served = self._start(command, log)

        def is_up() -> bool:
            assert served.poll() is None, "the coordinator ended"
            return (self.workdir / "coordinator.address").exists()

        await_that(is_up)
        return served

    def kill(self, served: subprocess.Popen) -> None:
        """Kill the coordinator."""
        served.kill()
        served.wait(PATIENCE_S)
        (self.workdir / "coordinator.address").unlink()

    def train(self, name: str, attempt: int, pause_s: float) -> subprocess.Popen:
        return self.loop("train.py", name, attempt, pause_s)

    def keep(self, name: str, attempt: int, pause_s: float) -> subprocess.Popen:
        """The loop that writes checkpoints of its own, in `kept`."""
        folder = self.folder / "kept"
        return self.loop("train_kept.py", name, attempt, pause_s, folder)

    def loop(self, script: str, name: str, *arguments: object) -> subprocess.Popen:
        address = f"127.0.0.1:{self.port}"
        command = [sys.executable, script, address, name, *map(str, arguments)]
        return self._start(command, subprocess.PIPE)

    def _start(self, command: list[str], output) -> subprocess.Popen:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self.environment,
        )

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def until(self, condition) -> None:
        """Wait until the condition holds of the tape, once there is one."""
        tape = self.workdir / "tape.jsonl"
        await_that(
            lambda: tape.exists() and condition(list(read_tape(tape))), TIMEOUT_S
        )


def merges_of(tape, island: str, incarnation: int) -> int:
    return sum(
        (part["island"], part["incarnation"]) == (island, incarnation)
        for record in tape
        if record["kind"] == "merged"
        for part in record["contributions"]
    )
