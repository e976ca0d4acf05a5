"""The mandate in a folder: of this machine, or one that both machines share.

The object is the file with the highest number. A write links a whole file to the next
number, which succeeds for one writer alone. So there is no lock, which a stopped
process could keep. A writer whose generation is long gone finds no file of it.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from diloco_jax.coordinator.mandates.store import decode, encode
from diloco_jax.protocol.standby.mandate import NO_GENERATION, Mandate

KEPT = 100
"""Files that are kept: a listing of a shared folder may lag behind."""
SUFFIX = ".json"


class FolderStore:
    """See `store.MandateStore`. A folder has no timeout of its own: the caller waits on
    another thread."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def read(self, timeout_s: float) -> tuple[str, Mandate | None]:
        """Return the newest file's number and contents."""
        for number in reversed(self._numbers()):
            path = self._path(number)
            return str(number), decode(path.read_bytes(), str(path))
        return NO_GENERATION, None

    def write(self, mandate: Mandate, generation: str, timeout_s: float) -> str | None:
        """Link a new file after the one with this number."""
        if generation and not self._path(int(generation)).exists():
            # Numbers begin anew once a person has removed the object.
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        number = int(generation or 0) + 1
        scratch = self._folder / f"{uuid.uuid4().hex}.tmp"
        try:
            with scratch.open("wb") as file:
                file.write(encode(mandate))
                file.flush()
                os.fsync(file.fileno())
            os.link(scratch, self._path(number))
        except FileExistsError:
            return None
        finally:
            scratch.unlink(missing_ok=True)
        numbers = self._numbers()
        if numbers[-1] != number:
            return None
        for old in numbers[:-KEPT]:
            self._path(old).unlink(missing_ok=True)
        return str(number)

    def _numbers(self) -> list[int]:
        found = self._folder.glob(f"*{SUFFIX}")
        return sorted(int(path.stem) for path in found if path.stem.isdecimal())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}{SUFFIX}"
