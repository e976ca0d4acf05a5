"""The stream to one standby: a copy of files, then what is appended, and the files that
go with it."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from diloco_jax import storage
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


class _Beside(NamedTuple):
    """A file that goes beside what is appended."""

    file: _File
    gone: threading.Event
    """Set once it has gone, or nothing is sent any more."""


def _open(path: Path) -> _File:
    file = path.open("rb")
    return _File(path, file, os.fstat(file.fileno()).st_size)


def _opened(listed: Callable[[], list[Path]]) -> list[_File]:
    """Open the files of a list; list them again if one was deleted meanwhile."""
    while True:
        opened = []
        try:
            for path in listed():
                opened.append(_open(path))
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
        self._beside: collections.deque[_Beside] = collections.deque()
        """The first may be on its way."""
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
        file = _open(path)
        with self._changed:
            self._first.append(file)
            self._changed.notify_all()
            if self._closed:
                self._close_files()

    def beside(self, path: Path) -> threading.Event:
        """Send a file piece by piece, whenever nothing that is appended waits. Return
        an event that is set once all of it is ahead of what is appended from then on,
        or nothing is sent any more."""
        waits = _Beside(_open(path), threading.Event())
        with self._changed:
            self._beside.append(waits)
            self._changed.notify_all()
            if self.ended:
                waits.gone.set()
            if self._closed:
                self._close_files()
        return waits.gone

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
            for waits in self._beside:
                waits.gone.set()
            self._changed.notify_all()

    def close(self) -> None:
        """Close the files that were not sent; nothing is sent any more."""
        self.end()
        with self._changed:
            self._closed = True
            self._close_files()

    def messages(self) -> Iterator[bytes]:
        """Yield encoded messages until the end."""
        return map(encode, self._messages())

    def _close_files(self) -> None:
        waiting = [item for item in self._first if isinstance(item, _File)]
        beside = [waits.file for waits in self._beside]
        for file in [*(self._copy or []), *waiting, *beside]:
            file.file.close()
        self._first.clear()
        self._beside.clear()

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
            # Not amid a file, which may be of the same name.
            while (waits := self._next_beside()) is not None:
                yield from self._chunks_beside(waits)
        yield follow.CopyWhole(number=self._number)
        beside: Iterator[follow.FromPrimary] = iter(())
        later: Iterator[follow.FromPrimary] = iter(())
        while not self.ended:
            if (item := self._next_first()) is not None:
                if isinstance(item, _File):
                    yield from self._chunks(item)
                else:
                    yield item
            elif (chunk := next(beside, None)) is not None:
                yield chunk
            elif (waits := self._next_beside()) is not None:
                beside = self._chunks_beside(waits)
            elif (chunk := next(later, None)) is not None:
                yield chunk
            elif (path := self._next_later()) is not None:
                with contextlib.suppress(FileNotFoundError):
                    later = self._chunks(_open(path))
            elif self._idle():
                yield follow.PrimaryAlive()

    def _is_held(self, file: _File) -> bool:
        held = self._held.get(self._name(file))
        return held is not None and held == storage.seal_of(file.file)

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

    def _next_beside(self) -> _Beside | None:
        with self._changed:
            return self._beside[0] if self._beside and not self.ended else None

    def _next_later(self) -> Path | None:
        with self._changed:
            return self._later.popleft() if self._later else None

    def _idle(self) -> bool:
        """Wait for something to send; return True if there was nothing."""
        until = time.monotonic() + self._alive_s
        with self._changed:
            while not (self._first or self._beside or self._later or self.ended):
                left = until - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
        return False

    def _chunks_beside(self, waits: _Beside) -> Iterator[follow.FromPrimary]:
        for chunk in self._chunks(waits.file):
            if chunk.last:
                with self._changed:
                    if self._beside:  # The first is this one.
                        self._beside.popleft()
                waits.gone.set()
            yield chunk
        if not waits.gone.is_set():
            self.end(Busy(f"{waits.file.path} was cut off"))

    def _chunks(self, file: _File) -> Iterator[follow.FileChunk]:
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
