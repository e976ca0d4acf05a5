"""Places for the bytes of deltas: in memory up to a limit, then in files without a
name."""

from __future__ import annotations

import logging
import math
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.coordinator.holding.spares import Spares
from diloco_jax.wire.errors import Busy

logger = logging.getLogger(__name__)

SPARED_BYTES_EACH = 32
"""Bytes of the workdir's disk, per parameter, that deltas leave free: two snapshots of
parameters, anchors and momentum, and what is published meanwhile."""
TOLD_S = 60.0
"""Seconds for which people are told that a delta found no room."""


class Room(NamedTuple):
    """Place for bytes: uint8[nbytes], writable."""

    place: npt.NDArray[np.uint8]
    in_memory: bool

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the room takes."""
        return self.place.nbytes if self.in_memory else 0


class Rooms:
    """Make rooms. A room is freed when its last reference goes.

    Its memory becomes that of a later room: the kernel takes 0.1 to 0.6 s per GB to
    give a process new pages. All rooms and spare memory never have more than all rooms
    had at some time.
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
        self._spares, self._most = Spares(), 0
        """Memory that is free again, and the most bytes of rooms in memory so far."""
        self._told = False
        self._refused = -math.inf, ""
        """When a delta last found no room, and why."""

    def in_memory(self, nbytes: int, held: int) -> Room | None:
        """Return a room in memory; None if it does not fit.

        held: bytes of the rooms that are in memory already.
        """
        if held + nbytes > self._memory:
            return None
        self._most = max(self._most, held + nbytes)
        room = Room(self._spares.array((nbytes,), np.uint8), in_memory=True)
        self._spares.trim(self._most - held - nbytes)
        return room

    def on_disk(self, nbytes: int) -> Room:
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
        return Room(np.frombuffer(place, np.uint8), in_memory=False)

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
