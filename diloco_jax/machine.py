"""The machine under a process: the processor cores that it may use.

Every number of threads that follows the machine comes from `cores`. It is what the
system allows this process, not what the machine has: a container of two cores on a host
of 200 has 2.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from diloco_jax.errors import ConfigError

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
    """Yield the limits of the groups around this process, in cores; of either version
    of control groups. A container often sees its own group as the root of all."""
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        files: tuple[str, ...]
        if not controllers:
            files, base = ("cpu.max",), mounted
        elif "cpu" in controllers.split(","):
            files, base = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), mounted / "cpu"
        else:
            continue
        inner = base / group.lstrip("/")
        for folder in (inner, *inner.parents):
            numbers = " ".join(_read(folder / file) for file in files).split()
            # Without a limit the quota is "max" or -1.
            if len(numbers) == 2 and numbers[0].isdecimal():
                yield int(numbers[0]) / int(numbers[1])
            if folder == base:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
