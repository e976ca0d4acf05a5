"""Deltas on their way in: places for their bytes, checked before they are allocated.

A delta is assembled from stripes that arrive in any order on several connections. It
stays until the protocol has merged or dropped it. An island has one outstanding delta
of a fragment, and may leave another behind. Deltas that do not fit into memory wait on
disk, in files without a name (`Rooms`): no delta may keep out the one that its
fragment's quorum needs. A stripe that does not fit on disk either is answered Busy, and
comes again.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from diloco_jax.coordinator.holding.store import Spares
from diloco_jax.core.fragment_merge import Squares
from diloco_jax.core.fragments import Part, PayloadLayout, tiles_of
from diloco_jax.protocol.messages import DeltaKey
from diloco_jax.wire import bulk
from diloco_jax.wire.bulk import UploadStart
from diloco_jax.wire.errors import Busy, RemoteProtocolError

logger = logging.getLogger(__name__)

SPARED_BYTES_EACH = 32
"""Bytes of the workdir's disk, per parameter, that deltas leave free: two snapshots of
parameters, anchors and momentum, and what is published meanwhile."""
TOLD_S = 60.0
"""Seconds for which people are told that a delta found no room."""
Place: TypeAlias = npt.NDArray[np.uint8]
GivenUp: TypeAlias = list[npt.NDArray[np.uint8]]
"""Spare memory that no later room gets; it is freed with the list."""


class Coverage:
    """The tiles of a payload that have arrived."""

    def __init__(self, layout: PayloadLayout) -> None:
        self._here = [np.zeros(p.encoded_shape[:-1], np.bool_) for p in layout.placed]

    def add(self, part: Part, *, here: bool = True) -> None:
        """Note that the tiles of this part have arrived, or not: are missing again."""
        for box in part:
            self._here[box.piece][tiles_of(box)] = here
        if not part:
            for tiles in self._here:
                tiles[...] = here

    @property
    def complete(self) -> bool:
        """True if all tiles have arrived."""
        return all(bool(here.all()) for here in self._here)


class Rooms:
    """Make rooms: uint8[nbytes], writable. A room is freed when its last reference
    goes.

    Its memory becomes that of a later room: the kernel takes 0.1 to 0.6 s per GB to
    give a process new pages. All rooms, whoever asks for them, and spare memory never
    have more than the limit, and a process keeps what it once had.
    """

    def __init__(
        self, memory_bytes: int, disk: Path | None = None, spared_bytes: int = 0
    ) -> None:
        """Args:
        memory_bytes: limit of all rooms in memory; further rooms are on disk.
        disk: a folder; None: there is no room beyond memory.
        spared_bytes: bytes of that disk that stay free for others.
        """
        self._memory, self._disk, self._spared = memory_bytes, disk, spared_bytes
        self._lock = threading.Lock()
        self._spares = Spares()
        self._told = False
        self._refused = -math.inf, ""
        """When a delta last found no room, and why."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rooms in memory."""
        return self._spares.used_bytes

    def in_memory(self, nbytes: int, given_up: GivenUp) -> Place | None:
        """Return a room in memory; None if it does not fit. given_up: gets the spare
        memory that goes for it. To free that may take seconds: no lock may be held."""
        with self._lock:
            used = self.memory_bytes + nbytes
            if used > self._memory:
                return None
            room: Place = self._spares.array((nbytes,), np.uint8)
            given_up += self._spares.trim(self._memory - used)
            return room

    def free(self) -> None:
        """Free the spare memory. It may take seconds."""
        with self._lock:
            given_up = self._spares.trim(0)
        given_up.clear()  # Outside the lock, for which islands' bytes wait.

    def on_disk(self, nbytes: int) -> Place:
        """Return a room on disk, which may take time. Raises Busy if there is none."""
        full = (
            f"{nbytes} bytes more of deltas that wait for their merge exceed the "
            f"{self._memory} that this process has of placement.merge_buffer_bytes"
        )
        if self._disk is None:
            raise self._busy(full)
        try:
            free = shutil.disk_usage(self._disk).free
            if free - nbytes < self._spared:
                raise self._busy(
                    f"{full}; {self._disk} has {free} bytes free, of which "
                    f"{self._spared} are for the record log and snapshots"
                )
            with tempfile.TemporaryFile(dir=self._disk) as file:
                # Writing to a mapped file ends the process if the disk has no blocks
                # for it.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                place = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise self._busy(f"{full}; no room in {self._disk}: {error}") from error
        if not self._told:
            self._told = True
            logger.warning("%s: further deltas are in %s", full, self._disk)
        return np.frombuffer(place, np.uint8)

    def alerts(self, now: float) -> list[str]:
        """Return why deltas find no room, for people, for a while after one found
        none. now: of the monotonic clock."""
        refused, why = self._refused
        return [f"deltas are sent again and may be late: {why}"] * (
            now - refused < TOLD_S
        )

    def _busy(self, why: str) -> Busy:
        now = time.monotonic()
        if not self.alerts(now):
            logger.warning("%s: islands send deltas again, and they may be late", why)
        self._refused = now, why
        return Busy(why)


