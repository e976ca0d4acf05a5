"""Files of text or tokens as arrays, and the manifests of large ones.

A file is one document. Text is UTF-8, a byte a token; the mark with which some systems
begin a file (BOM) is no part of it. Tokens that were made beforehand are one row of
integers, as `numpy.save` writes it; their maker puts the separators into it. Large
files are mapped into memory.

A manifest has the digests of a large file, computed once and kept beside the file:
`tokens.npy` has `tokens.npy.manifest`. With it a start does not read the whole file. It
compares the size and the time of the last change. If the time differs, because the file
is a copy or was written to, it also compares a few chunks that it draws at random. The
digest of the file is that of its chunks' digests: so one chunk can be checked alone,
and all cores share the work of making a manifest, whose progress is shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from numpy.lib import format
from rich.console import Console

from diloco_jax import files, machine
from diloco_jax.config import ConfigError
from diloco_jax.data.documents import (
    BOM,
    MANIFEST_SUFFIX,
    SourceKind,
    is_large,
    require_text,
    unreadable,
)
from diloco_jax.observability.terminal import bar

logger = logging.getLogger(__name__)

TOLD_FROM = 1 << 30
"""Bytes from which a reading is told."""
CHUNK_BYTES = 1 << 22
LONGEST_REST = 3
"""Bytes of a character after its first."""
MOST = 2**31 - 1
"""Highest token."""


@dataclasses.dataclass(frozen=True)
class CorpusFile:
    """One file of text, uint8 [bytes], or of tokens, integers [tokens]; a large one is
    mapped.

    digested: its part of the corpus's digest: a small text itself, or a digest of type
    and contents.
    """

    values: np.ndarray
    digested: bytes
    largest: int = 255


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
    return path.with_name(path.name + MANIFEST_SUFFIX)


def read_file(path: Path, kind: SourceKind, samples: int | None = None) -> CorpusFile:
    """Read a small file of text; map any other, and check it once, which its manifest
    remembers.

    Args:
      samples: number of chunks to compare if the file's time of change is not the
        manifest's. None: the file is read again.

    Raises ConfigError, naming the file, if it is not what its kind says, or not its
    manifest's.
    """
    if kind is not SourceKind.TOKENS and not is_large(path):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise unreadable(error) from error
        require_text(data, path, 0)
        data = data.removeprefix(BOM)
        return CorpusFile(np.frombuffer(data, np.uint8), data)
    values = _opened(path, kind)
    if is_large(path):
        found = _known(path, values, samples) or make(path, kind)
    else:
        found = _facts(path, values, kind)
    if kind is not SourceKind.TOKENS and bytes(values[: len(BOM)]) == BOM:
        # The manifest is of the whole file.
        return CorpusFile(values[len(BOM) :], found.digest + BOM)
    return CorpusFile(values, found.digest, found.largest)


def make(path: Path, kind: SourceKind) -> Manifest:
    """Read and check the whole file, on all cores, and write its manifest beside it;
    warn if the folder cannot be written. Raise ConfigError, naming the file, for values
    that may not be there."""
    made = _facts(path, _opened(path, kind), kind)
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


def _known(path: Path, values: np.ndarray, samples: int | None) -> Manifest | None:
    """Return the manifest of a file, None if it has none or is to be read again."""
    found, status = find(path), path.stat()
    if found is None:
        return None
    if (found.size, found.changed_ns) != (status.st_size, status.st_mtime_ns):
        if samples is None:
            return None
        _require_same(path, found, values, samples)
    return found


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


def _require_same(
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


def _facts(path: Path, row: np.ndarray, kind: SourceKind) -> Manifest:
    status, parts = path.stat(), _parts(row)

    def read(part: slice) -> tuple[str, int]:
        return _digest(row[part]), _largest(path, row, kind, part)

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


def _opened(path: Path, kind: SourceKind) -> np.ndarray:
    """Return the values of a file, mapped if it is large."""
    if kind is not SourceKind.TOKENS:
        try:
            return np.memmap(path, np.uint8, mode="r")
        except OSError as error:
            raise unreadable(error) from error
    try:
        if is_large(path):
            tokens: np.ndarray = format.open_memmap(path, mode="r")
        else:
            with path.open("rb") as file:
                tokens = format.read_array(file, allow_pickle=False)
    except Exception as error:
        # numpy parses a header as Python, so errors are of many kinds.
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise ConfigError(
                f"data.paths: {path} is one file too many to be open at a time; join "
                f"some, or raise `ulimit -n`"
            ) from error
        raise ConfigError(
            f"data.paths: {path} cannot be read as an array of numpy ({error}); write "
            f"it with numpy.save"
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"data.paths: {path} has shape {tokens.shape} and type {tokens.dtype}; "
            f"tokens are one row of integers"
        )
    return tokens


def _largest(path: Path, values: np.ndarray, kind: SourceKind, part: slice) -> int:
    """Return the largest value of a part of a file. Raise ConfigError for a part that
    is no text, where a character counts to the part in which it begins, and for a
    negative or too large token."""
    if kind is not SourceKind.TOKENS:
        start, stop = (_begin_text(values, at) for at in (part.start, part.stop))
        require_text(values[start:stop].tobytes(), path, start)
    low, high = int(values[part].min()), int(values[part].max())
    if low < 0 or high > MOST:
        wrong = low if low < 0 else high
        raise ConfigError(
            f"data.paths: {path} has {wrong} as a token; they are from 0 to {MOST}"
        )
    return high


def _begin_text(text: np.ndarray, at: int) -> int:
    """Return the first place at or after `at` where a character begins.

    If no character begins within the next `LONGEST_REST` bytes, the text is not UTF-8:
    return `at`, or the end of the text if that is nearer.
    """
    if at == 0:
        return 0
    for place in range(at, min(at + LONGEST_REST + 1, len(text))):
        if text[place] & 0xC0 != 0x80:
            return place
    return at if at + LONGEST_REST < len(text) else len(text)


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
