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
import hashlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from diloco_jax import files, machine
from diloco_jax.config import ConfigError
from diloco_jax.observability.terminal import bar

logger = logging.getLogger(__name__)


SUFFIX = ".manifest"
MAPPED_FROM = 1 << 24
"""Bytes from which a file is mapped. Mapped files stay open, and those are limited."""
TOLD_FROM = 1 << 30
"""Bytes from which a reading is told."""
CHUNK_BYTES = 1 << 22
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
    path: Path, manifest: Manifest, tokens: np.ndarray, samples: int
) -> None:
    """Raise ConfigError, with both values, if the file differs from its manifest.

    Compares the size, the type, and the digests of `samples` chunks drawn at random.
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
    for number in random.sample(range(len(parts)), min(samples, len(parts))):
        digest = _digest(tokens[parts[number]])
        if digest != manifest.chunks[number]:
            at = f"digest of tokens {parts[number].start} to {parts[number].stop}"
            raise _stale(path, at, digest, manifest.chunks[number])


def _facts(path: Path, row: np.ndarray, check: Check) -> Manifest:
    status, parts = path.stat(), _parts(row)

    def read(part: slice) -> tuple[str, int]:
        return _digest(row[part]), check(path, row, part)

    chunks = list[tuple[str, int]]()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(machine.cores()))
        report = None
        if row.nbytes >= TOLD_FROM:
            # Seen without logging, too: a command may read before it has set that up.
            logger.warning(
                "reading %s once, for its manifest; `diloco manifest %s` does it "
                "before a run, or before the file is copied (%.1f GB)",
                path,
                path,
                row.nbytes / 1e9,
            )
            report = stack.enter_context(bar(Console(stderr=True), "reading"))
        for chunk in pool.map(read, parts):
            chunks.append(chunk)
            if report is not None:
                report(len(chunks) / len(parts))
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
