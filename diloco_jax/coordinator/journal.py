"""The coordinator's writing: the record log, and the tape beside it.

A tape holds two kinds of lines and no other: those that the protocol decides to write
(`protocol/records.py`), and the coordinator's own, each kind of which is a struct here.

The record log has everything that must survive a crash, written before anyone can see
it. A log is a row of numbered segments; a snapshot of the state with number n holds
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
import math
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from diloco_jax.config import ConfigError
from diloco_jax.faults import Faults
from diloco_jax.files import Appended, sync_path
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.state import Ignored
from diloco_jax.protocol.holding import (
    MergeDigested,
    MergesCompiled,
    RestoredFragment,
)
from diloco_jax.protocol.messages import Version

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sII")
_MAGIC = b"dlc2"
_ENCODER = json.JSONEncoder(separators=(",", ":"))
"""Shared: `json.dumps` makes one for each record that it writes without spaces."""
_DAMAGED = "the log is damaged, restore the workdir from a copy"
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
        for number in _segments(self._folder):
            if number <= through:
                _path(self._folder, number).unlink()

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
    file.seek(0)
    data, offset = file.read(), 0
    while offset < len(data):
        where = f"{name}, byte {offset}"
        header = data[offset : offset + _HEADER.size]
        torn, end = len(header) < _HEADER.size, offset + _HEADER.size
        if not torn:
            magic, length, crc = _HEADER.unpack(header)
            if magic != _MAGIC:
                raise DurableError(
                    f"{where}: found {magic!r} where a record with {_MAGIC!r} begins; "
                    f"{_DAMAGED}"
                )
            end += length
            torn = end > len(data)
        if torn and not last:
            raise DurableError(
                f"{name} ends inside the record at byte {offset}, but later segments "
                f"exist; {_DAMAGED}"
            )
        if torn and _has_record(data, offset + 1):
            raise DurableError(
                f"{where}: a record of {end - offset:,} bytes, which is more than the "
                f"file has, and whole ones follow its beginning; {_DAMAGED}"
            )
        body = data[offset + _HEADER.size : end]
        if torn or zlib.crc32(body) != crc:
            if last and end >= len(data):
                _cut_off(file, name, offset)
                return
            raise DurableError(
                f"{where}: checksum {zlib.crc32(body):08x}, written as {crc:08x}; "
                f"{_DAMAGED}"
            )
        yield json.loads(body)
        offset = end


def _has_record(data: bytes, at: int) -> bool:
    """Tell if a whole record begins at `at` or later. Each record was on disk before
    the next one was written, so none follows a record that a crash left unfinished."""
    while 0 <= (at := data.find(_MAGIC, at)) <= len(data) - _HEADER.size:
        _, length, crc = _HEADER.unpack_from(data, at)
        body = data[at + _HEADER.size : at + _HEADER.size + length]
        if len(body) == length and zlib.crc32(body) == crc:
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


Environment = dict[str, Any]
"""Result of `diloco_jax.before_jax.describe` in a process."""


class Begun(records.Written, frozen=True, kw_only=True):
    """The first line of a new run."""

    run_id: str
    fingerprint: str
    plan: str
    """Digest of the fragment plan."""
    total_tokens: int
    """Those of the config that the run began with; it may be extended."""
    environment: Environment
    first_from: str = ""
    """Island that gave the first parameters; empty: they were drawn, or read."""
    parameters_digest: str = ""
    """Digest of those that an island gave."""
    fragment_parameters: tuple[int, ...] = ()
    """Parameters by fragment."""


class Recovered(records.Written, frozen=True, kw_only=True):
    """A coordinator came back from its snapshots, the log and the publishes."""

    snapshot: int
    """Number of the snapshot of the state."""
    records: int
    """Records that the log held after the snapshot of the state."""
    discarded: int
    """Merges that were prepared and never committed."""
    versions: tuple[Version, ...]
    """Versions by fragment, the log's records included."""
    environment: Environment
    since: float = 0.0
    """Unix time of the last line of the life before; 0 if the whole run was stopped."""


class FragmentBack(records.Written, frozen=True, kw_only=True, tag="restored"):
    """A fragment is back from its snapshot and the publishes after it."""

    fragment: int
    version: Version
    snapshot: Version
    """Version of the snapshot."""
    digest: str
    """Digest of Theta, after its kind."""
    momentum_untouched: bool = False
    """True if the outer optimizer is as it was in the snapshot, although merges came
    after it: it cannot be inferred from a published change."""


class Term(records.Written, frozen=True, kw_only=True):
    """The first line of a coordinator that had lost its state: a new term begins with
    anchors of islands."""

    term: int
    name: str
    """Drawn as it opened."""
    run_id: str
    versions: tuple[Version, ...]
    """Versions by fragment, as this term calls them."""
    sources: tuple[str, ...] = msgspec.field(name="from")
    """Names of the islands whose anchors were taken, by fragment."""
    replaced: tuple[Version, ...]
    """Versions by fragment, as those islands called them."""
    tokens: int
    next_position: int
    fingerprint: str
    plan: str
    parameters_digest: str
    environment: Environment
    since: float = 0.0
    """Unix time of the last line of the life before; 0 if its tape is lost."""
    fragment_parameters: tuple[int, ...] = ()
    """Parameters by fragment."""


