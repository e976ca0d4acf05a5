"""Give freed memory back to the operating system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Return what the allocator keeps of freed arrays; glibc keeps them otherwise, and
    a process grows to several times of what it holds. Elsewhere nothing happens."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
