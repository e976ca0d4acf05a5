"""Send a standby a copy of the primary's files, and all that is written after it.

Everything is listed and numbered on the lead's thread, which alone appends to log and
tape; publishes and snapshots come from other threads, or from workers, whose messages
tell of them. A publish goes ahead of the record that commits it, and so does the anchor
of a lost fragment. Snapshots go when there is nothing else to send.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from diloco_jax import checkpoint, run_files, sealed
from diloco_jax.config import Placement
from diloco_jax.coordinator.holding import publishes
from diloco_jax.coordinator.snapshots import SUFFIX, fragment_path
from diloco_jax.coordinator.workers.supervised import Heard
from diloco_jax.observability import segments
from diloco_jax.protocol.holding import AnchorKept, MergePrepared
from diloco_jax.protocol.values import Version
from diloco_jax.protocol.working import FragmentSaved
from diloco_jax.wire import follow
from diloco_jax.wire.encoding import encode
from diloco_jax.wire.errors import Busy, WireError
from diloco_jax.wire.follow import CHUNK_BYTES

QUEUED_BYTES = 64 << 20
"""Bytes that may wait for a standby; with more, it has to begin anew."""
QUEUED_MESSAGES = 200_000
"""More than are written while the first copy of a large run is sent."""


class _File(NamedTuple):
    """A file of the copy, open since it was listed: it may be deleted meanwhile."""

    path: Path
    file: BinaryIO
    size: int


def _opened(listed: Callable[[], list[Path]]) -> list[_File]:
    """Open the files of a list; list them again if one was deleted meanwhile."""
    while True:
        opened = []
        try:
            for path in listed():
                file = path.open("rb")
                opened.append(_File(path, file, os.fstat(file.fileno()).st_size))
            return opened
        except FileNotFoundError:
            for one in opened:
                one.file.close()


class StandbyFeed:
    """The queue of one standby. `messages` is its stream."""

    def __init__(
        self, workdir: Path, run_id: str, alive_s: float, held: Mapping[str, str]
    ) -> None:
        """alive_s: seconds without a message after which there is a sign of life. held:
        seals of the files that the standby has, by path."""
        self._workdir, self._run_id, self._alive_s = workdir, run_id, alive_s
        self._held = held
        self._changed = threading.Condition()
        self._copy: list[_File] | None = None
        self._number = 0
        self._first: collections.deque[follow.FromPrimary | _File] = collections.deque()
        self._later: collections.deque[Path] = collections.deque()
        self._bytes = 0
        self.ended = self._closed = False
        """ended: nothing is sent any more. _closed: its files are closed, too."""
        self.error: WireError | None = None
        """The error with which the stream ends, if it ends with one."""

    def begin(self, stages: Iterable[Callable[[], list[Path]]], number: int) -> None:
        """Send a copy of files as they are now, which hold everything up to that
        number. stages: each lists some files, once those before it are open."""
        opened = [file for stage in stages for file in _opened(stage)]
        with self._changed:
            self._copy, self._number = opened, number
            self._changed.notify_all()
            if self._closed:
                self._close_files()

    def append(self, message: follow.AppendedTo | follow.PutAside) -> bool:
        """Send this in its order; return False if too much waits already."""
        size = len(message.data) if isinstance(message, follow.AppendedTo) else 0
        with self._changed:
            self._bytes += size
            if self._bytes > QUEUED_BYTES or len(self._first) > QUEUED_MESSAGES:
                return False
            self._first.append(message)
            self._changed.notify_all()
            return True

    def publish(self, path: Path) -> None:
        """Send a file before what is appended after this call."""
        file = path.open("rb")
        with self._changed:
            self._first.append(_File(path, file, path.stat().st_size))
            self._changed.notify_all()
            if self._closed:
                self._close_files()

    def snapshot(self, path: Path) -> None:
        """Send a file once nothing else waits."""
        with self._changed:
            while len(self._later) >= QUEUED_MESSAGES:
                self._later.popleft()
            if path not in self._later:
                self._later.append(path)
            self._changed.notify_all()

    def end(self, error: WireError | None = None) -> None:
        """Send nothing more."""
        with self._changed:
            self.ended, self.error = True, self.error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Close the files that were not sent; nothing is sent any more."""
        with self._changed:
            self.ended = self._closed = True
            self._close_files()
            self._changed.notify_all()

    def messages(self) -> Iterator[bytes]:
        """Yield encoded messages until the end."""
        return map(encode, self._messages())

    def _close_files(self) -> None:
        waiting = [item for item in self._first if isinstance(item, _File)]
        for file in [*(self._copy or []), *waiting]:
            file.file.close()
        self._first.clear()

    def _messages(self) -> Iterator[follow.FromPrimary]:
        with self._changed:
            while self._copy is None and not self.ended:
                self._changed.wait(self._alive_s)
        if self.ended or self._copy is None:
            return
        same = [file for file in self._copy if self._is_held(file)]
        keep = tuple(self._name(file) for file in same)
        yield follow.CopyBegins(run_id=self._run_id, keep=keep)
        for file in self._copy:
            if file not in same:
                yield from self._chunks(file)
        yield follow.CopyWhole(number=self._number)
        later: Iterator[follow.FromPrimary] = iter(())
        while not self.ended:
            if (item := self._next_first()) is not None:
                if isinstance(item, _File):
                    yield from self._chunks(item)
                else:
                    yield item
            elif (chunk := next(later, None)) is not None:
                yield chunk
            elif (path := self._next_later()) is not None:
                with contextlib.suppress(FileNotFoundError):
                    file = _File(path, path.open("rb"), path.stat().st_size)
                    later = self._chunks(file)
            elif self._idle():
                yield follow.PrimaryAlive()

    def _is_held(self, file: _File) -> bool:
        held = self._held.get(self._name(file))
        return held is not None and held == sealed.seal_of(file.file)

    def _name(self, file: _File) -> str:
        return file.path.relative_to(self._workdir).as_posix()

    def _next_first(self) -> follow.FromPrimary | _File | None:
        with self._changed:
            if not self._first:
                return None
            item = self._first.popleft()
            if isinstance(item, follow.AppendedTo):
                self._bytes -= len(item.data)
            return item

    def _next_later(self) -> Path | None:
        with self._changed:
            return self._later.popleft() if self._later else None

    def _idle(self) -> bool:
        """Wait for something to send; return True if there was nothing."""
        until = time.monotonic() + self._alive_s
        with self._changed:
            while not (self._first or self._later or self.ended):
                left = until - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
        return False

    def _chunks(self, file: _File) -> Iterator[follow.FromPrimary]:
        path = self._name(file)
        left, first = file.size, True
        with file.file:
            while first or left:
                data = file.file.read(min(left, CHUNK_BYTES))
                if left and not data:
                    return  # It was cut off, which the standby does not keep.
                left -= len(data)
                yield follow.FileChunk(path=path, first=first, last=not left, data=data)
                first = False