DELTAS_AT_ONCE = 2
"""Deltas per island and fragment: one that is outstanding, one that was left behind."""
MOST_STRIPES = 1024
"""Stripes of one part: more than an island has channels, and few to look through."""
MOST_PARTS = 4096
"""Parts of one delta: more than an island has hosts."""


class _Arriving:
    """Bytes of one part, stripe by stripe. Nothing writes where a stripe has arrived:
    what was checked, and is merged, stays as it was."""

    def __init__(self, room: Place) -> None:
        self.room = room
        self._arrived: set[tuple[int, int]] = set()
        self._lent: dict[tuple[int, int], memoryview] = {}
        """Places that are being written to, by offset and length."""

    @property
    def complete(self) -> bool:
        """Tell if the stripes, which are disjoint, cover the whole part."""
        return sum(length for _, length in self._arrived) == self.room.nbytes

    def lend(self, start: UploadStart) -> memoryview:
        """Return the place of a stripe; see `Inbox.begin`."""
        wanted = (start.offset, start.length)
        if wanted in self._arrived:
            return _nowhere(start)
        self._lent = {s: p for s, p in self._lent.items() if not _is_released(p)}
        if wanted in self._lent:
            raise Busy(
                f"bytes {start.offset} to {start.offset + start.length} of a delta of "
                f"fragment {start.fragment} from {start.island!r} are on their way by "
                f"another connection; come again when that one has ended"
            )
        others = (*self._arrived, *self._lent)
        for offset, length in others:
            if start.offset < offset + length and offset < start.offset + start.length:
                raise RemoteProtocolError(
                    f"bytes {start.offset} to {start.offset + start.length} of a delta "
                    f"of fragment {start.fragment} from {start.island!r} overlap "
                    f"{offset} to {offset + length}, which came before; the stripes of "
                    f"a delta are disjoint"
                )
        if len(others) >= MOST_STRIPES:
            raise RemoteProtocolError(
                f"a delta of fragment {start.fragment} from {start.island!r} comes in "
                f"more than {MOST_STRIPES} stripes; send larger ones"
            )
        place = self.room.data[start.offset : start.offset + start.length]
        self._lent[wanted] = place
        return place

    def take(self, start: UploadStart, place: memoryview) -> bool:
        """Note that a stripe has arrived in its place; return False for any other
        place."""
        wanted = (start.offset, start.length)
        if self._lent.get(wanted) is not place:
            return False
        del self._lent[wanted]
        self._arrived.add(wanted)
        return True


class _Assembly:
    def __init__(self, layout: PayloadLayout) -> None:
        self.layout, self.coverage = layout, Coverage(layout)
        self.parts: dict[Part, _Arriving] = {}
        """Parts that are on their way, or here; none once they are one payload."""
        self.complete = False
        """True once all tiles are here."""
        self.payload: Place | None = None
        self.squares: Squares = ()

    def require_space(self, nbytes: int) -> None:
        """Raise RemoteProtocolError if a part of this size does not fit beside the
        others."""
        if len(self.parts) >= MOST_PARTS:
            raise RemoteProtocolError(
                f"one delta comes in more than {MOST_PARTS} parts; an island sends one "
                f"part from each of its hosts"
            )
        held = sum(arriving.room.nbytes for arriving in self.parts.values())
        if held + nbytes > self.layout.total_bytes:
            raise RemoteProtocolError(
                f"parts of one delta have {held} and {nbytes} bytes, the whole of it "
                f"{self.layout.total_bytes}: its hosts send the same tiles; give them "
                f"one config"
            )


