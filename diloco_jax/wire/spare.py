"""Memory for fetched payloads, which is lent again once nobody holds it.

New memory costs a page fault per page, which takes as long as deciphering the payload.
"""

from __future__ import annotations

import collections
import weakref

import numpy as np
import numpy.typing as npt

LEAST_BYTES = 1 << 20
"""Smaller payloads come from the allocator, which keeps their pages itself."""


class SpareMemory:
    """Keep at most one buffer that was lent and is free again. Any thread may borrow
    it.
    """

    def __init__(self) -> None:
        # No lock: buffers come back when they are collected, which may be anywhere.
        self._free: collections.deque[npt.NDArray[np.uint8]] = collections.deque(
            maxlen=1
        )

    def lend(self, size: int) -> memoryview:
        """Return `size` bytes of writable memory, with any content. They are free again
        once the last view of them is gone.
        """
        if size < LEAST_BYTES:
            return np.empty(size, np.uint8).data
        try:
            held = self._free.pop()
        except IndexError:
            held = np.empty(0, np.uint8)
        if not size <= len(held) <= 2 * size:
            held = np.empty(size, np.uint8)
        lent = np.frombuffer(held, np.uint8, size)
        weakref.finalize(lent, self._free.append, held).atexit = False
        return lent.data