class Outflow:
    """Count what this primary writes, and hand it to the standby, if there is one."""

    def __init__(
        self,
        workdir: Path,
        placement: Placement,
        alive_s: float,
        lost: Callable[[str], None],
    ) -> None:
        """lost: called, on any thread, if the standby cannot be sent what is
        written."""
        self._workdir, self._alive_s, self._lost = workdir, alive_s, lost
        self._snapshots = checkpoint.snapshots_folder(placement, workdir)
        self._lock = threading.Lock()
        self._outgoing: StandbyFeed | None = None
        self.number = 0
        """Number of the last thing that was appended."""
        self.on_written: Callable[[int], None] = lambda number: None
        """Called on the lead's thread with that number."""

    def prepare(self, run_id: str, held: Mapping[str, str]) -> StandbyFeed:
        """Return the stream of a standby that is not accepted yet, and has these
        files."""
        return StandbyFeed(self._workdir, run_id, self._alive_s, held)

    def begin(self, outgoing: StandbyFeed) -> None:
        """Send a copy of all files, then what is written. On the lead's thread."""
        with self._lock:
            if outgoing.ended:
                return
            self._outgoing = outgoing
        # Snapshots after what they make superfluous, which is deleted after they came.
        stages = (self._publishes, self._segments, self._snapshot_files, self._others)
        outgoing.begin(stages, self.number)

    def end(self, outgoing: StandbyFeed, error: WireError | None = None) -> None:
        """Send this standby nothing more."""
        outgoing.end(error)  # First: it may be about to begin.
        with self._lock:
            if self._outgoing is outgoing:
                self._outgoing = None

    def appended(self, path: Path, data: bytes, *, sync: bool) -> None:
        """Take note of bytes that were appended to a file."""
        self.number += 1
        self._append(
            follow.AppendedTo(
                number=self.number, path=self._name(path), sync=sync, data=data
            )
        )

    def put_aside(self, path: Path) -> None:
        """Take note of a file of the tape that was put aside."""
        self.number += 1
        self._append(follow.PutAside(number=self.number, path=self._name(path)))

    def published(self, path: Path) -> None:
        """Take note of a publish that is on disk, or of another file that has to go
        ahead of the next record."""
        with self._lock:
            outgoing = self._outgoing
        if outgoing is None:
            return
        try:
            outgoing.publish(path)
        except OSError as error:
            # The record would count there without it.
            self.end(outgoing, Busy(f"{path} cannot be read: {error}"))
            self._lost("a file cannot be read")

    def snapshot(self, path: Path) -> None:
        """Take note of a snapshot or another file that is whole."""
        with self._lock:
            if self._outgoing is not None:
                self._outgoing.snapshot(path)

    def heard(self, message: Heard) -> None:
        """Take note of what a worker says that it has on its disk."""
        match message:
            case MergePrepared(fragment=fragment, version=version):
                folder = self._workdir / run_files.PUBLISHES
                self.published(publishes.path_of(folder, fragment, version))
            case AnchorKept(fragment=fragment, version=version):
                self.published(self._snapshot_path(fragment, version))
            case FragmentSaved(fragment=fragment, version=version):
                self.snapshot(self._snapshot_path(fragment, version))

    def _snapshot_path(self, fragment: int, version: Version) -> Path:
        return Path(fragment_path(self._snapshots, fragment, version))

    def _append(self, message: follow.AppendedTo | follow.PutAside) -> None:
        with self._lock:
            outgoing = self._outgoing
        self.on_written(self.number)
        if outgoing is not None and not outgoing.append(message):
            self.end(outgoing, Busy("the standby is too slow for what is written"))
            self._lost("too much waits for it")

    def _publishes(self) -> list[Path]:
        return sorted((self._workdir / run_files.PUBLISHES).glob("*/*.publish"))

    def _segments(self) -> list[Path]:
        return sorted((self._workdir / run_files.LOG).glob("log-*.bin"))

    def _snapshot_files(self) -> list[Path]:
        return sorted(Path(self._snapshots).rglob(f"*{SUFFIX}"))

    def _others(self) -> list[Path]:
        tape = self._workdir / run_files.TAPE
        named = (run_files.CONFIG, run_files.FACTS, run_files.ROSTER)
        paths = [*segments.closed(tape), tape, *(self._workdir / n for n in named)]
        source = sorted((self._workdir / run_files.SOURCE).glob("*"))
        return [path for path in (*paths, *source) if path.is_file()]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._workdir).as_posix()
