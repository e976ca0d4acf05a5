"""The machine of a benchmark, and the CPU time of a run's processes (Linux)."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from pathlib import Path

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
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue
        if str(workdir) not in words:
            continue
        if "--name" in words:
            name = words[words.index("--name") + 1]
        elif "--bind" in words:
            name = "coordinator"
        else:
            continue
        ticks = int(fields[11]) + int(fields[12])
        seconds = ticks / os.sysconf("SC_CLK_TCK")
        samples[name, int(folder.name)].append((time.time(), seconds))
