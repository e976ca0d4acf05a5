"""The mandate in a folder: of this machine, or one that both machines share.

The object is the file with the highest number. A write links a whole file to the next
number, which succeeds for one writer alone. So there is no lock, which a stopped
process could keep. A generation is a file's number and a digest of its contents: a
writer whose generation is gone finds no file of it, or another one of that number,
before it links its own or after that.
"""

from __future__ import annotations

import contextlib
import hashlib
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
        """Return the newest file's generation and contents."""
        for number in reversed(self._numbers()):
            path = self._path(number)
            content = path.read_bytes()
            return _generation(number, content), decode(content, str(path))
        return NO_GENERATION, None

    def write(self, mandate: Mandate, generation: str, timeout_s: float) -> str | None:
        """Link a new file after the one of this generation."""
        if not self._is_there(generation):
            # Numbers begin anew once a person has removed the object.
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        number = _number(generation) + 1
        scratch = self._folder / f"{uuid.uuid4().hex}.tmp"
        content = encode(mandate)
        try:
            with scratch.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if not _linked(scratch, self._path(number)):
                return None
        finally:
            scratch.unlink(missing_ok=True)
        numbers = self._numbers()
        if numbers[-1:] != [number]:
            return None
        if not self._is_there(generation):  # It was removed in between.
            self._path(number).unlink(missing_ok=True)
            return None
        for old in numbers[:-KEPT]:
            self._path(old).unlink(missing_ok=True)
        return _generation(number, content)

    def _is_there(self, generation: str) -> bool:
        """Tell if there is a file of this generation; True for that of no object."""
        if generation == NO_GENERATION:
            return True
        number = _number(generation)
        with contextlib.suppress(FileNotFoundError):
            content = self._path(number).read_bytes()
            return _generation(number, content) == generation
        return False

    def _numbers(self) -> list[int]:
        found = self._folder.glob(f"*{SUFFIX}")
        return sorted(int(path.stem) for path in found if path.stem.isdecimal())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}{SUFFIX}"


def _generation(number: int, content: bytes) -> str:
    return f"{number}-{hashlib.sha256(content).hexdigest()[:16]}"


def _number(generation: str) -> int:
    return int(generation.partition("-")[0] or 0)


def _linked(scratch: Path, path: Path) -> bool:
    """Link a file to a path that is free; return False if it is not."""
    try:
        os.link(scratch, path)
    except FileExistsError:
        # NFS says so, too, of a link that it made and did not hear about.
        return scratch.stat().st_nlink > 1
    return True
