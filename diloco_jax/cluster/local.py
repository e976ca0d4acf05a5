"""`diloco run` from Python: real processes to watch, kill and pause.

    with LocalCluster(config) as cluster:
        cluster.until(lambda status: status["merges"] > 10, timeout_s=120)
        cluster.islands["v5p-a"].kill()
        summary = cluster.wait(timeout_s=600)

The processes are children of a separate `diloco run`, which restarts those that crash.
They end with it, and it ends with this process, however that happens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.cluster.cluster import DILOCO
from diloco_jax.cluster.processes import noted, private_files, quoted, start_child
from diloco_jax.cluster.status import read_status
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.config import require_files
from diloco_jax.files import absolute, write_json
from diloco_jax.wire.errors import WireError

POLL_S = 0.2


class LocalClusterError(RuntimeError):
    """The run did not reach the awaited state: names it, and quotes the log's end."""


@dataclasses.dataclass(frozen=True)
class LocalProcess:
    """The coordinator, or an island with all its hosts. Signals go to the current
    process; after a restart, to the new one."""

    name: str
    workdir: Path

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of hosts; empty while it is not running."""
        return noted(self.workdir).get(self.name, [])

    def kill(self, host: int = 0) -> None:
        """Send SIGKILL, as when a machine is lost."""
        self._signal(signal.SIGKILL, host)

    def pause(self, host: int = 0) -> None:
        """Send SIGSTOP, as when a machine hangs."""
        self._signal(signal.SIGSTOP, host)

    def resume(self, host: int = 0) -> None:
        """Send SIGCONT, after `pause`."""
        self._signal(signal.SIGCONT, host)

    def _signal(self, number: int, host: int) -> None:
        pids = self.pids
        if host >= len(pids):
            raise LocalClusterError(
                f"{self.name} has no process for host {host}: it has {len(pids)} now"
            )
        os.kill(pids[host], number)


class LocalCluster:
    """One run of a config on this machine, in a folder of its own.

    Use it as a context manager: its processes start with the block, and all of them
    end with it. docs/python.md has an example that a test runs.

    Attributes:
      coordinator, islands: handles on the processes, the islands' by name: `pids`,
        `kill()`, `pause()`, `resume()`.
      workdir: folder of the run, for `read_history` and `load_params`.
      log: what `diloco run` said.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | Path | None = None,
        launcher: Sequence[str] = ("run",),
    ) -> None:
        """workdir: folder that stays afterwards; None = a temporary one, removed at the
        end. launcher: `diloco run`, or `diloco chaos`, and its options. Raises
        ConfigError if the config cannot run."""
        self.config = config.validate()
        require_files(config.run)
        self._temporary = None
        if workdir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="diloco-")
            workdir = self._temporary.name
        self.workdir = Path(absolute(str(workdir))) / "run"
        self.log = self.workdir.with_name("diloco.log")
        self.coordinator = LocalProcess("coordinator", self.workdir)
        self.islands = {
            name: LocalProcess(name, self.workdir) for name in config.islands
        }
        self._command = tuple(launcher)
        self._launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the launcher, which starts everything; return at once."""
        path = self.log.with_name(run_files.CONFIG)
        name, *options = self._command
        command = [*DILOCO, name, str(path), "--workdir", str(self.workdir), *options]
        with private_files():
            self.log.parent.mkdir(parents=True, exist_ok=True)
            write_json(dataclasses.asdict(self.config), path)
            with self.log.open("wb") as log:
                self._launcher = start_child(command, {}, log, log)

    def status(self) -> dict[str, Any]:
        """Return the status as `diloco status` does. It has only `phase`, "starting",
        before the coordinator is up, and "unreachable" while it is away."""
        try:
            return read_status(str(self.workdir), self.config.placement)
        except ConfigError:
            return {"phase": "starting", "islands": {}, "merges": 0}
        except WireError:
            return {"phase": "unreachable", "islands": {}, "merges": 0}

    def until(
        self, holds: Callable[[dict[str, Any]], bool], timeout_s: float
    ) -> dict[str, Any]:
        """Wait for the first status that meets the condition, and return it.

        Raises LocalClusterError if the run ends before that, or after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not holds(status := self.status()):
            if self.ended:
                raise self.error("ended before it met the condition", status)
            if time.monotonic() >= deadline:
                raise self.error(
                    f"did not meet the condition in {timeout_s:g} s", status
                )
            time.sleep(POLL_S)
        return status

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the run is done and evaluated; return its summary.

        Raises LocalClusterError if the run fails, or after `timeout_s`.
        """
        assert self._launcher is not None, "start it first"
        try:
            code = self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.error(f"was not done in {timeout_s:g} s", {}) from None
        if code:
            raise self.error(f"ended with exit code {code}", {})
        return dict(json.loads((self.workdir / run_files.SUMMARY).read_bytes()))

    def close(self) -> None:
        """End every process; remove the folder if it is a temporary one."""
        if self._launcher is not None and not self.ended:
            self._launcher.terminate()
            try:
                # Islands say goodbye, then the coordinator sums up (`Cluster.stop`).
                stop_s = self.config.placement.deadlines.stop_s
                steps = (i.step_seconds for i in self.config.islands.values())
                self._launcher.wait(4 * stop_s + 2 * max(steps))
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def ended(self) -> bool:
        """Whether the launcher does not run, or not any more."""
        return self._launcher is None or self._launcher.poll() is not None

    def error(self, what: str, status: dict[str, Any]) -> LocalClusterError:
        """Return the error of a run of which that is to be told."""
        phase = f" (phase {status['phase']})" if "phase" in status else ""
        return LocalClusterError(f"the run {what}{phase}; {quoted(self.log)}")
