"""Append-only JSON lines: the tape, whose lines are chained by hash, and plain ones.

Every line of a tape carries `prev`, the first 16 hex digits of the SHA-256 of the line
before it (without its newline; empty on the first line). So a line that is missing,
altered or out of order is found and named. A tape that ends early cannot be told.

Both are written in files of bounded size, the segments: one that is written, and older
closed ones. `tape.jsonl` is the newest file of the tape. When it is full, it is renamed
to `tape.000001.jsonl`, `tape.000002.jsonl` and so on, and a new one begins; a closed
file never changes. The whole tape is `cat tape.*.jsonl tape.jsonl`. The same holds for
`metrics.jsonl`. The chain of a tape, and the numbers of lines in messages, go through
all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from diloco_jax.files import Appended

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
"""Bytes after which a file is full: about half an hour of 64 islands at 1 s a step."""


def segments(path: Path, *, newest_first: bool = False) -> Iterator[BinaryIO]:
    """Yield the files, opened for reading, from the oldest or the newest on.

    A writer may be at work: what it puts aside meanwhile is neither left out nor read
    twice, and what it begins after the call is not read. FileNotFoundError if there is
    no file.
    """
    with _open_newest(path) as newest:
        itself = os.fstat(newest.fileno())
        older = list(
            itertools.takewhile(
                # It may have been put aside since it was opened.
                lambda file: not os.path.samestat(file.stat(), itself),
                closed_segments(path),
            )
        )
        if newest_first:
            yield newest
            older.reverse()
        for one in older:
            with one.open("rb") as file:
                yield file
        if not newest_first:
            yield newest


def closed_segments(path: Path) -> list[Path]:
    """Return the closed files of these lines, the oldest first."""
    name = re.compile(rf"{re.escape(path.stem)}\.\d{{6}}{re.escape(path.suffix)}")
    return sorted(file for file in path.parent.iterdir() if name.fullmatch(file.name))


def nbytes(path: Path) -> int:
    """Return the bytes of all files of these lines."""
    found = 0
    for file in (*closed_segments(path), path):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size
    return found


def put_aside(path: Path) -> None:
    """Close the current file: rename it to the next number."""
    before = closed_segments(path)
    number = int(before[-1].stem.rpartition(".")[2]) if before else 0
    path.rename(_closed_path(path, number + 1))


def _missing_segment(path: Path) -> str:
    """Return the name of a closed file that is missing although a later one exists; ""
    if none is.
    """
    for number, file in enumerate(closed_segments(path), start=1):
        if file != (wanted := _closed_path(path, number)):
            return wanted.name
    return ""


def _open_newest(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        # A writer that has just put it aside, or died then.
        before = closed_segments(path) if path.parent.is_dir() else []
        if not before:
            raise
        return before[-1].open("rb")


def _closed_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number:06d}{path.suffix}")


LAST_LINES = 1000
LINES_TOLD = 1000
"""Lines between two times that the progress is told."""
BRIEF_CHARACTERS = 160
"""Longest part of a line that a message shows."""


NOT_A_RECORD = (ValueError, KeyError, AttributeError, TypeError, RecursionError)
"""Errors that reading a line raises if the line is not a record."""


Report = Callable[[float], None]
"""Takes the share that is done."""


class TapeError(ValueError):
    """A tape differs from what was written: names the line and both hashes."""


class JsonLines:
    """Files to which JSON objects are appended, one flushed line each.

    `path` is the file that is written; when it has `segment_bytes`, it is put aside. A
    line that a crash left unfinished is cut off when the file is opened again;
    `cut_bytes` is its length in bytes. A line that cannot be written leaves nothing of
    itself. Use from one thread at a time.
    """

    def __init__(self, path: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.path = Path(path)
        self._segment_bytes = segment_bytes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.cut_bytes = _cut_torn_line(self.path)
        self._file = Appended(self.path)
        self._bytes = self.path.stat().st_size
        if self.cut_bytes:
            logger.warning(
                "%s ended in an unfinished line; its %d bytes are cut off",
                self.path,
                self.cut_bytes,
            )

    def append(self, record: Mapping[str, Any]) -> None:
        """Write the record as one line and hand it to the operating system. Raises
        OSError if the disk is full; nothing has changed then."""
        if self._full:
            self._begin_segment()
        self._write(_line(record))

    def close(self) -> None:
        """Close the file; appending afterwards is an error."""
        self._file.close()

    @property
    def _full(self) -> bool:
        return self._bytes >= self._segment_bytes

    def _write(self, line: bytes) -> None:
        data = line + b"\n"
        self._file.append(data)
        self._bytes += len(data)

    def _begin_segment(self) -> None:
        # The file is not synced: on the thread of decisions, nothing waits for a disk
        # on behalf of these lines.
        self._file.close()
        if self.path.exists():  # It was put aside if this is another attempt.
            put_aside(self.path)
        self._file = Appended(self.path)
        self._bytes = 0


class Tape(JsonLines):
    """JSON lines of which each names the hash of the one before."""

    def __init__(
        self,
        path: str | Path,
        segment_bytes: int = SEGMENT_BYTES,
        repeat: Callable[[str, Callable[[], None]], None] = lambda what, write: write(),
        told: Callable[[Mapping[str, Any]], object] = lambda record: None,
    ) -> None:
        """repeat: calls a write until there is space for it. told: called with every
        record that is appended."""
        super().__init__(path, segment_bytes)
        self._repeat, self._told = repeat, told
        self._prev, self.went_on = "", 0.0
        """Unix time of the last line that was there before; 0 if there was none."""
        for file in segments(self.path, newest_first=True):
            if (last := next(_reversed_lines(file), None)) is not None:
                self._prev = _digest(last)
                self.went_on = float(json.loads(last).get("time", 0.0))
                break

    def append(self, record: Mapping[str, Any]) -> None:
        """Write the record plus `prev`; raise ValueError if it has a `prev` already."""
        if "prev" in record:
            raise ValueError(f"a tape record cannot have a field 'prev': {record!r}")
        if self._full:
            self._repeat("a segment of the tape", self._begin_segment)
        line = _line({**record, "prev": self._prev})
        self._repeat("a line of the tape", lambda: self._write(line))
        self._prev = _digest(line)
        self._told(record)


def read_tape(
    path: str | Path, report: Report = lambda share: None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a tape in order, without `prev`, each checked first.

    report: told the share that is read, now and then.

    An unfinished last line (its writer is at work, or died) is left out. Raises
    TapeError with the number of the first bad line: not JSON, not a successor of the
    line before it, or unfinished in a file that was put aside.
    """
    path = Path(path)
    if missing := _missing_segment(path):
        raise TapeError(
            f"{path}: the tape goes on from {missing}, which is missing; put it back"
        )
    expected = ""
    for number, raw in enumerate(_whole_lines(path, report), start=1):
        line = raw[:-1]
        try:
            record = json.loads(line)
            prev = record.pop("prev")
        except NOT_A_RECORD as error:
            raise TapeError(
                f"{path}, line {number}: not a record of a tape ({brief(error)}); "
                f"what follows cannot be trusted"
            ) from error
        if prev != expected:
            named = brief(prev).strip("'") if prev else "none"
            raise TapeError(
                f"{path}, line {number}: it follows a line with hash "
                f"{named}, but the line before it has "
                f"{expected or 'none'}: line {max(1, number - 1)} was altered, or "
                f"lines before {number} are missing or out of order; what follows "
                f"cannot be trusted"
            )
        expected = _digest(line)
        yield record


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of plain JSON lines, through all their files. An unfinished
    last line, whose writer is at work or died, is left out; FileNotFoundError if there
    is no file."""
    for file in segments(Path(path)):
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


class NewLines:
    """The lines of a file, and of those put aside before it, that were not yielded
    before, while their writer is at work. Use from one thread.

    Hashes are not checked, and lines that are no JSON objects are left out.
    """

    def __init__(self, path: Path) -> None:
        """path: the newest file, which need not exist yet."""
        self.path, self.read_bytes = path, 0
        self._file, self._offset = 0, 0
        """Number in the file system of the file that is read, and the bytes read of
        it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the new lines up to the end; a line without its end comes later, as its
        writer's next life cuts it off."""
        with contextlib.suppress(FileNotFoundError):  # It has not begun.
            reached = not self._file
            for file in segments(self.path):
                number = os.fstat(file.fileno()).st_ino
                if number != self._file:
                    if not reached:
                        continue
                    self._file, self._offset = number, 0
                reached = True
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self.read_bytes += len(line)
                    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                        if isinstance(found := msgspec.json.decode(line), dict):
                            yield found
            if not reached:
                self._file = 0  # It was removed, and another one has begun.


