"""Sealed files: a JSON header and bulk bytes under one checksum.

Snapshots and encoded publishes are written in this form. A local file appears under its
name once it is whole and on disk. An object of a bucket appears when it is closed.

Layout: a fixed header (magic, length and xxh3_64 of the JSON), the JSON object, the
bytes, and their xxh3_128. The digest is made while the bytes are written.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
from etils import epath
from etils.epath import Path as Folder
from xxhash import xxh3_64_intdigest, xxh3_128

from diloco_jax.errors import ConfigError
from diloco_jax.paths import is_bucket, naming

_HEAD = struct.Struct("<8sIQ")
_MAGIC = b"diloco-1"
DIGEST_BYTES = 16
BLOCK_BYTES = 8 << 20
"""Bytes that are written and hashed at a time."""
TEMPORARY = ".tmp"
"""Suffix of a local file that is not whole yet."""

Buffer = npt.NDArray[Any] | bytes | bytearray | memoryview


class SealedError(ConfigError):
    """A sealed file cannot be read, or is not as it was written."""


def digest_of(payload: Buffer) -> str:
    """Return the hex digest that `write` returns for these bytes alone."""
    return xxh3_128(_view(payload)).hexdigest()


def write(
    path: Folder | Path, header: Mapping[str, Any], buffers: Iterable[Buffer]
) -> str:
    """Write a file; return the hex digest of its bytes. A local file is on disk under
    its name when this returns, and a failure leaves nothing of it."""
    if is_bucket(str(path)):
        with epath.Path(path).open("wb") as file:
            return _write(file, header, buffers)
    final = Path(path)
    scratch = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        with naming(final), scratch.open("wb") as file:
            digest = _write(file, header, buffers)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(final)
        sync_path(final.parent)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return digest


def read_header(path: Folder | Path) -> dict[str, Any]:
    """Return the header of a file. Raises SealedError."""
    with _open(path) as file:
        return _read_header(file, path)


def read(
    path: Folder | Path,
    into: Iterable[npt.NDArray[Any]] | Callable[[dict[str, Any]], npt.NDArray[Any]],
) -> tuple[dict[str, Any], str]:
    """Read a file into these arrays, or into one that is made from its header.

    Returns the header, and the digest that `write` returned; the file is read once.
    Raises SealedError if it is damaged; the contents of the arrays then mean nothing.
    """
    with _open(path) as file:
        header = _read_header(file, path)
        digest = xxh3_128()
        for array in [into(header)] if callable(into) else into:
            view = _view(array)
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                if _read_into(file, block) != len(block):
                    raise SealedError(f"{path} ends before its last byte")
                digest.update(block)
        written = file.read(DIGEST_BYTES + 1)
    _require_digest(path, digest.digest(), written)
    return header, digest.hexdigest()


def check(path: Path) -> None:
    """Raise SealedError unless a local file is as it was written."""
    with _open(path) as file:
        _read_header(file, path)
        left = os.fstat(file.fileno()).st_size - file.tell() - DIGEST_BYTES
        digest = xxh3_128()
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
        _require_digest(path, digest.digest(), file.read())


def seal_of(file: BinaryIO) -> str:
    """Return what tells a whole file from another one of the same name: its length and
    the checksums of its header and of its bytes. Neither is read."""
    head = file.read(_HEAD.size)
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - DIGEST_BYTES))
    seal = f"{end}:{head.hex()}:{file.read(DIGEST_BYTES).hex()}"
    file.seek(0)
    return seal


def mapped(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a local file, and its bytes mapped, unchecked; they stay
    readable after the file is deleted.

    The system keeps the parts that are read in memory while there is room. Raises
    SealedError.
    """
    with _open(path) as file:
        header = _read_header(file, path)
        start = file.tell()
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return header, memoryview(whole)[start:-DIGEST_BYTES]


def sync_path(path: Path) -> None:
    """Force to disk the contents of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: BinaryIO, header: Mapping[str, Any], buffers: Iterable[Buffer]) -> str:
    head = json.dumps(header, separators=(",", ":")).encode()
    file.write(_HEAD.pack(_MAGIC, len(head), xxh3_64_intdigest(head)) + head)
    digest = xxh3_128()
    for buffer in buffers:
        view = _view(buffer)
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            digest.update(block)
            file.write(block)
    file.write(digest.digest())
    return digest.hexdigest()


def _open(path: Folder | Path) -> BinaryIO:
    try:
        if is_bucket(str(path)):
            return cast(BinaryIO, epath.Path(path).open("rb"))
        return Path(path).open("rb")
    except FileNotFoundError as error:
        raise SealedError(f"{path} is missing") from error


def _read_header(file: BinaryIO, path: Folder | Path) -> dict[str, Any]:
    raw = file.read(_HEAD.size)
    if len(raw) == _HEAD.size:
        magic, length, wanted = _HEAD.unpack(raw)
        if magic == _MAGIC:
            head = file.read(length)
            if xxh3_64_intdigest(head) == wanted:
                header: dict[str, Any] = json.loads(head)
                return header
    raise SealedError(f"{path} does not begin as a file of this format does")


def _require_digest(path: Folder | Path, found: bytes, written: bytes) -> None:
    if written != found:
        raise SealedError(
            f"{path} has checksum {found.hex()}, written as {written.hex()}"
        )


def _read_into(file: BinaryIO, block: memoryview) -> int:
    """Fill a block; return the bytes that were there. Files of buckets may give fewer
    bytes at a time than they are asked for."""
    filled = 0
    while filled < len(block):
        found = file.read(len(block) - filled)
        if not found:
            break
        block[filled : filled + len(found)] = found
        filled += len(found)
    return filled


def _view(buffer: Buffer) -> memoryview:
    if not isinstance(buffer, np.ndarray):
        return memoryview(buffer).cast("B")
    return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data