class Hello(records.Written, frozen=True, kw_only=True):
    """An incarnation asked to be let in."""

    island: str
    incarnation: int
    config: dict[str, Any]
    """The island's `IslandConfig`."""
    environment: Environment
    peer: str
    """Address of the island."""


class Compiled(records.Written, frozen=True):
    """All functions that merges need are compiled. A merge that was ordered before this
    line waited for them, or for its fragment to be back.
    """


class Measured(records.Written, frozen=True, kw_only=True):
    """Measures of a merge (`core/fragment_merge.py`); no decision depends on them."""

    fragment: int
    version: Version
    pairwise_cosine: float | None = None
    cosine_to_last: float | None = None
    length_ratio: float | None = None
    step_ratio: float | None = None
    directions: tuple[float | None, ...] = ()
    """Cosine of each delta with the others, in the order of the merge's contributions;
    none if there are too few."""
    experts: dict[str, float] = msgspec.field(default_factory=dict)
    expert_loads: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)


class Digested(records.Written, frozen=True, kw_only=True):
    """Digests of a fragment's Theta and anchor after a merge."""

    fragment: int
    version: Version
    digest: str
    """Digest of Theta, after its kind."""
    anchor: str = ""
    """SHA-256 of the anchor, which tells whether an island has it. A worker's alone:
    islands' anchors take the places of what it loses."""


class Alert(records.Written, frozen=True, kw_only=True):
    """An alert that people should know about."""

    text: str


Note = (
    Begun
    | Recovered
    | FragmentBack
    | Term
    | Hello
    | Compiled
    | Measured
    | Digested
    | Alert
)


NOTES: dict[type[Any], type[Any]] = {
    MergesCompiled: Compiled,
    MergeDigested: Digested,
    RestoredFragment: FragmentBack,
}
"""Notes with the fields of what a holder tells."""


def noted(told: MergesCompiled | MergeDigested | RestoredFragment) -> Note:
    """Return the tape's note of what a holder tells."""
    note: Note = NOTES[type(told)](**msgspec.structs.asdict(told))
    return note


def dated(record: Note | records.Durable | records.Noted) -> dict[str, Any]:
    """Return the record as a line of the tape, with the present time in unix
    seconds."""
    return {**records.line(record), "time": time.time()}


ALERTS_KEPT = 20
ALERTS_EACH = 3
"""Alerts about one island that are kept: it may raise many, and the others stay."""
SLOW_TOLD_EVERY_S = 60.0
"""Seconds between two alerts about a slow log."""


class Journal:
    """The `Log` of the lead. Only its thread may use it."""

    def __init__(
        self,
        log: RecordLog,
        tape: Tape,
        *,
        faults: Faults,
        merges: int,
        slow_s: float,
    ) -> None:
        """faults: fired with the number of each merge, before its record commits it
        and after. merges: merges of the run so far. slow_s: a record that takes longer
        to write raises an alert, since no decision is made meanwhile."""
        self._alerts: list[tuple[str, str]] = []
        """The last ones, oldest first, with the islands that they are about."""
        self.alerts_raised = 0
        self.ignored_messages: Counter[str] = Counter()
        """Messages that made no move, counted by the state that they met; machines and
        states are few."""
        self._log, self._tape = log, tape
        self._faults, self._merges, self._found = faults, merges, merges
        self._slow_s, self._slow_told = slow_s, -math.inf

    def persist(self, record: records.Durable) -> None:
        """See `lead.Log`."""
        if isinstance(record, records.Merged) and self._merges > self._found:
            # Not for the first one: the life before may have ended at this fault.
            self._faults.fire(self._merges + 1, prepared=True)
        began = time.monotonic()
        self._log.append(records.line(record))
        self._watch(time.monotonic() - began)
        self.note(record)
        if isinstance(record, records.Merged):
            self._merges += 1
            self._faults.fire(self._merges)

    def note(self, record: Note | records.Durable | records.Noted) -> None:
        """See `lead.Log`; also writes the coordinator's own notes."""
        if isinstance(record, records.TurnedAway):
            logger.info(
                "island %s refused (%s): %s", record.island, record.code, record.message
            )
        self._tape.append(dated(record))

    def ignored(self, ignored: Ignored) -> None:
        """See `lead.Log`."""
        what = f"{ignored.message} of a {ignored.machine} that is {ignored.state}"
        self.ignored_messages[what] += 1
        if not ignored.expected and self.ignored_messages[what] == 1:
            logger.warning(
                "ignored: %s; the two ends disagree, look at the island's log",
                what,
            )

    @property
    def alerts(self) -> list[str]:
        """The last alerts, oldest first."""
        return [text for _, text in self._alerts]

    def alert(self, text: str, island: str = "") -> None:
        """See `lead.Log`."""
        logger.warning("%s", text)
        same = [alert for alert in self._alerts if alert[0] == island]
        if island and len(same) == ALERTS_EACH:
            self._alerts.remove(same[0])
        self._alerts = [*self._alerts, (island, text)][-ALERTS_KEPT:]
        self.alerts_raised += 1
        self.note(Alert(text=text))

    def _watch(self, seconds: float) -> None:
        now = time.monotonic()
        if seconds > self._slow_s and now - self._slow_told > SLOW_TOLD_EVERY_S:
            self._slow_told = now
            self.alert(
                f"the record log's disk is slow: one record took {seconds:.1f} s, and "
                f"no decision is made meanwhile; give the workdir a disk of its own"
            )
