"""The files of a corpus by name, the same on every machine, and what each one holds.

A file's name is the path relative to what was given. In a folder, files that hold no
documents are left out, and told; a file that is named by its own path is read or
refused.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import enum
import gzip
import logging
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from diloco_jax import files
from diloco_jax.config import ConfigError
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

MANIFEST_SUFFIX = ".manifest"
TOKENS_SUFFIX = ".npy"
MAPPED_FROM = 1 << 24
"""Bytes from which a file of text or tokens is mapped, and has a manifest. Mapped files
stay open, and those are limited."""
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


def is_large(path: pathlib.Path) -> bool:
    """Tell if a file is mapped, and has a manifest."""
    return path.stat().st_size >= MAPPED_FROM


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
    if path.suffix != MANIFEST_SUFFIX:
        return False
    described = path.with_suffix("")
    if described.suffix.lower() == TOKENS_SUFFIX:
        return True
    return described.is_file() and is_large(described)


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
