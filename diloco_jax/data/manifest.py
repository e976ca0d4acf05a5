"""Manifests: the digests of a large file, computed once and kept beside the file.

`tokens.npy` has `tokens.npy.manifest`; a file of text has one too. With a manifest a
start does not read the whole file. It compares the size and the time of the last
change. If the time differs, because the file is a copy or was written to, it also
compares a few chunks that it draws at random. The digest of the file is that of its
chunks' digests: so one chunk can be checked alone, and all cores share the work of
making a manifest, whose progress is shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from rich.console import Console

from diloco_jax import files, machine
from diloco_jax.config import ConfigError
from diloco_jax.observability.terminal import bar

logger = logging.getLogger(__name__)


class ReadProgress:
    """A context manager that tells how much of `total` bytes is read, unless that is
    less than `told_from`. Any thread may call `advance`."""

    def __init__(self, what: str, total: int, *, told_from: int) -> None:
        """what: the beginning of every line, which also names the remedy."""
        self._what, self._total = what, total
        self._told = total >= told_from
        self._lock = threading.Lock()
        self._done = 0
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> ReadProgress:
        if self._told:
            # Seen without logging, too: a command may read before it has set that up.
            logger.warning("%s (%.1f GB)", self._what, self._total / 1e9)
            doing = bar(Console(stderr=True), "reading")
            self._report = self._shown.enter_context(doing)
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.close()

    def advance(self, nbytes: int) -> None:
        """Note that so many more bytes are read."""
        if not self._told:
            return
        with self._lock:
            self._done += nbytes
            self._report(self._done / self._total)


SUFFIX = ".manifest"
MAPPED_FROM = 1 << 24
"""Bytes from which a file is mapped. Mapped files stay open, and those are limited."""
TOLD_FROM = 1 << 30
"""Bytes from which a reading is told."""
CHUNK_BYTES = 1 << 22
LOCK_POLL_S = 1.0
LOCK_WAIT_S = 600.0
"""Longest wait for another process that makes a manifest, beside what its reading takes
at `SLOWEST_BYTES_PER_S`."""
SLOWEST_BYTES_PER_S = 5e7
"""Rate below which that reading counts as stuck."""
Check = Callable[[Path, np.ndarray, slice], int]
"""Returns the largest value of a part of a file's row; raises ConfigError, naming the
file, for values that may not be there."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one file of tokens or text."""

    size: int
    """Bytes of the file."""
    changed_ns: int
    """Time of the file's last change, in nanoseconds, where the manifest was made."""
    dtype: str
    tokens: int
    largest: int
    chunks: tuple[str, ...]
    """Digests of the values' chunks of `CHUNK_BYTES`, each of 16 hex digits."""

    @property
    def digest(self) -> bytes:
        """Digest of the file's type and contents."""
        head = f"{self.dtype}:{self.tokens}:"
        return hashlib.sha256((head + "".join(self.chunks)).encode()).digest()


def manifest_path(path: Path) -> Path:
    """Return the place of a file's manifest."""
    return path.with_name(path.name + SUFFIX)


def is_large(path: Path) -> bool:
    """Tell if a file is mapped, and has a manifest."""
    return path.stat().st_size >= MAPPED_FROM


def described(
    path: Path, row: np.ndarray, check: Check, samples: int | None
) -> Manifest:
    """Return the manifest of a file, or the same facts about a file that has none.

    Args:
      row: the file's values.
      samples: number of chunks to compare if the file's time of change is not the
        manifest's; a difference raises ConfigError. None: the file is read again.
    """
    if not is_large(path):
        return _facts(path, row, check)
    found = find(path)
    if found is not None and is_unchanged(path, found):
        return found
    if found is not None and samples is not None:
        require_same(path, found, row, samples)
        return found
    with _alone(path):
        # Who had it before may have made the manifest.
        found = find(path)
        if found is not None and is_unchanged(path, found):
            return found
        return make(path, row, check)


def make(path: Path, row: np.ndarray, check: Check) -> Manifest:
    """Read and check the whole file, on all cores, and write its manifest beside it;
    warn if the folder cannot be written. Raise ConfigError, naming the file, for values
    that may not be there."""
    made = _facts(path, row, check)
    try:
        files.write_text(msgspec.json.encode(made).decode() + "\n", manifest_path(path))
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): every start on this machine reads all of %s; "
            "make the manifest where the file is made, with `diloco manifest`",
            manifest_path(path),
            error.strerror,
            path.name,
        )
    return made


