"""The work in parts that no number of workers changes: each becomes a file of rows.

A part is some slices of source files, up to `PART_BYTES` together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from diloco_jax.data.documents import SourceKind, encoded, find_documents, is_packed
from diloco_jax.errors import ConfigError

PART_BYTES = 1 << 26
MOST_PARTS = 4096
"""Larger sources have larger parts, since every part is a file of rows."""
DOCUMENT_BYTES = 1 << 20
"""A file of text that is longer counts as several documents, cut at ends of lines."""
MOST_LIST_BYTES = 1 << 30
"""A JSON list is read as a whole; a longer one is refused."""
FIELD = "SOURCES"


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A source as it was when the work was planned."""

    name: str
    """Relative to the path that was given."""
    path: str
    kind: SourceKind
    size: int
    changed_ns: int

    @property
    def packed(self) -> bool:
        """True if it is compressed, so that it is read as a whole."""
        return self.kind is not SourceKind.TEXT and is_packed(self.name)


class SourceSlice(msgspec.Struct, frozen=True):
    """A range of one source: bytes, or groups of rows of a table."""

    source: int
    start: int
    stop: int
    nbytes: int


Part = tuple[SourceSlice, ...]


def find_sources(paths: tuple[str, ...]) -> list[SourceFile]:
    """List the files of paths, in order of their names, those that are left out too.
    Raise ConfigError for a path that is missing or empty, for two files of one name,
    and for files of which no documents are made."""
    found = []
    for name, path, kind in find_documents(paths, FIELD):
        encoded(name, path, FIELD)
        status = path.stat()
        if kind is SourceKind.LIST and status.st_size > MOST_LIST_BYTES:
            raise ConfigError(
                f"{FIELD}: {path} is a JSON list of {status.st_size:,} bytes, and one "
                f"of more than {MOST_LIST_BYTES:,} is not read; write an object a "
                f"line: `jq -c '.[]'`, into a file .jsonl"
            )
        if status.st_size:
            found.append(
                SourceFile(
                    name=name,
                    path=str(path.absolute()),
                    kind=kind,
                    size=status.st_size,
                    changed_ns=status.st_mtime_ns,
                )
            )
    return found


def require_unchanged(source: SourceFile) -> None:
    """Raise ConfigError if a source is not as it was when the work was planned."""
    status = Path(source.path).stat()
    then, now = (source.size, source.changed_ns), (status.st_size, status.st_mtime_ns)
    if then != now:
        raise ConfigError(
            f"{FIELD}: {source.path} has changed since the work began (size and time "
            f"of change {then}, now {now}); begin again with files that stay"
        )


def make_parts(
    sources: Sequence[SourceFile], part_bytes: int = PART_BYTES
) -> list[Part]:
    """Cut sources into parts, in order."""
    total = sum(source.size for source in sources)
    limit = max(part_bytes, -(-total // MOST_PARTS))
    parts: list[Part] = []
    current: list[SourceSlice] = []
    size = 0
    for number, source in enumerate(sources):
        if source.kind is SourceKind.LEFT_OUT:
            continue
        for piece in _slices(number, source, limit):
            if current and size + piece.nbytes > limit:
                parts.append(tuple(current))
                current, size = [], 0
            current.append(piece)
            size += piece.nbytes
    return [*parts, tuple(current)] if current else parts


def _slices(number: int, source: SourceFile, limit: int) -> Iterator[SourceSlice]:
    if source.kind is SourceKind.LIST or source.packed:
        yield SourceSlice(number, 0, source.size, source.size)
    elif source.kind is SourceKind.TABLE:
        yield from _groups(number, source)
    else:
        step = limit
        if source.kind is SourceKind.TEXT:
            # Cuts of text are those of its documents, wherever a part ends.
            step = max(limit // DOCUMENT_BYTES, 1) * DOCUMENT_BYTES
        for start in range(0, source.size, step):
            stop = min(start + step, source.size)
            yield SourceSlice(number, start, stop, stop - start)


def _groups(number: int, source: SourceFile) -> Iterator[SourceSlice]:
    from diloco_jax.data.prepare.tables import open_table

    with open_table(source.path) as table:
        for group in range(table.num_row_groups):
            nbytes = table.metadata.row_group(group).total_byte_size
            yield SourceSlice(number, group, group + 1, nbytes)
