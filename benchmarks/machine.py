"""The machine and the code of a benchmark, and what a run's processes use (Linux)."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from diloco_jax import run_files
from diloco_jax.files import digest_of

ROOT = Path(__file__).resolve().parents[1]

NOT_COUNTED = (run_files.CACHE, run_files.LOGS)
"""Folders of a workdir whose size is no property of the run."""
FACTS = ("command", "date", "commit", "machine", "load", "versions")
"""Names of what `machine_facts` returns, in raw results and on pages."""
CpuSamples = dict[tuple[str, int], list[tuple[float, float]]]
"""(unix time, CPU seconds so far), by process: (island or "coordinator", pid)."""


def machine_facts() -> dict[str, str]:
    """Return command, date, commit, machine and versions."""
    script = Path(sys.argv[0])
    command = [Path(sys.executable).name, f"benchmarks/{script.name}"]
    if script.name == "__main__.py":
        command[1:] = ["-m", f"benchmarks.{script.parent.name}"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return {
        "command": f"`{shlex.join([*command, *without_paths(sys.argv[1:])])}`",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": f"{cores} core{'s' * (cores != 1)}, {processor()}, {memory:.0f} GiB",
        "load": "{:.1f}, {:.1f} and {:.1f} over 1, 5 and 15 minutes, at the end".format(
            *os.getloadavg()
        ),
        "versions": f"jax {importlib.metadata.version('jax')}, "
        f"Python {platform.python_version()}",
    }


@functools.cache
def commit() -> str:
    """Return the commit of this code, with a + if package or benchmarks differ from it;
    "unknown" outside of a git clone."""

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        code = ("--", "diloco_jax", "benchmarks")
        changed = git("diff", "--name-only", "HEAD", *code)
        return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance(*settings: object) -> dict[str, str]:
    """Return what made a run: the commit, and a digest of its settings, which are
    dataclasses or JSON values. Paths into this repository count from its root."""
    told = json.dumps(settings, default=_as_json, sort_keys=True)
    return {
        "commit": commit(),
        "config": digest_of(told.replace(f"{ROOT}/", "").encode())[:16],
    }


def _as_json(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON. Raises TypeError for anything else."""
    return dataclasses.asdict(value)


def without_paths(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the option's name in capitals in place of each
    path of this machine, which says nothing elsewhere, and without those that only say
    where results go (`--out DIR`, `--json`)."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--out":
            next(rest, None)
        if word in ("--out", "--json") or word.startswith("--out="):
            continue
        option, equals, value = word.rpartition("=")
        if Path(value).expanduser().is_absolute():
            named = option or (found[-1] if found else "")
            place = named.lstrip("-").upper() if named.startswith("--") else "PATH"
            word = f"{option}{equals}{place}"
        found.append(word)
    return found


def device() -> dict[str, str]:
    """Return the kind of the device that this process computes on, and the processor if
    it is that."""
    import jax

    kind = jax.devices()[0].device_kind
    return {"device": kind} | ({"processor": processor()} if kind == "cpu" else {})


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
    for name, folder in processes(workdir):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            samples[name, pid].append((time.time(), cpu_seconds(pid)))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, all its threads; raises OSError if it
    is gone."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory(pid: int) -> int:
    """Return the largest resident set of a process so far, in bytes; raises OSError if
    it is gone."""
    return 1024 * number_of(Path(f"/proc/{pid}/status"), "VmHWM:")


class Watch:
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


class Stall(Watch):
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


class PeakUse(Watch):
    """The most memory of each of a run's processes, and of its disk."""

    pause_s = 0.2

    def __init__(self, workdir: Path) -> None:
        super().__init__()
        self.memory: dict[str, int] = {}
        """Peak of the resident set by name, over all lives and hosts of it."""
        self.own: dict[str, int] = {}
        """The most that was sampled of it without mapped files (RssAnon): these count
        as resident, and the system takes their pages back when it needs memory."""
        self.disk = 0
        """Bytes in the workdir, but for what processes compiled and wrote as logs."""
        self._workdir = workdir

    def _look(self) -> None:
        for name, folder in processes(self._workdir):
            with contextlib.suppress(OSError, StopIteration):
                peak = 1024 * number_of(folder / "status", "VmHWM:")
                self.memory[name] = max(self.memory.get(name, 0), peak)
                own = 1024 * number_of(folder / "status", "RssAnon:")
                self.own[name] = max(self.own.get(name, 0), own)
        self.disk = max(self.disk, disk_bytes(self._workdir, NOT_COUNTED))


def disk_bytes(workdir: Path, aside: Iterable[str]) -> int:
    """Return the bytes of the files in a workdir, but for those under these names."""
    total = 0
    for folder, names, files in os.walk(workdir):
        if Path(folder) == workdir:
            names[:] = [name for name in names if name not in aside]
            files = [name for name in files if name not in aside]
        for name in files:
            with contextlib.suppress(OSError):  # Renamed or removed meanwhile.
                total += (Path(folder) / name).stat().st_blocks * 512
    return total


class Pinned(PeakUse):
    """The same, and each named process is kept on a core of its own from its start."""

    def __init__(self, workdir: Path, cores: Mapping[str, int]) -> None:
        """cores: number of the core by the name of an island. jax takes as many threads
        as a process has cores when it is first used."""
        super().__init__(workdir)
        self._cores = cores

    def _look(self) -> None:
        for name, folder in processes(self._workdir):
            with contextlib.suppress(OSError):
                if name in self._cores:
                    os.sched_setaffinity(int(folder.name), {self._cores[name]})
        super()._look()


@dataclasses.dataclass(kw_only=True)
class Life:
    """Use of one process, in bytes, and the seconds from its first sample until it
    served."""

    first: float
    """Time of its first sample, in unix seconds."""
    start: int = 0
    """Peak of memory when it began to serve; 0 before."""
    peak: int = 0
    own: int = 0
    """Most memory of its own (RssAnon), as sampled: without files that are mapped."""
    seconds: float = 0.0


class CoordinatorLives(Watch):
    """The lives of a run's coordinator, one for each of its processes."""

    pause_s = 0.1

    def __init__(self, workdir: Path) -> None:
        super().__init__()
        self._workdir = workdir
        self._found: dict[str, Life] = {}

    @property
    def lives(self) -> list[Life]:
        """All lives, the first one first."""
        return list(self._found.values())

    def _look(self) -> None:
        for name, folder in processes(self._workdir):
            if name != "coordinator":
                continue
            with contextlib.suppress(OSError, StopIteration):
                self._sample(folder)

    def _sample(self, folder: Path) -> None:
        life = self._found.setdefault(folder.name, Life(first=time.time()))
        life.peak = max(life.peak, 1024 * number_of(folder / "status", "VmHWM:"))
        life.own = max(life.own, 1024 * number_of(folder / "status", "RssAnon:"))
        address = self._workdir / run_files.ADDRESS
        # A life that was killed leaves its address, which is older.
        if not life.start and address.exists():
            served = address.stat().st_mtime
            if served > life.first:
                life.start, life.seconds = life.peak, served - life.first


def number_of(path: Path, what: str) -> int:
    """Return a number of a file of /proc. Raises StopIteration without it."""
    lines = path.read_text().splitlines()
    return int(next(each for each in lines if each.startswith(what)).split()[1])


def processes(workdir: Path) -> Iterator[tuple[str, Path]]:
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


def resident(field: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    return 1024 * number_of(Path("/proc/self/status"), f"{field}:")


def free_bytes() -> int:
    """Return the memory that processes may still take."""
    return 1024 * number_of(Path("/proc/meminfo"), "MemAvailable:")
