"""Paths, files that are whole at any moment, and folders that can hold them.

Paths mean the same in any folder, and errors name their file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from diloco_jax.errors import UNNAMEABLE, ConfigError

S3 = "s3://"
TEMPORARY = ".tmp"
"""Suffix of a file that is not whole yet."""


class StorageAway(Exception):  # noqa: N818
    """A bucket did not answer. That is temporary, so the supervisor tries again."""


def is_bucket(folder: str) -> bool:
    """Return True for gs://BUCKET/FOLDER and s3://BUCKET/FOLDER, False for a folder of
    this machine."""
    return "://" in folder


def expand(path: str | Path) -> Path:
    """Replace `~` by the user's folder; raise ConfigError if there is none, or if no
    file can have this name."""
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: {error} Write the folder's whole name, or ./{path} for a folder "
            f"of that name"
        ) from error
    try:
        os.stat(expanded)
    except ValueError as error:
        raise ConfigError(f"path {str(path)!r}: {error}; give another") from error
    except OSError as error:
        if error.errno in UNNAMEABLE:
            named = f"path {str(path)[:60]!r}, of {len(str(path))} characters"
            raise ConfigError(f"{named}: {error.strerror}; give another") from error
    return expanded


def of_home(variable: str, otherwise: str) -> Path:
    """Return the folder that a variable names or, without it, another one, in the
    user's home; raise FileNotFoundError if the user has none."""
    try:
        return Path(os.environ.get(variable) or otherwise).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} Set HOME or {variable}.") from error


def absolute(path: str) -> str:
    """Make a local path absolute, `~` included; return a bucket or "" unchanged."""
    if not path or is_bucket(path):
        return path
    return str(expand(path).absolute())


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an OSError raised inside this file's name; errors of writing have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES = 1024
"""Most bytes of such a file, by its specification."""
POINTED = "it is a pointer of Git LFS, and `git lfs pull` in its clone fetches the file"


class Appended:
    """A file to which bytes are appended whole, or not at all: an append that fails,
    as on a full disk, leaves the file as it was and can be repeated."""

    def __init__(self, path: Path) -> None:
        """Open the file, and make it if it is missing."""
        self.path = path
        with naming(path):
            self._file = path.open("ab", buffering=0)
        self._end = os.fstat(self._file.fileno()).st_size
        self._torn = False

    def append(self, data: bytes, *, sync: bool = False) -> None:
        """Append these bytes. sync: they are on disk when this returns."""
        with naming(self.path):
            if self._torn:
                self._cut()
            self._torn = True
            try:
                left = memoryview(data)
                while left:
                    left = left[self._file.write(left) or 0 :]
                if sync:
                    os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # The next append tries again.
                    self._cut()
                raise
            self._end, self._torn = self._end + len(data), False

    def close(self) -> None:
        """Close the file."""
        with naming(self.path):
            self._file.close()

    def _cut(self) -> None:
        os.ftruncate(self._file.fileno(), self._end)
        self._torn = False


def parse_json(data: bytes | str) -> Any:
    """Return the value of JSON; raise ValueError, and no other error, if it is none."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def how_to_mend(path: str | Path) -> str:
    """Say how a file that cannot be read becomes whole."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if is_pointer(file.read(POINTER_BYTES + 1)):
            return POINTED
    return "copy it again"


def is_pointer(data: bytes) -> bool:
    """Tell if these are all bytes of a file that a clone without Git LFS has in place
    of a large one."""
    return data.startswith(POINTER) and len(data) <= POINTER_BYTES


def write_json(value: Mapping[str, Any], path: str | Path) -> None:
    """Write JSON as `write_text` does."""
    write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", Path(path))


def write_text(text: str, path: Path) -> None:
    """Replace a file atomically: a reader sees the old text or the new one."""
    with whole(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield the name of a file beside this one, to be written in the block.

    At its end the file has its name, in place of one that had it, and both are on the
    disk. A failure leaves nothing of it."""
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        with naming(path):
            yield scratch
            sync_path(scratch)
            scratch.replace(path)
            sync_path(path.parent)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def sync_path(path: Path) -> None:
    """Force to disk the contents of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(file: int | IO[Any], path: Path) -> bool:
    """Hold an open file for this process alone; return False if another one holds it.
    Raise ConfigError if its file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be locked ({error.strerror}), as on some network file "
            f"systems; give a folder on a local disk of this machine"
        ) from error
    return True


def json_number(value: float | None) -> float | None:
    """Return None (JSON's null) for NaN and infinities, which JSON cannot write."""
    return value if value is not None and math.isfinite(value) else None


def require_writable(folder: Path, option: str) -> None:
    """Raise ConfigError, naming the option, unless files can be made in this folder.

    Call it before long work whose result is written there."""
    if not folder.is_dir():
        raise ConfigError(f"{option} {folder} is not a folder; make it first")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option} {folder}: no file can be made there ({error.strerror}); make it "
            f"writable, or give another folder"
        ) from error
