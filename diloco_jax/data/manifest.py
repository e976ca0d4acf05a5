"""Manifests: the digests of a large file of tokens, made once and kept beside it.

`tokens.npy` has `tokens.npy.manifest`. Who has both need not read the file: its size is
compared and, where its time of change is another one (it is a copy, or was written to),
a few chunks drawn anew at every start. The digest of the file is that of its chunks'
digests, so that a chunk is checked alone and all cores make a manifest.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from diloco_jax import files, machine
from diloco_jax.config import ConfigError

logger = logging.getLogger(__name__)

SUFFIX = ".manifest"
CHUNK_BYTES = 1 << 22
MOST = 2**31 - 1
"""Highest token."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one file of tokens."""

    size: int
    """Bytes of the file."""
    changed_ns: int
    """Time of the file's last change, in nanoseconds, where the manifest was made."""
    dtype: str
    tokens: int
    largest: int
    chunks: tuple[str, ...]
    """Digests of the tokens' chunks of `CHUNK_BYTES`, each of 16 hex digits."""

    @property
    def digest(self) -> bytes:
        """Digest of the file's type and contents."""
        head = f"{self.dtype}:{self.tokens}:"
        return hashlib.sha256((head + "".join(self.chunks)).encode()).digest()


def manifest_path(path: Path) -> Path:
    """Return the place of a file's manifest."""
    return path.with_name(path.name + SUFFIX)


def make(path: Path, tokens: np.ndarray) -> Manifest:
    """Read and check every token, on all cores. Raise ConfigError, naming the file, if
    it has a negative or too large one."""
    status = path.stat()
    parts = _parts(tokens)
    with ThreadPoolExecutor(machine.cores()) as pool:
        read = list(pool.map(lambda part: _read(path, tokens[part]), parts))
    return Manifest(
        size=status.st_size,
        changed_ns=status.st_mtime_ns,
        dtype=tokens.dtype.str,
        tokens=len(tokens),
        largest=max((largest for _, largest in read), default=0),
        chunks=tuple(digest for digest, _ in read),
    )


def keep(path: Path, manifest: Manifest) -> None:
    """Write the manifest beside its file, unless that folder takes no files."""
    try:
        files.write_text(
            msgspec.json.encode(manifest).decode() + "\n", manifest_path(path)
        )
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): every start on this machine reads all of %s; "
            "make the manifest where the file is made, with `diloco manifest`",
            manifest_path(path),
            error.strerror,
            path.name,
        )


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
    """Tell if the file is, for all that the system says, the one that was read."""
    status = path.stat()
    return (manifest.size, manifest.changed_ns) == (status.st_size, status.st_mtime_ns)


def require_same(
    path: Path,
    manifest: Manifest,
    tokens: np.ndarray,
    samples: int,
    draw: Callable[[range, int], list[int]] = random.sample,
) -> None:
    """Raise ConfigError, with both values, if the file is not the manifest's: compare
    size, type, and `samples` chunks that are drawn."""
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
        digest, _ = _read(path, tokens[parts[number]])
        if digest != manifest.chunks[number]:
            at = f"digest of tokens {parts[number].start} to {parts[number].stop}"
            raise _stale(path, at, digest, manifest.chunks[number])


def _parts(tokens: np.ndarray) -> list[slice]:
    step = CHUNK_BYTES // tokens.dtype.itemsize
    starts = range(0, len(tokens), step)
    return [slice(start, min(start + step, len(tokens))) for start in starts]


def _read(path: Path, part: np.ndarray) -> tuple[str, int]:
    """Return the digest of a chunk and its largest token."""
    chunk = np.ascontiguousarray(part)
    low, high = int(chunk.min()), int(chunk.max())
    if low < 0 or high > MOST:
        wrong = low if low < 0 else high
        raise ConfigError(
            f"data.paths: {path} has {wrong} as a token; they are from 0 to {MOST}"
        )
    return hashlib.sha256(chunk.data).hexdigest()[:16], high


def _stale(path: Path, what: str, here: object, then: object) -> ConfigError:
    return ConfigError(
        f"data.paths: {path} is not the file of {manifest_path(path).name}: {what} is "
        f"{here} here, {then} there; bring back the file, or, if it is to be this one, "
        f"begin a new run after `diloco manifest {path}`"
    )
