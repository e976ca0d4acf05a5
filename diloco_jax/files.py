"""Paths, files that are whole at any moment, sealed files, and access to folders.

Paths mean the same in any folder, and errors name their file. A folder is local, or in
a bucket: gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.

Snapshots and encoded publishes are sealed files: a JSON header and bulk bytes under one
checksum. A local file appears under its name once it is whole and on disk. An object of
a bucket appears when it is closed. Layout: a fixed header (magic, length and xxh3_64 of
the JSON), the JSON object, the bytes, and their xxh3_128. The digest is made while the
bytes are written.

Every command imports this file at its start, so numpy and etils wait for who has arrays
or a bucket.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import mmap
import os
import struct
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from xxhash import xxh3_64_intdigest, xxh3_128

from diloco_jax.errors import UNNAMEABLE, ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt
    from etils.epath import Path as Folder

    Buffer = npt.NDArray[Any] | bytes | bytearray | memoryview

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


# ---- sealed files ----------------------------------------------------------------

_HEAD = struct.Struct("<8sIQ")
_MAGIC = b"diloco-1"
DIGEST_BYTES = 16
BLOCK_BYTES = 1 << 20
"""Bytes that are read or written and hashed at a time: a core's own cache has them."""


class SealedError(ConfigError):
    """A sealed file cannot be read, or is not as it was written."""


def digest_of(payload: Buffer) -> str:
    """Return the hex digest that `write_sealed` returns for these bytes alone."""
    return xxh3_128(_bytes_of(payload)).hexdigest()


def write_sealed(
    path: Folder | Path, header: Mapping[str, Any], buffers: Iterable[Buffer]
) -> str:
    """Write a file; return the hex digest of its bytes. A local file is on disk under
    its name when this returns, and a failure leaves nothing of it."""
    if is_bucket(str(path)):
        from etils import epath

        with epath.Path(path).open("wb") as file:
            return _write_all(file, header, buffers)
    with whole(Path(path)) as scratch, scratch.open("wb") as file:
        return _write_all(file, header, buffers)


def read_sealed_header(path: Folder | Path) -> dict[str, Any]:
    """Return the header of a file. Raises SealedError."""
    with _open(path) as file:
        return _read_header(file, path)


def read_sealed(
    path: Folder | Path,
    into: Iterable[npt.NDArray[Any]] | Callable[[dict[str, Any]], npt.NDArray[Any]],
) -> tuple[dict[str, Any], str]:
    """Read a file into these arrays, or into one that is made from its header.

    Returns the header, and the digest that `write_sealed` returned. The file is read
    once.
    Raises SealedError if it is damaged; the contents of the arrays then mean nothing.
    """
    with _open(path) as file:
        header = _read_header(file, path)
        digest = xxh3_128()
        for array in [into(header)] if callable(into) else into:
            view = _bytes_of(array)
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                if _read_into(file, block) != len(block):
                    raise SealedError(f"{path} ends before its last byte")
                digest.update(block)
                _forget(file)
        written = file.read(DIGEST_BYTES + 1)
    _require_digest(path, digest.digest(), written)
    return header, digest.hexdigest()


