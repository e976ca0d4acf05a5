"""A coordinator and islands as processes of a benchmark, where it wants them: on cores
of their own, or in network namespaces."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import support
from machine import CpuSamples, cpu_seconds, peak_memory

from diloco_jax import run_files
from diloco_jax.config import Config
from diloco_jax.files import write_json
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape

POLL_S = 0.5


class PinnedRun:
    """A run in `folder`, of processes that `pinned_run` ends."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        within: Callable[[str], list[str]] = lambda name: [],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """within: the begin of the command line of a process, by its name. environment:
        more of it, for all."""
        self.config, self.workdir = config, folder / "run"
        self._environment = dict(environment)
        self._within = within
        self._path, self._log = folder / run_files.CONFIG, folder / "log"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cpu: CpuSamples = collections.defaultdict(list)
        self.peaks: dict[str, int] = {}
        """Largest resident set of each process in bytes."""
        write_json(dataclasses.asdict(config), self._path)
        self._workdir_of, self.address = folder, ""

    def begin(self) -> None:
        """Start the coordinator and its workers, and wait until they serve."""
        folder, config = self._workdir_of, self.config
        for number in range(len(config.placement.worker_addresses)):
            words = ["worker", str(self._path), "--index", str(number)]
            words += ["--workdir", str(folder / f"worker-{number}")]
            self.start(f"worker-{number}", [*support.DILOCO, *words])
        serve = ["coordinator", str(self._path), "--workdir", str(self.workdir)]
        self.start("coordinator", [*support.DILOCO, *serve, "--init"])
        address = self.workdir / run_files.ADDRESS
        self.until(address.exists, 120.0)
        self.address = address.read_text().strip()

    def island(
        self,
        name: str,
        core: int | None = None,
        incarnation: int = 1,
        environment: Mapping[str, str] = MappingProxyType({}),
        program: Sequence[str] = support.DILOCO,
    ) -> None:
        """Start an island, on that core alone if one is given; the folder of its
        checkpoints and compiled programs stays with its name. environment: more of it,
        for this process. program: the begin of its command."""
        command = [*program, "island", str(self._path), "--name", name]
        command += ["--coordinator", self.address, "--incarnation", str(incarnation)]
        command += ["--workdir", str(self._workdir_of / name)]
        pin = [] if core is None else ["taskset", "--cpu-list", str(core)]
        self.start(name, [*pin, *command], environment)

    def kill(self, name: str) -> None:
        """End a process with SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def terminate(self, name: str) -> None:
        """Ask a process to end, and wait for it."""
        process = self._processes.pop(name)
        process.terminate()
        process.wait(120.0)

    def log_of(self, name: str) -> str:
        """Return what the process has said."""
        return self._log.with_suffix(f".{name}").read_text(errors="replace")

    def until(self, reached: object, timeout_s: float) -> None:
        """Wait for it, while CPU seconds are sampled; raises RunError if it does not
        come in time, or if a process ends with an error. reached: a function."""
        deadline = time.monotonic() + timeout_s
        while not reached():  # type: ignore[operator]
            for name, process in self._processes.items():
                with contextlib.suppress(
                    OSError, ValueError, IndexError, StopIteration
                ):
                    sample = time.time(), cpu_seconds(process.pid)
                    self._cpu[name, process.pid].append(sample)
                    peak = peak_memory(process.pid)
                    self.peaks[name] = max(peak, self.peaks.get(name, 0))
                if process.poll():
                    raise support.RunError(f"{name} failed:\n{self.log_of(name)}")
            if time.monotonic() > deadline:
                logs = "\n".join(map(self.log_of, self._processes))
                raise support.RunError(f"not within {timeout_s:g} s:\n{logs[-4000:]}")
            time.sleep(POLL_S)

    def pids(self) -> dict[str, int]:
        """Return the processes that were started, by their names."""
        return {name: process.pid for name, process in self._processes.items()}

    def tape(self) -> list[dict[str, Any]]:
        """Return the records of the tape so far."""
        return list(read_tape(self.workdir / run_files.TAPE))

    def metrics(self) -> list[dict[str, object]]:
        """Return the lines of metrics so far."""
        return list(read_metrics(self.workdir))

    def finish(self, timeout_s: float) -> support.Run:
        """Wait until all have ended, and return the files and figures."""
        self.until(
            lambda: all(p.poll() is not None for p in self._processes.values()),
            timeout_s,
        )
        summary = json.loads((self.workdir / run_files.SUMMARY).read_bytes())
        return support.Run(
            config=self.config,
            workdir=self.workdir,
            summary=summary,
            tape=list(read_tape(self.workdir / run_files.TAPE)),
            metrics=list(read_metrics(self.workdir)),
            cpu=dict(self._cpu),
        )

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def start(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start a process of that name. environment: more of it, for this one."""
        command = [*self._within(name), *command]
        env = os.environ | self._environment | dict(environment)
        with self._log.with_suffix(f".{name}").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=env
            )


@contextlib.contextmanager
def pinned_run(
    config: Config,
    folder: Path,
    within: Callable[[str], list[str]] = lambda name: [],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[PinnedRun]:
    """The run, whose processes end with the block; arguments of `PinnedRun`."""
    run = PinnedRun(config, folder, within, environment)
    try:
        run.begin()
        yield run
    finally:
        run.close()


def cores() -> list[int]:
    """Return the cores of this process."""
    return sorted(os.sched_getaffinity(0))
