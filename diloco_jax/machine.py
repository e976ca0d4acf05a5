"""The machine under a process: the processor cores that it may use, and its memory.

Every number of threads that follows the machine comes from `cores`. It is what the
system allows this process, not what the machine has: a container of two cores on a host
of 200 has 2. Of memory, the process keeps little, and knows what the machine has left.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from diloco_jax.errors import ConfigError

GROUPS = "sys/fs/cgroup"
FEWEST_THREADS, THREADS_PER_CORE = 32, 4
"""Threads of a coordinator or a host of an island at least: 40 of each on 2 cores."""


def cores(root: Path = Path("/")) -> int:
    """Count the cores that affinity and control groups leave to this process."""
    allowed = schedulable()
    quota = min(_quotas(root), default=math.inf)
    return allowed if quota >= allowed else max(1, math.ceil(quota))


def schedulable() -> int:
    """Count the cores on which this process may run, without the limits of control
    groups.

    Libraries that know nothing of control groups start that many threads.
    """
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fit_threads(
    environment: MutableMapping[str, str] = os.environ, fewest: int = 1
) -> None:
    """Limit XLA's thread pool to the cores that this process may use, by NPROC; call
    before importing jax.

    XLA counts the machine's cores, also inside a container that has only a few of them:
    then 200 threads would share the time of two cores. fewest: least number of threads.
    A process of several devices needs more than two cores suggest, or jax 0.10.2
    deadlocks when steps are dispatched ahead.
    """
    given = int(environment.get("NPROC") or 0)
    threads = max(given or cores(), fewest)
    if threads != (given or schedulable()):
        environment["NPROC"] = str(threads)


def require_threads(processes: int = 1) -> None:
    """Raise ConfigError unless the system lets this process start the threads of so
    many processes of a run. They are started: limits of users, containers and memory
    count together, and so do other programs' threads."""
    wanted = processes * (FEWEST_THREADS + THREADS_PER_CORE * cores())
    end, started = threading.Event(), list[threading.Thread]()
    try:
        while len(started) < wanted:
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        short = f"{len(started)} of about {wanted} threads could be started"
        raise ConfigError(f"{short}: {thread_shortage(error)}") from error
    finally:
        end.set()
        for thread in started:
            thread.join()


def thread_shortage(error: Exception) -> str:
    """Return the message for an error for want of threads, empty for other errors."""
    if "can't start new thread" not in str(error):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return (
        f"{error}; raise `ulimit -u` "
        f"({'unlimited' if limit == resource.RLIM_INFINITY else limit} here, for all "
        f"processes of this user) or the container's limit of pids"
    )


def instructions() -> str:
    """Return the instruction sets of the processor, as the system names them; "" if it
    does not tell."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return value.strip()
    return ""


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limits of the groups around this process, in cores."""
    for folder in _groups(root):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdecimal():  # Without a limit it is "max".
            yield int(quota) / int(period)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the groups around this process, the innermost first. A
    container often sees its own group as the root of all."""
    base = root / GROUPS
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        inner = base / group.lstrip("/")
        for folder in () if controllers else (inner, *inner.parents):
            yield folder
            if folder == base:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


PAGE_BYTES = 4096
LITTLE_DISK_BYTES = 1 << 30
"""Free bytes below which a disk is nearly full, whatever is written to it."""

_M_ARENA_MAX = -8
"""Number of the parameter in glibc's malloc.h."""


def one_arena() -> None:
    """Have all threads share one of malloc's arenas; call before there are threads.

    glibc makes eight for each core, and each keeps what was freed in it. A step's
    arrays come from any of XLA's threads, so that a model of 87 M parameters kept 0.6
    GB more. Without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """Return freed memory to the operating system.

    glibc keeps the memory of freed arrays, and a process can grow to several times what
    it holds. Without glibc nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process has; 0 if the system does not
    tell."""
    words = _read(root / "proc/self/statm").split()
    return int(words[1]) * PAGE_BYTES if len(words) > 1 else 0


def peak_bytes(root: Path = Path("/")) -> int:
    """Return the most bytes of memory that this process had at any time; 0 if the
    system does not tell."""
    return _memory_facts(root / "proc/self/status").get("VmHWM", 0)


def left_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes that are left of this machine's memory, or of what a control
    group or `ulimit -d` allows if that is less, and all of it; zeros if the system does
    not tell."""
    facts = _memory_facts(root / "proc/meminfo")
    left, whole = facts.get("MemAvailable", 0), facts.get("MemTotal", 0)
    for group in _groups(root):
        limit = _read(group / "memory.max").strip()
        if not limit.isdecimal() or int(limit) >= whole:
            continue
        used = _read(group / "memory.current").strip()
        held = _read(group / "memory.stat").split()
        cached = 0
        if "inactive_file" in held:  # Pages of files, which are given up for others.
            cached = int(held[held.index("inactive_file") + 1])
        if used.isdecimal():
            left = min(left, max(0, int(limit) - int(used) + cached))
        whole = int(limit)
    bound = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if bound != resource.RLIM_INFINITY and bound < whole:
        used_here = _memory_facts(root / "proc/self/status").get("VmData", 0)
        left, whole = min(left, max(0, bound - used_here)), bound
    return left, whole


def _memory_facts(path: Path) -> dict[str, int]:
    """Return the numbers of a file of "name: number kB" in bytes."""
    lines = (line.partition(":") for line in _read(path).splitlines())
    return {
        name: int(rest.split()[0]) << 10
        for name, _, rest in lines
        if rest.split()[0:1] and rest.split()[0].isdecimal()
    }
