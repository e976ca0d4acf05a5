"""This process's memory, what the machine has left, and how to keep little of it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

PAGE_BYTES = 4096
GROUP = "sys/fs/cgroup"
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


def give_back() -> None:
    """Return freed memory to the operating system.

    glibc keeps the memory of freed arrays, and a process can grow to several times what
    it holds. Without glibc nothing happens.
    """
    if (trim := _trim()) is not None:
        trim(0)


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process has; 0 if the system does not
    tell."""
    words = _read(root / "proc/self/statm").split()
    return int(words[1]) * PAGE_BYTES if len(words) > 1 else 0


def peak_bytes(root: Path = Path("/")) -> int:
    """Return the most bytes of memory that this process had at any time; 0 if the
    system does not tell."""
    return _facts(root / "proc/self/status").get("VmHWM", 0)


def left_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes that are left of this machine's memory, or of what a control
    group allows if that is less, and all of it; zeros if the system does not tell."""
    facts = _facts(root / "proc/meminfo")
    left, whole = facts.get("MemAvailable", 0), facts.get("MemTotal", 0)
    limit = _read(root / GROUP / "memory.max").strip()
    if limit.isdecimal() and int(limit) < whole:
        used = _read(root / GROUP / "memory.current").strip()
        held = _read(root / GROUP / "memory.stat").split()
        cached = 0
        if "inactive_file" in held:  # Pages of files, which are given up for others.
            cached = int(held[held.index("inactive_file") + 1])
        if used.isdecimal():
            left = min(left, max(0, int(limit) - int(used) + cached))
        whole = int(limit)
    return left, whole


def _facts(path: Path) -> dict[str, int]:
    """Return the numbers of a file of "name: number kB" in bytes."""
    lines = (line.partition(":") for line in _read(path).splitlines())
    return {
        name: int(rest.split()[0]) << 10
        for name, _, rest in lines
        if rest.split()[0:1] and rest.split()[0].isdecimal()
    }


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@functools.cache
def _trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