def find(path: Path) -> Manifest | None:
    """Read a file's manifest; None if it has none. Raise ConfigError if it does not
    read."""
    try:
        text = manifest_path(path).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"data.paths: {manifest_path(path)} is no manifest ({error}); delete it, "
            f"and `diloco manifest {path}` makes it anew"
        ) from error


def is_unchanged(path: Path, manifest: Manifest) -> bool:
    """Tell if size and time of change are those of the manifest."""
    status = path.stat()
    return (manifest.size, manifest.changed_ns) == (status.st_size, status.st_mtime_ns)


def require_same(
    path: Path,
    manifest: Manifest,
    tokens: np.ndarray,
    samples: int,
    draw: Callable[[range, int], list[int]] = random.sample,
) -> None:
    """Raise ConfigError, with both values, if the file differs from its manifest.

    Compares the size, the type, and the digests of `samples` chunks drawn by `draw`.
    """
    seen = {
        "size": path.stat().st_size,
        "dtype": tokens.dtype.str,
        "tokens": len(tokens),
    }
    for name, here in seen.items():
        if here != getattr(manifest, name):
            raise _stale(path, name, here, getattr(manifest, name))
    parts = _parts(tokens)
    for number in draw(range(len(parts)), min(samples, len(parts))):
        digest = _digest(tokens[parts[number]])
        if digest != manifest.chunks[number]:
            at = f"digest of tokens {parts[number].start} to {parts[number].stop}"
            raise _stale(path, at, digest, manifest.chunks[number])


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time read a file for its manifest, also on other machines
    that share it, where the file system has locks for readers. A process that ends,
    however it does, frees its lock. Raise ConfigError if one holds it for too long."""
    told, began = False, time.monotonic()
    within_s = LOCK_WAIT_S + path.stat().st_size / SLOWEST_BYTES_PER_S
    with path.open("rb") as file:
        while not _is_locked(file):
            waited_s = time.monotonic() - began
            if waited_s >= within_s:
                raise ConfigError(
                    f"data.paths: another process has been reading {path} for its "
                    f"manifest for {waited_s:.0f} s, and {within_s:.0f} s are enough "
                    f"for its size; end that process, on whatever machine it is, or "
                    f"make the manifest before the run with `diloco manifest {path}`"
                )
            if not told:
                logger.warning(
                    "waiting for another process that reads %s, for %.0f s at most",
                    path,
                    within_s,
                )
            told = True
            time.sleep(LOCK_POLL_S)
        yield


def _is_locked(file: BinaryIO) -> bool:
    """Lock a file, where its file system has locks; tell if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("%s cannot be locked: %s", file.name, error)
    return True


def _facts(path: Path, row: np.ndarray, check: Check) -> Manifest:
    status = path.stat()
    progress = ReadProgress(
        f"reading {path} once, for its manifest; `diloco manifest {path}` does it "
        f"before a run, or before the file is copied",
        row.nbytes,
        told_from=TOLD_FROM,
    )

    def read(part: slice) -> tuple[str, int]:
        found = _digest(row[part]), check(path, row, part)
        progress.advance(row[part].nbytes)
        return found

    with progress, ThreadPoolExecutor(machine.cores()) as pool:
        chunks = list(pool.map(read, _parts(row)))
    return Manifest(
        size=status.st_size,
        changed_ns=status.st_mtime_ns,
        dtype=row.dtype.str,
        tokens=len(row),
        largest=max((largest for _, largest in chunks), default=0),
        chunks=tuple(digest for digest, _ in chunks),
    )


def _parts(tokens: np.ndarray) -> list[slice]:
    step = CHUNK_BYTES // tokens.dtype.itemsize
    starts = range(0, len(tokens), step)
    return [slice(start, min(start + step, len(tokens))) for start in starts]


def _digest(chunk: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(chunk).data).hexdigest()[:16]


def _stale(path: Path, what: str, here: object, then: object) -> ConfigError:
    return ConfigError(
        f"data.paths: {path} is not the file of {manifest_path(path).name}: {what} is "
        f"{here} here, {then} there; bring back the file, or, if it is to be this one, "
        f"begin a new run after `diloco manifest {path}`"
    )
