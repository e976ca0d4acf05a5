"""The files of a corpus by name, the same on every machine, and what each one holds.

A file's name is the path relative to what was given. In a folder, files that hold no
documents are left out, and told; a file that is named by its own path is read or
refused.

A file is one document. Text is UTF-8, a byte a token; the mark with which some systems
begin a file (BOM) is no part of it. Tokens that were made beforehand are one row of
integers, as `numpy.save` writes it; their maker puts the separators into it. Large
files are mapped into memory. Such a file is read as a whole once, for its manifest
(`manifest.py`); after that, only what is trained on.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import dataclasses
import enum
import errno
import gzip
import logging
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib import format

from diloco_jax import files
from diloco_jax.config import ConfigError
from diloco_jax.data import manifest
from diloco_jax.files import is_bucket

logger = logging.getLogger(__name__)

# Not every installation has these, or they differ between builds, or they are tables
# and test data rather than text.
SKIPPED_FOLDERS = frozenset(
    (
        *("site-packages", "dist-packages", "__pycache__", "test", "tests"),
        *("encodings", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
    )
)
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")

PACKED = ".gz"
LINES_ENDINGS = (".jsonl", ".ndjson")
COLUMNS = (".csv", ".tsv")
MARKUP = (".html", ".htm", ".ipynb")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
ABOUT = ("readme", "license", "licence", "dataset_info", "dataset_dict")
"""Beginnings of the names of files that are about the data beside them."""
HEAD_BYTES = 1 << 16
"""Beginning of a file .json by which its kind is known."""
SHOWN = 12
"""Most endings of one kind that `inventory` names."""


class SourceKind(enum.StrEnum):
    """The contents of a file. Endings are compared without regard to case."""

    TEXT = enum.auto()
    """One document, UTF-8."""
    LINES = enum.auto()
    """A JSON object a line."""
    LIST = enum.auto()
    """A JSON list of objects."""
    TABLE = enum.auto()
    """Parquet."""
    TOKENS = enum.auto()
    """An array of numpy."""
    LEFT_OUT = "left out"
    """No documents, for all that its name or its beginning says."""


class SourcePath(NamedTuple):
    """A file that was found."""

    name: str
    path: pathlib.Path
    kind: SourceKind


def find_documents(
    paths: tuple[str, ...], field: str = "data.paths"
) -> list[SourcePath]:
    """Return all files, in order of the names; see `corpus.load_corpus`.

    Raises ConfigError, naming `field`, for a path that is missing or empty, for two
    files of one name, and if no file holds documents.
    """
    if not paths:
        return [SourcePath(*file, SourceKind.TEXT) for file in _library()]
    named = set(map(pathlib.Path, paths))
    found = [
        SourcePath(name, path, _kind(path, path in named, field))
        for name, path in _user_files(paths, field)
    ]
    if any(kind not in (SourceKind.TEXT, SourceKind.LEFT_OUT) for *_, kind in found):
        found = [
            file._replace(kind=SourceKind.LEFT_OUT)
            if file.kind is SourceKind.TEXT
            and file.path not in named
            and file.path.name.lower().startswith(ABOUT)
            else file
            for file in found
        ]
    if all(file.kind is SourceKind.LEFT_OUT for file in found):
        raise ConfigError(
            f"{field}: {', '.join(paths)} has no documents: {inventory(found)}; name a "
            f"file by its own path, or convert it to text, JSON lines or Parquet"
        )
    return found


def inventory(found: Iterable[tuple[str, object, str]]) -> str:
    """Say how many files of which endings there are of each kind. found: their names,
    anything, and their kinds."""
    counts = collections.Counter[tuple[str, str]]()
    for name, _, kind in found:
        last = pathlib.PurePath(name.lower()).name
        ending = pathlib.PurePath(last.removesuffix(PACKED)).suffix
        counts[kind, last if last.startswith(ABOUT) else ending or last] += 1
    said: dict[str, list[str]] = {}
    for (kind, ending), count in counts.most_common():
        said.setdefault(kind, []).append(f"{count:,} {ending}")
    return "; ".join(
        f"{kind}: {', '.join(some[:SHOWN])}{' and others' if some[SHOWN:] else ''}"
        for kind, some in sorted(said.items())
    )


def is_packed(name: str) -> bool:
    """Tell if a file is compressed with gzip."""
    return name.lower().endswith(PACKED)


def _kind(path: pathlib.Path, named: bool, field: str) -> SourceKind:
    """Return what a file holds. named: by its own path, so that it is not left out;
    ConfigError if it has to be, with the remedy."""
    name = path.name.lower()
    ending = pathlib.PurePath(name.removesuffix(PACKED)).suffix
    if ending in LINES_ENDINGS:
        return SourceKind.LINES
    if name.endswith(".parquet"):
        return SourceKind.TABLE
    if name.endswith(TOKENS_SUFFIX):
        return SourceKind.TOKENS
    if ending == ".json" and (named or not name.startswith(ABOUT)):
        kind = _kind_of_json(path)
        wrong = "has neither a JSON list nor a JSON object a line"
    elif ending in COLUMNS:
        kind, wrong = SourceKind.LEFT_OUT, "is a table of plain text"
    elif ending in PICTURES:
        kind, wrong = SourceKind.LEFT_OUT, "is a picture, which a document names"
    elif (ending in MARKUP or ending == ".json") and not named:
        return SourceKind.LEFT_OUT
    else:
        return SourceKind.TEXT
    if named and kind is SourceKind.LEFT_OUT:
        raise ConfigError(
            f"{field}: {path} {wrong}; write its documents as JSON lines or Parquet, "
            f"or name it .txt if they are its bytes as they stand"
        )
    return kind


def _kind_of_json(path: pathlib.Path) -> SourceKind:
    """Return LIST or LINES by the beginning of a file; LEFT_OUT if that is of an object
    over several lines."""
    opened = gzip.open if is_packed(path.name) else open
    head = b""
    with contextlib.suppress(OSError, EOFError, zlib.error), opened(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    first, ended, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if first.startswith(b"["):
        return SourceKind.LIST
    whole = not ended or first.rstrip().endswith(b"}")
    return SourceKind.LINES if whole or first[:1] != b"{" else SourceKind.LEFT_OUT


def encoded(name: str, path: pathlib.Path, field: str = "data.paths") -> bytes:
    """Return the bytes of a name; raise ConfigError if it is not UTF-8."""
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{field}: the name of {os.fsencode(path)!r} is not UTF-8, and the "
            f"split goes by names; rename it"
        ) from error


def unreadable(error: OSError, field: str = "data.paths") -> ConfigError:
    """Return the error of a file or folder that cannot be read."""
    return ConfigError(
        f"{field}: {error.filename} cannot be read ({error.strerror}); check its "
        f"permissions"
    )


def _library() -> Iterator[tuple[str, pathlib.Path]]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for name, path in _walk(root, skipped=SKIPPED_FOLDERS):
        if path.suffix == ".py" and not path.name.startswith(SKIPPED_PREFIXES):
            yield name, path


def _user_files(paths: Iterable[str], field: str) -> Iterator[tuple[str, pathlib.Path]]:
    found: dict[str, pathlib.Path] = {}
    for given in paths:
        if is_bucket(given):
            raise ConfigError(
                f"{field}: {given} is a bucket; mount it (gcsfuse, mount-s3) and give "
                f"the folder, or copy it"
            )
        root = pathlib.Path(given)
        try:
            root.stat()
        except OSError as error:
            raise ConfigError(
                f"{field}: {given} does not exist ({error.strerror}); name a text "
                f"file or a folder"
            ) from error
        inside = _walk(root, field) if root.is_dir() else [(root.name, root)]
        if not any(path.stat().st_size for _, path in inside):
            raise ConfigError(
                f"{field}: {given} is empty; name a file or folder with text"
            )
        for name, path in inside:
            if name in found and found[name].resolve() != path.resolve():
                raise ConfigError(
                    f"{field}: {found[name]} and {path} are both called {name!r}; "
                    f"rename one, or give the folder that contains both"
                )
            found[name] = path
    yield from sorted(found.items())


def _walk(
    root: pathlib.Path, field: str = "data.paths", skipped: frozenset[str] = frozenset()
) -> list[tuple[str, pathlib.Path]]:
    """Return the regular files below root with relative names, in order of the names;
    neither hidden folders nor links to folders are entered."""

    def refuse(error: OSError) -> None:
        raise unreadable(error, field) from error

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if f not in skipped and f[0] != "."]
        for path in (pathlib.Path(folder, name) for name in folders):
            if path.is_symlink():
                logger.warning(
                    "%s: %s is a link to a folder, which is not entered; name it as a "
                    "path of its own if it is meant",
                    field,
                    path,
                )
        for path in (pathlib.Path(folder, file) for file in names if file[0] != "."):
            if path.is_file() and not _is_manifest(path):
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def _is_manifest(path: pathlib.Path) -> bool:
    """Tell if a file is another one's manifest. Small files of text have none, so that
    names which end alike are documents."""
    if path.suffix != manifest.SUFFIX:
        return False
    described = path.with_suffix("")
    if described.suffix.lower() == TOKENS_SUFFIX:
        return True
    return described.is_file() and manifest.is_large(described)


LONGEST_REST = 3
"""Bytes of a character after its first."""
BOM = codecs.BOM_UTF8
CONVERTED = "convert it to UTF-8 or leave it out"
PACKED_BEGINNINGS = (b"\x1f\x8b", b"BZh", b"PK\3\4", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
BEGINNINGS = {
    (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE): ("it is UTF-32", CONVERTED),
    (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE): ("it is UTF-16", CONVERTED),
    PACKED_BEGINNINGS: ("it is compressed", "unpack it"),
    (b"\x93NUMPY",): ("it has tokens", "give it as data.paths"),
    (b"PAR1",): ("it is Parquet", "name it .parquet"),
    (b"%PDF-",): ("it is PDF", "convert it to text"),
}
"""Beginnings of files that are no text: the kind of file, and the remedy."""


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


def read_file(
    path: pathlib.Path, kind: SourceKind, samples: int | None = None
) -> CorpusFile:
    """Read a small file of text; map any other, and check it once, which its manifest
    remembers. Raise ConfigError, naming the file, if it is not what its kind says.

    samples: see `manifest.described`.
    """
    if kind is not SourceKind.TOKENS and not manifest.is_large(path):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise unreadable(error) from error
        require_text(data, path, 0)
        data = data.removeprefix(BOM)
        return CorpusFile(np.frombuffer(data, np.uint8), data)
    values, check = _mapped(path, kind)
    found = manifest.described(path, values, check, samples)
    if check is _check_text and bytes(values[: len(BOM)]) == BOM:
        # The manifest is of the whole file.
        return CorpusFile(values[len(BOM) :], found.digest + BOM)
    return CorpusFile(values, found.digest, found.largest)


def make_manifest(path: pathlib.Path, kind: SourceKind) -> manifest.Manifest:
    """Read the whole file and write its manifest, even if it has one."""
    return manifest.make(path, *_mapped(path, kind))


def _mapped(path: pathlib.Path, kind: SourceKind) -> tuple[np.ndarray, manifest.Check]:
    if kind is SourceKind.TOKENS:
        return _open_tokens(path), _check_tokens
    try:
        return np.memmap(path, np.uint8, mode="r"), _check_text
    except OSError as error:
        raise unreadable(error) from error


def require_text(
    data: bytes, path: str | pathlib.Path, at: int, field: str = "data.paths"
) -> None:
    """Raise ConfigError, naming file and remedy, if bytes from `at` on are no text."""
    if wrong := fault_of_text(data, at):
        raise ConfigError(f"{field}: {path} is not text: {'; '.join(wrong)}")


def fault_of_text(data: bytes, at: int) -> tuple[str, str] | None:
    """Say why the bytes of a file from `at` on are no text, and the remedy; None if
    they are."""
    if not at and files.is_pointer(data):
        return files.POINTED, "or leave it out"
    offset, problem = data.find(b"\0"), "a NUL byte"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if offset < 0 or error.start < offset:
            offset, problem = error.start, "a byte that is not UTF-8"
    if offset < 0:
        return None
    for marks, found in BEGINNINGS.items():
        if not at and data.startswith(marks):
            return found
    return f"{problem} at offset {at + offset}", CONVERTED


def _check_text(path: pathlib.Path, text: np.ndarray, part: slice) -> int:
    """Raise ConfigError unless a part is text; return its largest byte. A character
    counts to the part in which it begins."""
    start = _begin_text(text, part.start)
    require_text(text[start : _begin_text(text, part.stop)].tobytes(), path, start)
    return int(text[part].max(initial=0))


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


TOKENS_SUFFIX = ".npy"
MOST = 2**31 - 1
"""Highest token."""


class TokenRow:
    """Arrays one after the other, without a copy: like the result of
    `numpy.concatenate`, for `len` and slices alone."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def __getitem__(self, wanted: slice) -> np.ndarray:
        """Return a copy of the tokens in a slice of step 1."""
        start, stop, _ = wanted.indices(len(self))
        first = int(np.searchsorted(self._ends, start, side="right"))
        found = []
        for part, end in zip(self._parts[first:], self._ends[first:], strict=True):
            began = int(end) - len(part)
            if began >= stop:
                break
            found.append(part[max(0, start - began) : stop - began])
        return np.concatenate(found) if found else np.zeros(0, np.int32)


Tokens = np.ndarray | TokenRow
"""Integers [tokens]; both are read by slices."""


def _open_tokens(path: pathlib.Path) -> np.ndarray:
    try:
        if manifest.is_large(path):
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


def _check_tokens(path: pathlib.Path, tokens: np.ndarray, part: slice) -> int:
    """Raise ConfigError for a negative or too large token; return the largest."""
    low, high = int(tokens[part].min()), int(tokens[part].max())
    if low < 0 or high > MOST:
        wrong = low if low < 0 else high
        raise ConfigError(
            f"data.paths: {path} has {wrong} as a token; they are from 0 to {MOST}"
        )
    return high
