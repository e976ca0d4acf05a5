"""Deltas on their way in: places for their bytes, checked before they are allocated.

A delta is assembled from stripes that arrive in any order on several connections. It
stays until the policy has merged or dropped it. An island has one delta of a fragment
outstanding, and may leave another behind. Those that memory is not meant for wait on
disk: no delta may keep out the one that its fragment's quorum needs. A stripe for which
the disk has no room either is answered Busy, and comes again.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
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
    """Deltas that stay although their incarnations ended: what was left behind, and
    what is in a merge."""
    return {
        DeltaKey(delta.island, delta.incarnation, fragment.index, delta.tick)
        for fragment in state.fragments
        for delta in (*fragment.left_behind, *fragment.merging)
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
    def __init__(
        self, layout: PayloadLayout, buffer: npt.NDArray[np.uint8], *, in_memory: bool
    ) -> None:
        self.buffer, self.in_memory = buffer, in_memory
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

    def __init__(
        self,
        layouts: Sequence[PayloadLayout],
        memory_bytes: int,
        overflow: Path | None = None,
    ) -> None:
        """
        Args:
          layouts: of an encoded delta, by fragment.
          memory_bytes: of all deltas in memory; those beyond are on disk.
          overflow: the folder for them, whose files have no names and end with the
            process; None: there is no more room.
        """
        self._layouts = layouts
        self._memory, self._overflow = memory_bytes, overflow
        self._told = False
        self._lock = threading.Lock()
        self._deltas: dict[DeltaKey, _Assembly] = {}

    def begin(self, start: UploadStart) -> memoryview:
        """The writable place of a stripe.

        Raises:
          RemoteProtocolError: sizes or tiles do not fit the fragment.
          Busy: there is no room for the delta.
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

    def end(self, start: UploadStart, place: memoryview) -> bool:
        """A stripe is in the place that `begin` gave; returns True once, when the delta
        is complete."""
        with self._lock:
            assembly = self._deltas.get(_key(start))
            if assembly is None or assembly.complete:
                return False
            arriving = assembly.part(start.part, start.total)
            if place.obj is not arriving.place.obj:
                return False  # Of a delta that was dropped, and has come again since.
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
            # Only the newest take of a fragment is outstanding.
            for old in [k for k in self._deltas if k[:3] == key[:3] and k < key]:
                if not self._deltas[old].complete:
                    del self._deltas[old]
            nbytes = layout.total_bytes
            held = sum(a.buffer.nbytes for a in self._deltas.values() if a.in_memory)
            fits = held + nbytes <= self._memory
            buffer = np.empty(nbytes, np.uint8) if fits else self._beyond(held, nbytes)
            assembly = self._deltas[key] = _Assembly(layout, buffer, in_memory=fits)
        return assembly

    def _beyond(self, held: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A place outside of memory."""
        full = (
            f"{held} bytes of deltas wait for their merge, and {nbytes} more exceed "
            f"placement.merge_buffer_bytes = {self._memory}"
        )
        if self._overflow is None:
            raise Busy(full)
        try:
            with tempfile.TemporaryFile(dir=self._overflow) as file:
                # A mapped file that the disk has no blocks for ends the process.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                place = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise Busy(f"{full}; no room in {self._overflow}: {error}") from error
        if not self._told:
            self._told = True
            logger.warning("%s: what is beyond is in %s", full, self._overflow)
        return np.frombuffer(place, np.uint8)

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
