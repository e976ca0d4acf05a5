"""Places for the bytes of deltas: in memory up to a limit, then in files without a
name."""

from __future__ import annotations

import logging
import math
import mmap
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from diloco_jax import machine
from diloco_jax.coordinator.holding.spares import Spares
from diloco_jax.wire.errors import Busy

logger = logging.getLogger(__name__)

SPARED_BYTES_EACH = 32
"""Bytes of the workdir's disk, per parameter, that deltas leave free: two snapshots of
parameters, anchors and momentum, and what is published meanwhile."""
TOLD_S = 60.0
"""Seconds for which people are told that a delta found no room."""
SPAN_S = 300.0
"""Seconds; memory that no room needed for one to two of these spans is given back. New
pages for a delta of 1 GB cost less than 0.6 s of them."""

Place: TypeAlias = npt.NDArray[np.uint8]
GivenUp: TypeAlias = list[npt.NDArray[np.uint8]]
"""Spare memory that no later room gets; it is freed with the list."""


class Rooms:
    """Make rooms: uint8[nbytes], writable. A room is freed when its last reference
    goes.

    Its memory becomes that of a later room: the kernel takes 0.1 to 0.6 s per GB to
    give a process new pages. All rooms, whoever asks for them, and spare memory never
    have more than the limit, nor more than all rooms had lately.
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
        self._most, self._most_before = 0, 0
        """The most bytes of rooms in memory: in this span of time, and in the last."""
        self._span_ends = -math.inf
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
            self._most = max(self._most, used)
            room: Place = self._spares.array((nbytes,), np.uint8)
            kept_bytes = max(self._most, self._most_before) - used
            given_up += self._spares.trim(kept_bytes)
            return room

    def ends_span(self, now: float) -> bool:
        """Tell, once for each span of time, that it is over: it is time to `give_back`.
        now: of the monotonic clock. Called on one thread."""
        if now < self._span_ends:
            return False
        self._span_ends = now + SPAN_S
        return True

    def give_back(self) -> None:
        """Free the spare memory that rooms have not needed in this span of time and the
        last. It may take seconds."""
        with self._lock:
            used = self.memory_bytes
            self._most, self._most_before = used, max(self._most, used)
            freed = self._spares.trim(self._most_before - used)
        # Outside the lock, for which islands' bytes wait.
        if freed:
            freed.clear()
            machine.give_memory_back()

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