class Inbox:
    """All deltas that are arriving or wait for their merge."""

    def __init__(self, layouts: Sequence[PayloadLayout], rooms: Rooms) -> None:
        """layouts: of an encoded delta, by fragment. rooms: for deltas and parts."""
        self._layouts, self.rooms = layouts, rooms
        self._lock = threading.Lock()
        self._deltas: dict[DeltaKey, _Assembly] = {}

    def begin(self, start: UploadStart) -> memoryview:
        """Return the writable place of a stripe. The caller releases it, whatever
        becomes of the transfer: until then nobody else gets it. If the stripe has
        arrived before, its bytes go nowhere: the place may be as short as one chunk.

        Raises:
          RemoteProtocolError: sizes or tiles do not fit the fragment, or other stripes.
          Busy: there is no room for the delta, or the same stripe is on its way.
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
        if not 0 <= start.offset < start.offset + start.length <= start.total:
            raise RemoteProtocolError(
                f"a stripe of {start.length} bytes at {start.offset} does not fit a "
                f"delta of {start.total} bytes"
            )
        given_up: GivenUp = []
        try:
            return self._begin(start, layout, given_up)
        finally:
            given_up.clear()  # Outside the lock, as `_begin` says.

    def _begin(
        self, start: UploadStart, layout: PayloadLayout, given_up: GivenUp
    ) -> memoryview:
        """Return the place of a stripe. Nothing that takes time is done in the lock,
        which decisions need: a disk is asked, and memory goes to `given_up`."""
        room: Place | None = None
        with self._lock:
            if (place := self._place(start, layout, None)) is None:
                room = self.rooms.in_memory(start.total, given_up)
                if room is not None:
                    place = self._place(start, layout, room)
        if place is None:
            room = self.rooms.on_disk(start.total)
            with self._lock:
                place = self._place(start, layout, room)
        assert place is not None
        return place

    def end(self, start: UploadStart, place: memoryview) -> bool:
        """Accept a stripe that is in the place from `begin`; return True once, when the
        delta is complete."""
        with self._lock:
            assembly = self._deltas.get(_key(start))
            if assembly is None or assembly.complete:
                return False
            arriving = assembly.parts.get(start.part)
            # Another place is that of a delta that was dropped and has come again.
            if arriving is None or not arriving.take(start, place):
                return False
            if arriving.complete:
                assembly.coverage.add(start.part)
                assembly.complete = assembly.coverage.complete
            return assembly.complete

    def reopen(self, start: UploadStart) -> None:
        """Wait again for the host's part of a complete delta that holds this stripe.
        The parts of other hosts stay.
        """
        with self._lock:
            assembly = self._deltas.get(_key(start))
            if assembly is not None and assembly.complete:
                assembly.parts.pop(start.part, None)
                assembly.payload = assembly.payload if start.part else None
                assembly.coverage.add(start.part, here=False)
                assembly.complete = False

    def _place(
        self, start: UploadStart, layout: PayloadLayout, room: Place | None
    ) -> memoryview | None:
        """Return the place of a stripe; None if its part still needs a room. room: one
        for it."""
        key = _key(start)
        assembly = self._deltas.get(key)
        if assembly is None:
            # Only the newest take of a fragment is outstanding.
            for old in [k for k in self._deltas if k[:3] == key[:3] and k < key]:
                if not self._deltas[old].complete:
                    del self._deltas[old]
            held = [k for k in self._deltas if _whose(k) == _whose(key)]
            if len(held) >= DELTAS_AT_ONCE:
                raise Busy(
                    f"{len(held)} deltas of fragment {key.fragment} of {key.island!r} "
                    f"have arrived; come again when they are merged"
                )
            assembly = _Assembly(layout)
        if assembly.complete:
            return _nowhere(start)
        if start.part not in assembly.parts:
            assembly.require_space(start.total)
            if room is None:
                return None
            assembly.parts[start.part] = _Arriving(room)
        place = assembly.parts[start.part].lend(start)
        self._deltas[key] = assembly
        return place

    def payload(self, key: DeltaKey) -> Place:
        """Return the bytes of a complete delta, to which its parts are joined first;
        one thread may ask for that. Raises KeyError if it has not arrived, and Busy if
        there is no room for it."""
        with self._lock:
            assembly = self._deltas[key]
        if not assembly.complete:
            raise KeyError(f"{key} is not complete")
        parts, payload = assembly.parts, assembly.payload
        if () in parts:
            payload = parts[()].room
        else:
            if payload is None:
                payload = self._room(assembly.layout.total_bytes)
            for part, arriving in parts.items():
                assembly.layout.scatter(payload.data, part, arriving.room.data)
        with self._lock:
            assembly.payload, assembly.parts = payload, {}
        return payload  # Here the parts' memory is freed, outside the lock.

    def _room(self, nbytes: int) -> Place:
        """Return a room in memory, or on disk. Raises Busy. No lock may be held."""
        given_up: GivenUp = []
        room = self.rooms.in_memory(nbytes, given_up)
        given_up.clear()
        return self.rooms.on_disk(nbytes) if room is None else room

    def checked(self, key: DeltaKey, squares: Squares) -> None:
        """Keep the sums of squares of a delta that is still in the inbox."""
        with self._lock:
            if key in self._deltas:
                self._deltas[key].squares = squares

    def squares(self, key: DeltaKey) -> Squares:
        """Return a delta's sums of squares, as given to `checked`."""
        with self._lock:
            return self._deltas[key].squares

    def drop(self, key: DeltaKey) -> object:
        """Give up a delta, if it has arrived; return what its memory, or a file, is
        freed with. The caller lets go of it where that may take time."""
        with self._lock:
            return self._deltas.pop(key, None)

    def drop_island(
        self, island: str, before: int, kept: Collection[DeltaKey] = ()
    ) -> None:
        """Free the deltas of an island's incarnations below `before`, except `kept`."""
        freed = []  # Outside the lock.
        with self._lock:
            for key in [k for k in self._deltas if k.island == island]:
                if key.incarnation < before and key not in kept:
                    freed.append(self._deltas.pop(key))


def _whose(key: DeltaKey) -> tuple[str, int]:
    return key.island, key.fragment


def _nowhere(start: UploadStart) -> memoryview:
    """Return a place for a stripe that has arrived before."""
    return memoryview(bytearray(min(start.length, bulk.CHUNK_BYTES)))


def _is_released(place: memoryview) -> bool:
    try:
        return place.nbytes < 0
    except ValueError:
        return True


def _key(start: UploadStart) -> DeltaKey:
    return DeltaKey(start.island, start.incarnation, start.fragment, start.tick)
