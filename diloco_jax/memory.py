"""Keep little freed memory, and give it back to the operating system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

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


@functools.cache
def _trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
