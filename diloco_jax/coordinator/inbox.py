"""Deltas on their way in: places for their bytes, checked before they are allocated.

A delta is assembled from stripes that arrive in any order on several connections. It
stays until the policy has merged or dropped it. The bytes of all deltas together are
bounded: a stripe for which there is no room is answered Busy, and comes again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.wire.errors import Busy, RemoteProtocolError
from diloco_jax.wire.messages import UploadStart

logger = logging.getLogger(__name__)


class DeltaKey(NamedTuple):
    """Which delta."""

    island: str
    incarnation: int
    fragment: int
    tick: int


class _Assembly:
    def __init__(self, total: int) -> None:
        self.buffer: npt.NDArray[np.uint8] = np.empty(total, np.uint8)
        self.stripes: set[tuple[int, int]] = set()
        self.complete = False

    @property
    def received(self) -> int:
        return sum(length for _, length in self.stripes)


class Inbox:
    """All deltas that are arriving or wait for their merge."""

    def __init__(
        self,
        payload_bytes: Callable[[int], int],
        capacity_bytes: int,
    ) -> None:
        """`payload_bytes(fragment)`: bytes of an encoded delta of that fragment."""
        self._payload_bytes = payload_bytes
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._deltas: dict[DeltaKey, _Assembly] = {}

    def begin(self, start: UploadStart) -> memoryview:
        """The writable place of a stripe.

        Raises:
          RemoteProtocolError: sizes do not fit the fragment.
          Busy: the bound on outstanding deltas is reached.
        """
        expected = self._payload_bytes(start.fragment)
        if start.total != expected:
            raise RemoteProtocolError(
                f"a delta of fragment {start.fragment} from {start.island!r} is "
                f"announced with {start.total} bytes, expected {expected}; start the "
                f"island with the run's config.json, so that model and codec agree"
            )
        if not 0 <= start.offset <= start.offset + start.length <= start.total:
            raise RemoteProtocolError(
                f"a stripe of {start.length} bytes at {start.offset} does not fit a "
                f"delta of {start.total} bytes"
            )
        key = _key(start)
        with self._lock:
            assembly = self._deltas.get(key)
            if assembly is None:
                held = sum(a.buffer.nbytes for a in self._deltas.values())
                if held + expected > self._capacity:
                    raise Busy(
                        f"{held} bytes of deltas wait for their merge and {expected} "
                        f"more would exceed placement.merge_buffer_bytes = "
                        f"{self._capacity}"
                    )
                assembly = self._deltas[key] = _Assembly(expected)
            if assembly.complete:
                # A repetition of what is here already: its bytes go nowhere.
                return memoryview(bytearray(start.length))
        return assembly.buffer.data[start.offset : start.offset + start.length]

    def end(self, start: UploadStart) -> bool:
        """A stripe is in its place; returns True once, when the delta is complete."""
        with self._lock:
            assembly = self._deltas.get(_key(start))
            if assembly is None or assembly.complete:
                return False
            assembly.stripes.add((start.offset, start.length))
            assembly.complete = assembly.received >= start.total
            return assembly.complete

    def payload(self, key: DeltaKey) -> npt.NDArray[np.uint8]:
        """The bytes of a complete delta; KeyError if it is not here."""
        with self._lock:
            assembly = self._deltas[key]
        if not assembly.complete:
            raise KeyError(f"{key} is not complete")
        return assembly.buffer

    def drop(self, key: DeltaKey) -> None:
        """Frees a delta, if it is here."""
        with self._lock:
            self._deltas.pop(key, None)

    def drop_island(self, island: str, before: int) -> None:
        """Frees what incarnations of an island below `before` sent."""
        with self._lock:
            for key in [
                k for k in self._deltas if k.island == island and k.incarnation < before
            ]:
                del self._deltas[key]


def _key(start: UploadStart) -> DeltaKey:
    return DeltaKey(start.island, start.incarnation, start.fragment, start.tick)