def remove_tape(path: Path) -> None:
    """Remove all files of a tape."""
    for file in (*closed_segments(path), path):
        file.unlink(missing_ok=True)


def brief(value: object) -> str:
    """Return the repr of a value, cut in the middle if it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = BRIEF_CHARACTERS
    return short.repr(value)


class Repeats:
    """Tell which lines of kind "island" a tape has already: an island repeats records
    to a coordinator that came back, which may not have had them."""

    def __init__(self) -> None:
        self._through: dict[tuple[str, int], int] = {}
        """Number of the newest record by island and incarnation."""

    def seen(self, line: Mapping[str, Any]) -> bool:
        """Tell if this line repeats an earlier one, and note it. Lines come in their
        order."""
        who, number = (line["island"], line["incarnation"]), line["record"]["seq"]
        if number <= self._through.get(who, 0):
            return True
        self._through[who] = number
        return False


def not_on_tape(
    path: str | Path, durable: Sequence[dict[str, Any]]
) -> Sequence[dict[str, Any]]:
    """Return the newest durable records that the tape lacks after a crash.

    Each record is made durable first, and then written to the tape with its `time`.
    """
    if not durable:
        return durable
    kinds = {record["kind"] for record in durable}
    for line in newest_first(Path(path)):
        if line["kind"] in kinds:
            del line["prev"], line["time"]
            found = durable.index(line) + 1 if line in durable else 0
            return durable[found:]
    return durable


def lines_after(path: Path, since: float) -> list[dict[str, Any]]:
    """Return the complete lines later than a unix time, unchecked: those after the last
    one that cannot be read, and none if there is no file."""
    found = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in newest_first(path):
            if line["time"] <= since:
                break
            found.append(line)
    return found[::-1]


def newest_record(path: str | Path, kind: str) -> dict[str, Any]:
    """Return the last complete line of that kind, unchecked; raise ValueError if there
    is none."""
    for line in newest_first(Path(path)):
        if line["kind"] == kind:
            return line
    raise ValueError(f"{path} has no record {kind!r}")


def tells_of_the_end(path: Path) -> bool:
    """Tell if the tape records the end of the run; later lines only say which islands
    left.
    """
    newest = itertools.islice(newest_first(path), LAST_LINES)
    try:
        kinds = (line["kind"] for line in newest)
        # A run that was extended is over once more, or not yet.
        last = next((k for k in kinds if k in ("finished", "extended")), "")
    except FileNotFoundError:
        return False
    return last == "finished"


def _whole_lines(path: Path, report: Report) -> Iterator[bytes]:
    """Yield the lines without an unfinished last one; raise TapeError if a file that
    was put aside ends in one. report: told the share that is read."""
    number, cut_off = 0, False
    read, whole = 0, nbytes(path)
    for file in segments(path):
        if cut_off:
            raise TapeError(
                f"{path}, line {number}: it is cut off, and the tape goes on in a "
                f"later file; put back the file that was put aside"
            )
        for line in file:
            number += 1
            if cut_off := not line.endswith(b"\n"):
                break
            read += len(line)
            if number % LINES_TOLD == 0:
                report(min(1.0, read / whole))  # Its writer may be at work.
            yield line


def newest_first(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all complete lines from the last one back, unchecked."""
    for file in segments(path, newest_first=True):
        yield from map(json.loads, _reversed_lines(file))


def _reversed_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines of a file from the last one back."""
    *whole, _ = file.read().split(b"\n")
    yield from reversed(whole)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:16]


def _cut_torn_line(path: Path) -> int:
    if not path.exists():
        return 0
    data = path.read_bytes()
    keep = data.rfind(b"\n") + 1
    os.truncate(path, keep)
    return len(data) - keep
