"""Follow a tape that is being written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from diloco_jax.observability.tape import segments


class Tail:
    """Reads each line of a tape once, and a line that is not whole later. Hashes are
    not checked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[int, int] = {}
        """Bytes that were read of each file, by its number in the file system."""

    def new(self) -> list[dict[str, Any]]:
        """Return the lines that were written since the last call; none if there is no
        tape yet."""
        lines: list[dict[str, Any]] = []
        try:
            for file in segments(self._path):
                number = os.fstat(file.fileno()).st_ino
                # What a writer cuts off after a crash is behind the last whole line.
                file.seek(begin := self._read.get(number, 0))
                octets = file.read()
                whole = octets[: octets.rfind(b"\n") + 1]
                self._read[number] = begin + len(whole)
                lines += map(json.loads, whole.splitlines())
        except FileNotFoundError:
            pass  # It has not begun.
        return lines