def map_sealed(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a local file, and its bytes mapped, unchecked; they stay
    readable after the file is deleted.

    The system keeps the parts that are read in memory while there is room. Raises
    SealedError.
    """
    with _open(path) as file:
        header = _read_header(file, path)
        start = file.tell()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return header, memoryview(mapped)[start:-DIGEST_BYTES]


def _write_all(
    file: BinaryIO, header: Mapping[str, Any], buffers: Iterable[Buffer]
) -> str:
    head = json.dumps(header, separators=(",", ":")).encode()
    file.write(_HEAD.pack(_MAGIC, len(head), xxh3_64_intdigest(head)) + head)
    digest = xxh3_128()
    for buffer in buffers:
        view = _bytes_of(buffer)
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            digest.update(block)
            file.write(block)
    file.write(digest.digest())
    return digest.hexdigest()


def _open(path: Folder | Path) -> BinaryIO:
    try:
        if is_bucket(str(path)):
            from etils import epath

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
    bytes at a time than they are asked for, and some only bytes of their own."""
    into = getattr(file, "readinto", None)
    filled = 0
    while filled < len(block):
        rest = block[filled:]
        if into is not None:
            count = into(rest)
        else:
            found = file.read(len(rest))
            count = len(found)
            rest[:count] = found
        if not count:
            break
        filled += count
    return filled


def _forget(file: BinaryIO) -> None:
    """Let the system forget what was read of a local file: it would fill its memory
    with a second copy, and spend more time on finding room than the reading takes."""
    if hasattr(os, "posix_fadvise") and isinstance(file, io.BufferedReader):
        os.posix_fadvise(file.fileno(), 0, file.tell(), os.POSIX_FADV_DONTNEED)


def _bytes_of(buffer: Buffer) -> memoryview:
    if isinstance(buffer, bytes | bytearray | memoryview):
        return memoryview(buffer).cast("B")
    return buffer.ravel().view("u1").data


# ---- access to folders -----------------------------------------------------------

PASSING_CODES = (408, 429)
"""HTTP status codes of errors that pass; those from 500 on pass, too."""
PASSING_WORDS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""Words in tensorstore's messages about errors that pass."""
PASSING_MODULES = ("aiohttp.", "requests.", "urllib3.")
"""Packages whose errors concern the connection to the bucket."""
PASSING_OF_S3 = ("ConnectionError", "HTTPClientError")
"""Bases of botocore's errors that do; it has others, which do not pass."""


def require_access(folder: Folder) -> None:
    """Make the folder, and write and remove a file in it.

    Raises ConfigError, naming the account, if that is refused; StorageAway if the
    bucket does not answer.
    """
    probe = folder / f"probe-{uuid.uuid4().hex}"
    try:
        # To make a folder in a bucket of S3 would make one that is missing.
        if _is_s3(folder) and not type(folder)(f"{S3}{_bucket(folder)}").exists():
            raise FileNotFoundError("there is no such bucket, or it may not be listed")
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("may be deleted")
        probe.unlink()
        if is_bucket(str(folder)) and not _is_s3(folder):
            # orbax looks at the bucket itself before it lists or deletes objects.
            from google.cloud import storage

            storage.Client().get_bucket(_bucket(folder))
    except Exception as error:
        # Each bucket backend has its own error classes.
        raise_if_away(folder, error)
        raise ConfigError(cannot_write(folder, error)) from error


def cannot_write(folder: Folder, error: Exception) -> str:
    """Return a message with the folder, the account, the reason and the remedy."""
    if isinstance(error, ImportError):
        return (
            f"checkpoints in {folder} need a package that is not here ({error}); "
            f"`pip install -e '.[{_extra(folder)}]'`, or give a local folder as "
            f"--checkpoints"
        )
    return (
        f"cannot write checkpoints to {folder}{_identity(folder)}: {_reason(error)}. "
        f"{_remedy(folder)}, or give another folder as --checkpoints"
    )


def cannot_read(folder: Folder, error: Exception) -> str:
    """Return a message with the folder, the account, the reason and the remedy."""
    if isinstance(error, ImportError):
        return (
            f"{folder} needs a package that is not here ({error}); `pip install -e "
            f"'.[{_extra(folder)}]'`, or copy it to a local folder and give that"
        )
    role = "roles/storage.objectViewer"
    if _is_s3(folder):
        role = "s3:ListBucket and s3:GetObject"
    return (
        f"cannot read {folder}{_identity(folder)}: {_reason(error)}. Grant {role} on "
        f"bucket {_bucket(folder)} to that account"
    )


def raise_if_away(folder: Folder, error: BaseException) -> None:
    """Raise StorageAway if the error is one that passes."""
    if is_bucket(str(folder)) and _passes(error):
        raise StorageAway(
            f"{folder} does not answer: {_reason(error)}; start the command again, as "
            f"a supervisor does"
        ) from error


def _passes(error: BaseException | None) -> bool:
    while error is not None:
        number = _http_status(error)
        if number in PASSING_CODES or number >= 500:
            return True
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        kind = type(error)
        if kind.__module__.startswith(PASSING_MODULES) or "Transport" in kind.__name__:
            return True
        bases = [b for b in kind.__mro__ if b.__module__.startswith("botocore.")]
        if any(base.__name__ in PASSING_OF_S3 for base in bases):
            return True
        if any(word in str(error) for word in PASSING_WORDS):
            return True
        error = error.__cause__
    return False


def _reason(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _http_status(error: BaseException) -> int:
    """Return the status of the answer that an error is about; 0 if it has none."""
    code = str(getattr(error, "code", "") or "")
    if code.isdecimal():
        return int(code)
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def _is_s3(folder: Folder) -> bool:
    return str(folder).startswith(S3)


def _extra(folder: Folder) -> str:
    """Return the extra of this package that has what the folder needs."""
    return "s3" if _is_s3(folder) else "gcs"


def _bucket(folder: Folder) -> str:
    return str(folder).split("/")[2]


def _identity(folder: Folder) -> str:
    if not is_bucket(str(folder)):
        return f" as user {os.getuid()}"
    if _is_s3(folder):
        given = (os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"))
        known = next(filter(None, given), "")
    else:
        path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
        try:
            known = json.loads(Path(path).read_bytes()).get("client_email", "")
        except (OSError, ValueError):
            known = ""
    return f" as {known or 'the default account of this machine'}"


def _remedy(folder: Folder) -> str:
    if not is_bucket(str(folder)):
        return "Make it writable"
    needed = "roles/storage.objectUser and roles/storage.legacyBucketReader"
    log_in = "gcloud auth application-default login"
    if _is_s3(folder):
        needed = "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject"
        log_in = "aws configure"
    return (
        f"Grant {needed} on bucket {_bucket(folder)} to that account, or log in with "
        f"another (`{log_in}`)"
    )
