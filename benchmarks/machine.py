"""The machine of a benchmark, and what a run's processes use of it (Linux)."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from diloco_jax import run_files

CpuSamples = dict[tuple[str, int], list[tuple[float, float]]]
"""(unix time, CPU seconds so far), by process: (island or "coordinator", pid)."""


def machine_facts() -> dict[str, str]:
    """Return command, date, machine and versions."""
    command = [Path(sys.executable).name, f"benchmarks/{Path(sys.argv[0]).name}"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return {
        "command": f"`{shlex.join([*command, *sys.argv[1:]])}`",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{cores} cores, {processor()}, {memory:.0f} GiB",
        "versions": f"jax {importlib.metadata.version('jax')}, "
        f"Python {platform.python_version()}",
    }


def processor() -> str:
    """Return the processor's name."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (models or ["unknown"])[0]


def sample_cpu(workdir: Path, samples: CpuSamples) -> None:
    """Add one sample of every process that serves the run in `workdir`."""
    for name, folder in _processes(workdir):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks = int(fields[11]) + int(fields[12])
        seconds = ticks / os.sysconf("SC_CLK_TCK")
        samples[name, int(folder.name)].append((time.time(), seconds))


class _Watch:
    """A thread that looks every `pause_s` while its block lasts."""

    pause_s = 1.0

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.pause_s):
            self._look()

    def _look(self) -> None:
        raise NotImplementedError


class Stall(_Watch):
    """The longest time by which a thread overslept: the hiccups of the machine."""

    pause_s = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._before = time.monotonic()

    def __enter__(self) -> Self:
        self._before = time.monotonic()
        return super().__enter__()

    def _look(self) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._before - self.pause_s)
        self._before = now


class PeakUse(_Watch):
    """The most memory of each of a run's processes, and of its disk."""

    def __init__(self, workdir: Path) -> None:
        super().__init__()
        self.memory: dict[str, int] = {}
        """Bytes by name, over all lives and hosts of it."""
        self.disk = 0
        """Bytes in the workdir, but for what processes compiled and wrote as logs."""
        self._workdir = workdir

    def _look(self) -> None:
        for name, folder in _processes(self._workdir):
            with contextlib.suppress(OSError, StopIteration):
                lines = (folder / "status").read_text().splitlines()
                line = next(each for each in lines if each.startswith("VmHWM:"))
                peak = int(line.split()[1]) * 1024
                self.memory[name] = max(self.memory.get(name, 0), peak)
        self.disk = max(self.disk, sum(self._file_sizes()))

    def _file_sizes(self) -> Iterator[int]:
        aside = {self._workdir / name for name in (run_files.CACHE, run_files.LOGS)}
        for folder, names, files in os.walk(self._workdir):
            names[:] = [name for name in names if Path(folder) / name not in aside]
            for name in files:
                with contextlib.suppress(OSError):  # Renamed or removed meanwhile.
                    yield (Path(folder) / name).stat().st_blocks * 512


def _processes(workdir: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the folder in /proc of each process that serves the run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if str(workdir) not in words:
            continue
        if "--name" in words:
            yield words[words.index("--name") + 1], folder
        elif "--bind" in words:
            yield "coordinator", folder
