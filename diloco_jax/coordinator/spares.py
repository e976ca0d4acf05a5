"""Spare arrays: memory of older versions that nobody reads, for the next merge.

A new array of a fragment's size costs more in page faults than the arithmetic of a
merge.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

CACHE_LINE = 64
"""Bytes. jax reads an array that begins at such a bound where it lies, and copies
others."""
UNREAD = 3
"""References to octets that only `Spares` holds: its list, a loop and the question."""


class Spares:
    """Makes arrays, and makes them of octets that were an array once. Whoever holds an
    array, a view of it or its buffer keeps it from being used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._octets: list[npt.NDArray[np.uint8]] = []
        """All that is in use or spare, the oldest first."""

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array whose bytes are not set."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            octets = self._spare(nbytes + CACHE_LINE)
            start = -octets.ctypes.data % CACHE_LINE
            return octets[start : start + nbytes].view(dtype).reshape(shape)

    def trim(self, kept_bytes: int) -> None:
        """Free spare octets beyond this number of bytes, the oldest first."""
        with self._lock:
            kept, spare = [], 0
            while self._octets:
                octets = self._octets.pop()
                # One reference less than in a loop over the list.
                if sys.getrefcount(octets) < UNREAD:
                    if spare + octets.nbytes > kept_bytes:
                        continue
                    spare += octets.nbytes
                kept.append(octets)
            self._octets = kept[::-1]

    def _spare(self, nbytes: int) -> npt.NDArray[np.uint8]:
        for octets in self._octets:
            if octets.nbytes == nbytes and sys.getrefcount(octets) == UNREAD:
                return octets
        octets = np.empty(nbytes, np.uint8)
        self._octets.append(octets)
        return octets
