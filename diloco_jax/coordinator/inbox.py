"""Deltas on their way in: places for their bytes, checked before they are allocated.

A delta is assembled from stripes that arrive in any order on several connections. It
stays until the policy has merged or dropped it. The bytes of all deltas together are
bounded: a stripe for which there is no room is answered Busy, and comes again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.core.payload import Coverage, Part, PayloadLayout
from diloco_jax.policy.state import State
from diloco_jax.wire.errors import Busy, RemoteProtocolError
from diloco_jax.wire.messages import UploadStart

logger = logging.getLogger(__name__)


class DeltaKey(NamedTuple):
    """Which delta."""

    island: str
    incarnation: int
    fragment: int
    tick: int


def left_behind(state: State) -> set[DeltaKey]:
    """Deltas that stay although their islands said goodbye."""
    return {
        DeltaKey(delta.island, delta.incarnation, fragment.index, delta.tick)
        for fragment in state.fragments
        for delta in fragment.left_behind
    }


class _Arriving:
    """The bytes of one part, stripe by stripe."""

    def __init__(self, place: memoryview) -> None:
        self.place = place
        self.stripes: set[tuple[int, int]] = set()

    @property
    def complete(self) -> bool:
        return sum(length for _, length in self.stripes) >= len(self.place)


class _Assembly:
    def __init__(self, layout: PayloadLayout) -> None:
        self.buffer: npt.NDArray[np.uint8] = np.empty(layout.total_bytes, np.uint8)
        self.coverage = Coverage(layout)
        self.parts: dict[Part, _Arriving] = {}
        self.complete = False

    def part(self, part: Part, nbytes: int) -> _Arriving:
        """Where a part arrives: the whole payload in its place, another beside it."""
        if part not in self.parts:
            held = sum(len(arriving.place) for arriving in self.parts.values())
            if held + nbytes > self.buffer.nbytes:
                raise RemoteProtocolError(
                    f"parts of one delta have {held} and {nbytes} bytes, the whole of "
                    f"it {self.buffer.nbytes}: its hosts send the same tiles; give "
                    f"them one config"
                )
            place = memoryview(bytearray(nbytes)) if part else self.buffer.data
            self.parts[part] = _Arriving(place)
        return self.parts[part]


class Inbox:
    """All deltas that are arriving or wait for their merge."""

    def __init__(self, layouts: Sequence[PayloadLayout], capacity_bytes: int) -> None:
        """`layouts`: of an encoded delta, by fragment."""
        self._layouts = layouts
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._deltas: dict[DeltaKey, _Assembly] = {}

    def begin(self, start: UploadStart) -> memoryview:
        """The writable place of a stripe.

        Raises:
          RemoteProtocolError: sizes or tiles do not fit the fragment.
          Busy: the bound on outstanding deltas is reached.
        """
        layout = self._layouts[start.fragment]
        try:
            expected = layout.part_bytes(start.part)
        except ValueError as error:
            raise RemoteProtocolError(
                f"a delta of fragment {start.fragment} from {start.island!r}: {error}"
            ) from error
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
        with self._lock:
            assembly = self._assembly(_key(start), layout)
            if assembly.complete:
                # A repetition of what is here already: its bytes go nowhere.
                return memoryview(bytearray(start.length))
            place = assembly.part(start.part, expected).place
        return place[start.offset : start.offset + start.length]

    def end(self, start: UploadStart) -> bool:
        """A stripe is in its place; returns True once, when the delta is complete."""
        with self._lock:
            assembly = self._deltas.get(_key(start))
            if assembly is None or assembly.complete:
                return False
            arriving = assembly.part(start.part, start.total)
            arriving.stripes.add((start.offset, start.length))
            if not arriving.complete:
                return False
            if start.part:
                layout = self._layouts[start.fragment]
                layout.scatter(assembly.buffer.data, start.part, arriving.place)
            assembly.coverage.add(start.part)
            assembly.complete = assembly.coverage.complete
            if assembly.complete:
                assembly.parts = {}
            return assembly.complete

    def _assembly(self, key: DeltaKey, layout: PayloadLayout) -> _Assembly:
        assembly = self._deltas.get(key)
        if assembly is None:
            held = sum(a.buffer.nbytes for a in self._deltas.values())
            if held + layout.total_bytes > self._capacity:
                raise Busy(
                    f"{held} bytes of deltas wait for their merge and "
                    f"{layout.total_bytes} more would exceed "
                    f"placement.merge_buffer_bytes = {self._capacity}"
                )
            assembly = self._deltas[key] = _Assembly(layout)
        return assembly

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

    def drop_island(
        self, island: str, before: int, kept: Collection[DeltaKey] = ()
    ) -> None:
        """Frees what incarnations of an island below `before` sent, but for `kept`."""
        with self._lock:
            for key in [k for k in self._deltas if k.island == island]:
                if key.incarnation < before and key not in kept:
                    del self._deltas[key]


def _key(start: UploadStart) -> DeltaKey:
    return DeltaKey(start.island, start.incarnation, start.fragment, start.tick)
