"""The coordinator's disk: log segments and snapshots in memory, which may fail.

The bytes are those of `coordinator.log`. Its work with files is done here with buffers:
segments rotate with every snapshot, and are deleted once it is complete.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from diloco_jax.coordinator import log as durable
from diloco_jax.protocol.coordinator.state import State

SNAPSHOTS_KEPT = 2


class DiskError(Exception):
    """An append did not return: the process must end.

    complete: True if the record is on the disk all the same.
    """

    def __init__(self, *, complete: bool) -> None:
        super().__init__("the disk failed")
        self.complete = complete


class EmptyDiskError(Exception):
    """The disk holds no run: without --init, nothing may begin."""


class Found(NamedTuple):
    """Data from which a coordinator goes on."""

    state: State
    anchors: Any
    entries: list[durable.Entry]


class Disk:
    """Log and snapshots of one run."""

    def __init__(self) -> None:
        self.empty = False
        """True for an empty disk, such as a mount that did not come up."""
        self.fails_in: int | None = None
        """Appends that succeed before one fails; None if none will fail."""
        self.written_share = 0.0
        """Share of the record that the failing append writes."""
        self._segments: dict[int, io.BytesIO] = {0: io.BytesIO()}
        self._snapshots: dict[int, tuple[bytes, Any] | None] = {}
        """Snapshots by number; None for a snapshot that cannot be read."""

    def append(self, record: Mapping[str, Any], payload: bytes) -> None:
        """Append like `RecordLog.append`. Raises DiskError."""
        data = durable.frame(record, payload)
        newest = self._segments[max(self._segments)]
        if self.fails_in == 0:
            self.fails_in = None
            written = int(self.written_share * len(data))
            newest.write(data[:written])
            raise DiskError(complete=written == len(data))
        if self.fails_in is not None:
            self.fails_in -= 1
        newest.write(data)

    def begin(self, state: State, anchors: Any) -> None:
        """Begin a new term on an empty disk; the old contents never come back."""
        self.empty = False
        self._segments, self._snapshots = {0: io.BytesIO()}, {}
        self.save(self.rotate(), state, anchors)

    def rotate(self) -> int:
        """Rotate like `RecordLog.rotate`; return the number of the ended segment."""
        ended = max(self._segments)
        self._segments[ended + 1] = io.BytesIO()
        return ended

    def save(self, number: int, state: State, anchors: Any) -> None:
        """Save a complete snapshot; delete log segments that the oldest one does not
        need.
        """
        self._snapshots[number] = (msgspec.json.encode(state), anchors)
        for old in sorted(self._snapshots)[:-SNAPSHOTS_KEPT]:
            del self._snapshots[old]
        oldest = min(self._snapshots)
        for segment in [n for n in self._segments if n <= oldest]:
            del self._segments[segment]

    def tear_snapshot(self) -> bool:
        """Tear the newest snapshot; return False if it is the only readable one."""
        *before, newest = self._readable()
        if before:
            self._snapshots[newest] = None
        return bool(before)

    def load(self) -> Found:
        """Return the newest readable snapshot and the records after it.

        Raises EmptyDiskError; DurableError if the log is damaged.
        """
        if self.empty:
            raise EmptyDiskError
        number = self._readable()[-1]
        snapshot = self._snapshots[number]
        assert snapshot is not None
        state, anchors = snapshot
        later = [n for n in sorted(self._segments) if n > number]
        entries = [
            entry
            for n in later
            for entry in durable.read_frames(
                self._segments[n], f"segment {n}", last=n == later[-1]
            )
        ]
        self._segments[later[-1]].seek(0, io.SEEK_END)
        return Found(msgspec.json.decode(state, type=State), anchors, entries)

    def _readable(self) -> list[int]:
        return sorted(n for n, snapshot in self._snapshots.items() if snapshot)
