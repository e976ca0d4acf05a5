"""Spare arrays: memory of older versions that nobody reads, for the next merge.

A new array of a fragment's size costs more in page faults than the arithmetic of a
merge.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

CACHE_LINE = 64
"""Bytes. jax reads an array that begins at such a bound where it lies, and copies
others."""


def _references(octets: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    """Return the number of references to each array, those of this count included."""
    return [sys.getrefcount(held) for held in octets]


# How many references a count adds by itself is up to the interpreter's version.
(UNREAD,) = _references([np.empty(1, np.uint8)])
"""References to an array that nothing holds but the list of `Spares`."""


class Spares:
    """Make arrays, out of the memory of arrays that nobody holds any more.

    An array's memory stays in use as long as anyone holds the array, a view of it or
    its buffer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._octets: list[npt.NDArray[np.uint8]] = []
        """All that is in use or spare, the oldest first."""

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array with any content."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            octets = self._spare(nbytes + CACHE_LINE)
            start = -octets.ctypes.data % CACHE_LINE
            return octets[start : start + nbytes].view(dtype).reshape(shape)

    @property
    def used_bytes(self) -> int:
        """Bytes of the arrays that somebody holds; what aligns them is not counted."""
        with self._lock:
            counts = zip(self._octets, _references(self._octets), strict=True)
            return sum(o.nbytes - CACHE_LINE for o, count in counts if count != UNREAD)

    def trim(self, kept_bytes: int) -> list[npt.NDArray[np.uint8]]:
        """Give up the oldest spare memory until arrays of at most `kept_bytes` are
        left; what aligns them is not counted. It is freed with the list that is
        returned."""
        with self._lock:
            kept, given_up, spare = [], [], 0
            references = _references(self._octets)
            for octets, count in zip(
                reversed(self._octets), reversed(references), strict=True
            ):
                if count == UNREAD:
                    nbytes = octets.nbytes - CACHE_LINE
                    if spare + nbytes > kept_bytes:
                        given_up.append(octets)
                        continue
                    spare += nbytes
                kept.append(octets)
            self._octets = kept[::-1]
            return given_up

    def _spare(self, nbytes: int) -> npt.NDArray[np.uint8]:
        references = _references(self._octets)
        for octets, count in zip(self._octets, references, strict=True):
            if octets.nbytes == nbytes and count == UNREAD:
                return octets
        octets = np.empty(nbytes, np.uint8)
        self._octets.append(octets)
        return octets
