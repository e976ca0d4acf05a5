"""The record log: everything that must survive a crash, written before anyone can see
it.

A log is a row of numbered segments; a snapshot of the state with number n holds
everything up to segment n. A frame is a fixed header (magic, length and CRC-32 of the
record) and a JSON record. Records are small: bulk bytes are in files of their own
(`holding/fragment_snapshots.py`). Only the last frame of the last segment can be left
unfinished by a crash; it is cut off. Any other frame that does not read is damage, and
an error. Each segment begins with the size of the one before it, so that nothing is
missing.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from diloco_jax.config import ConfigError
from diloco_jax.files import Appended
from diloco_jax.storage import sync_path

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sII")
_MAGIC = b"dlc2"
_ENCODER = json.JSONEncoder(separators=(",", ":"))
"""Shared: `json.dumps` makes one for each record that it writes without spaces."""
FOLLOWS = "follows"
"""Kind of the first record of a segment that has one before it."""


class DurableError(ConfigError):
    """The log cannot be read as this version would have written it; names the place."""


Line = dict[str, Any]
"""One record of the log."""


class RecordLog:
    """Append durable records to the newest segment of a folder."""

    def __init__(
        self,
        folder: Path,
        after: int = -1,
        repeat: Callable[[str, Callable[[], None]], None] = lambda what, write: write(),
    ) -> None:
        """after: the number of a snapshot; segments of this log have higher numbers.
        repeat: calls a write until there is space for it (`DiskWait.until_written`).
        """
        self._folder, self._repeat = folder, repeat
        folder.mkdir(parents=True, exist_ok=True)
        self.segment = next_number(folder, after)
        self._file: Appended
        self._repeat("a segment of the log", self._begin)
        sync_path(folder.parent)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record; it is on disk when this returns."""
        data = frame(record)
        self._repeat("a record of the log", lambda: self._file.append(data, sync=True))

    def rotate(self) -> int:
        """Start the next segment; return the number of the segment that ended. Raises
        OSError if the disk is full; nothing has changed then."""
        ended, before = self.segment, self._file
        self._file = self._open(ended + 1)
        self.segment = ended + 1
        before.close()
        return ended

    def forget(self, through: int) -> None:
        """Delete the segments up to number `through`, which the oldest snapshot
        contains.
        """
        forget(self._folder, through)

    def close(self) -> None:
        """Close the newest segment."""
        self._file.close()

    def _begin(self) -> None:
        self._file = self._open(self.segment)

    def _open(self, segment: int) -> Appended:
        path, before = (_path(self._folder, n) for n in (segment, segment - 1))
        file = Appended(path)
        try:
            if before.exists() and not path.stat().st_size:
                follows = frame({"kind": FOLLOWS, "bytes": before.stat().st_size})
                file.append(follows, sync=True)
            sync_path(self._folder)
        except OSError:
            # Beside it, an unfinished record of the segment before would be damage.
            file.close()
            path.unlink()
            raise
        return file


def forget(folder: Path, through: int) -> None:
    """Delete the segments of a folder up to number `through`."""
    for number in _segments(folder):
        if number <= through:
            _path(folder, number).unlink()


def next_number(folder: Path, after: int) -> int:
    """Return the number of a new segment or snapshot: above `after`, and not below any
    segment of the folder."""
    return max([0, after + 1, *_segments(folder)])


def goes_on_from(folder: Path, after: int) -> bool:
    """Tell if the log has every segment after `after` (`RecordLog.forget` deletes
    some)."""
    later = [number for number in _segments(folder) if number > after]
    return bool(later) and later == list(range(after + 1, later[-1] + 1))


def read(folder: Path, after: int) -> Iterator[Line]:
    """Yield the entries of all segments numbered above `after`, oldest first.

    Raises DurableError where a frame is damaged; cuts off an unfinished last frame.
    """
    numbers = [n for n in _segments(folder) if n > after]
    for number in numbers:
        path = _path(folder, number)
        with path.open("rb+") as file:
            for line in read_frames(file, str(path), last=number == numbers[-1]):
                if line.get("kind") != FOLLOWS:
                    yield line
                elif number - 1 in numbers:
                    _require_whole(_path(folder, number - 1), line["bytes"])


def _require_whole(path: Path, nbytes: int) -> None:
    if (found := path.stat().st_size) != nbytes:
        raise DurableError(
            f"{path} has {found:,} bytes, and had {nbytes:,} when the next segment "
            f"began; records are missing, restore the workdir from a copy"
        )


def frame(record: Mapping[str, Any]) -> bytes:
    """Return one record as the log stores it."""
    body = _ENCODER.encode(record).encode()
    return _HEADER.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def read_frames(file: BinaryIO, name: str, *, last: bool) -> Iterator[Line]:
    """Yield the entries of one segment. last: it is the newest segment; an unfinished
    frame at its end, as a crash leaves it, is cut off. Raises DurableError as `read`
    does."""
    size, offset = file.seek(0, os.SEEK_END), file.seek(0)
    while offset < size:
        raw = file.read(_HEADER.size)
        end = offset + _HEADER.size
        torn = end > size
        if not torn:
            magic, length, crc = _HEADER.unpack(raw)
            if magic != _MAGIC:
                raise DurableError(
                    f"{name}, byte {offset}: found {magic!r} where a record with "
                    f"{_MAGIC!r} begins; the log is damaged, restore the workdir "
                    f"from a copy"
                )
            end += length
            torn = end > size
        if torn:
            if not last:
                raise DurableError(
                    f"{name} ends inside the record at byte {offset}, but later "
                    f"segments exist; the log is damaged, restore the workdir "
                    f"from a copy"
                )
            if _has_record(file, offset + 1):
                raise DurableError(
                    f"{name}, byte {offset}: a record of {end - offset:,} bytes, which "
                    f"is more than the file has, and whole ones follow its beginning; "
                    f"the log is damaged, restore the workdir from a copy"
                )
            _cut_off(file, name, offset)
            return
        body = file.read(length)
        found = zlib.crc32(body)
        if found != crc:
            if last and end == size:
                _cut_off(file, name, offset)
                return
            raise DurableError(
                f"{name}, byte {offset}: checksum {found:08x}, written as "
                f"{crc:08x}; the log is damaged, restore the workdir from a copy"
            )
        yield json.loads(body)
        offset = end


def _has_record(file: BinaryIO, start: int) -> bool:
    """Tell if a whole record begins at `start` or later. Each record was on disk before
    the next one was written, so none follows a record that a crash left unfinished."""
    file.seek(start)
    data, at = file.read(), 0
    while (at := data.find(_MAGIC, at)) >= 0:
        body = at + _HEADER.size
        if body > len(data):
            return False
        _, length, crc = _HEADER.unpack(data[at:body])
        end = body + length
        if end <= len(data) and zlib.crc32(data[body:end]) == crc:
            return True
        at += 1
    return False


def _cut_off(file: BinaryIO, name: str, offset: int) -> None:
    logger.warning("%s: the unfinished record at byte %d is cut off", name, offset)
    file.truncate(offset)
    file.flush()
    # Before a later segment exists: beside one, an unfinished record is damage.
    with contextlib.suppress(io.UnsupportedOperation):  # The simulator's buffers.
        os.fsync(file.fileno())


def _segments(folder: Path) -> list[int]:
    return sorted(int(p.stem.split("-")[1]) for p in folder.glob("log-*.bin"))


def _path(folder: Path, number: int) -> Path:
    return folder / f"log-{number:06d}.bin"
