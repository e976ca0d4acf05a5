"""Rooms for bytes that wait: in memory as far as it is meant for them, then on disk.

A room on disk is mapped memory of a file without a name, which ends with the process.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.wire.errors import Busy

logger = logging.getLogger(__name__)


class Room(NamedTuple):
    """Where bytes go: uint8[nbytes], writable."""

    place: npt.NDArray[np.uint8]
    in_memory: bool

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.place.nbytes if self.in_memory else 0


class Rooms:
    """Makes them. Whoever has one frees it by forgetting it."""

    def __init__(
        self, memory_bytes: int, disk: Path | None = None, spared_bytes: int = 0
    ) -> None:
        """
        Args:
          memory_bytes: of all rooms in memory; those beyond are on disk.
          disk: a folder; None: there is no more room.
          spared_bytes: of that disk, which are for others.
        """
        self._memory, self._disk, self._spared = memory_bytes, disk, spared_bytes
        self._told = False

    def in_memory(self, nbytes: int, held: int) -> Room | None:
        """One in memory, where rooms of `held` bytes are; None if that is too much."""
        if held + nbytes > self._memory:
            return None
        return Room(np.empty(nbytes, np.uint8), in_memory=True)

    def on_disk(self, nbytes: int) -> Room:
        """One on disk; this may take its time. Raises Busy if there is none."""
        full = (
            f"{nbytes} bytes more of deltas that wait for their merge exceed "
            f"placement.merge_buffer_bytes = {self._memory}"
        )
        if self._disk is None:
            raise Busy(full)
        try:
            free = shutil.disk_usage(self._disk).free
            if free - nbytes < self._spared:
                raise Busy(
                    f"{full}; {self._disk} has {free} bytes free, of which "
                    f"{self._spared} are for the record log and snapshots"
                )
            with tempfile.TemporaryFile(dir=self._disk) as file:
                # A mapped file that the disk has no blocks for ends the process.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                place = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise Busy(f"{full}; no room in {self._disk}: {error}") from error
        if not self._told:
            self._told = True
            logger.warning("%s: what is beyond is in %s", full, self._disk)
        return Room(np.frombuffer(place, np.uint8), in_memory=False)
