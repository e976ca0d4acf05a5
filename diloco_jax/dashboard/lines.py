"""Follow JSON lines while their writer is at work, through all their files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from diloco_jax.observability.tape import closed_segments

BLOCK_BYTES = 1 << 20


class NewLines:
    """The lines of a file that were not yielded before. Use from one thread.

    `bad_lines` counts complete lines that were no JSON objects and were left out.
    """

    def __init__(self, path: Path) -> None:
        """path: the newest file, which need not exist yet."""
        self.bad_lines = 0
        self.read_bytes = 0
        self.path = path
        self._file: BinaryIO | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the new lines up to the end; a line without its end comes later."""
        while self._open():
            assert self._file is not None
            rest = b""
            while block := self._file.read(BLOCK_BYTES):
                self.read_bytes += len(block)
                *whole, rest = (rest + block).split(b"\n")
                for line in whole:
                    if (found := self._decode(line)) is not None:
                        yield found
            read = self._file.tell()
            # An unfinished line is read again: its writer's next life cuts it off.
            self.read_bytes -= len(rest)
            self._file.seek(read - len(rest))
            if not self._go_on(read):
                return

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _decode(self, line: bytes) -> dict[str, Any] | None:
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = None
        if isinstance(found, dict) and isinstance(found.get("time"), (int, float)):
            return found
        self.bad_lines += 1
        return None

    def _open(self) -> bool:
        if self._file is None:
            before = closed_segments(self.path) if self.path.parent.is_dir() else []
            try:
                self._file = (before[0] if before else self.path).open("rb")
            except FileNotFoundError:
                return False
        return True

    def _go_on(self, read: int) -> bool:
        """Open the file after this one, of which `read` bytes were read; return False
        at the end of the newest."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno())
        closed = closed_segments(self.path)
        for number, file in enumerate(closed):
            if os.path.samestat(file.stat(), mine):
                after = closed[number + 1] if number + 1 < len(closed) else self.path
                break
        else:
            return False
        if mine.st_size > read:
            return True  # Its last lines came after the last read.
        try:
            following = after.open("rb")
        except FileNotFoundError:
            return False
        self._file.close()
        self._file = following
        return True
