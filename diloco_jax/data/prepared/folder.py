"""Where a prepared folder lies: on this machine, or in a bucket of Google Cloud.

Rows are read by ArrayRecord's own reader, which knows both. Everything else that a
start reads of a folder is here.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from etils.epath import Path as BucketPath

from diloco_jax import storage
from diloco_jax.data.tokenizers.beside import BESIDE
from diloco_jax.errors import ConfigError
from diloco_jax.files import is_bucket

SCHEME = "gs://"
ASKERS = 16
"""Threads that ask for sizes, since a mounted bucket takes its time for each."""


class Folder(Protocol):
    """A folder's files by name. `str` of it is its path."""

    def has(self, name: str) -> bool:
        """Tell if there is such a file."""

    def sizes(self, names: Sequence[str]) -> list[int | str]:
        """Return the bytes of each file, or what is wrong with it."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of a file, as far as there are any."""

    def path(self, name: str) -> str:
        """Return the path of a file."""

    def at_hand(self, name: str) -> Path:
        """Return a tokenizer's file on this machine, with those that belong to it."""


def folder_at(path: str | Path) -> Folder:
    """Return the folder of a path; raise ConfigError for a bucket that no library here
    reads rows of."""
    if not is_bucket(str(path)):
        return LocalFolder(Path(path))
    if not str(path).startswith(SCHEME):
        raise ConfigError(
            f"data.paths: {path} is a bucket, and rows are read of {SCHEME} alone; "
            f"mount it (mount-s3, rclone mount) and give the folder, or copy it"
        )
    return BucketFolder(str(path).rstrip("/"))


class LocalFolder:
    """A folder of this machine, or a mounted one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def has(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def sizes(self, names: Sequence[str]) -> list[int | str]:
        def size(name: str) -> int | str:
            try:
                return (self._folder / name).stat().st_size
            except OSError as error:
                return str(error.strerror)

        with ThreadPoolExecutor(ASKERS) as pool:
            return list(pool.map(size, names))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def at_hand(self, name: str) -> Path:
        return self._folder / name


class BucketFolder:
    """A folder gs://BUCKET/FOLDER. Methods raise ConfigError, naming the account, where
    it may not be read, and StorageAway where the bucket does not answer."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return self._folder

    def has(self, name: str) -> bool:
        try:
            with self._bucket() as bucket:
                return bool(bucket.info(self.path(name))["type"] == "file")
        except FileNotFoundError:
            return False

    def sizes(self, names: Sequence[str]) -> list[int | str]:
        with self._bucket() as bucket:
            listed = bucket.ls(self._folder, detail=True, refresh=True)
        found = {entry["name"].rpartition("/")[2]: entry["size"] for entry in listed}
        return [found.get(name, "No such object") for name in names]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._bucket() as bucket:
            return bytes(bucket.cat_file(self.path(name), start=start, end=stop))

    def path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def at_hand(self, name: str) -> Path:
        return Path(_copied(self._folder, name).name, name)

    @contextlib.contextmanager
    def _bucket(self) -> Iterator[Any]:
        there = BucketPath(self._folder)
        try:
            import fsspec

            yield fsspec.filesystem(SCHEME.removesuffix("://"))
        except FileNotFoundError:
            raise
        except Exception as error:  # A bucket's library has its own error classes.
            storage.raise_if_away(there, error)
            raise ConfigError(storage.cannot_read(there, error)) from error


@functools.cache
def _copied(folder: str, name: str) -> tempfile.TemporaryDirectory[str]:
    """Copy a tokenizer's files to this machine, for as long as the process lives."""
    there, here = BucketFolder(folder), tempfile.TemporaryDirectory()
    for file in (name, *BESIDE):
        if file == name or there.has(file):
            Path(here.name, file).write_bytes(there.read(file))
    return here
