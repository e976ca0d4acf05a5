"""The sources of `diloco data prepare`: files in parts, and the documents of a part.

No number of workers changes the parts: each becomes a file of rows. A part is some
slices of source files, up to `PART_BYTES` together, whose documents are read one after
the other. Files of Parquet are read a few rows at a time.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from diloco_jax import files
from diloco_jax.data.documents import (
    BOM,
    SourceKind,
    encoded,
    fault_of_text,
    find_documents,
    is_packed,
    require_text,
    unreadable,
)
from diloco_jax.data.examples import Example, Passage, Reader
from diloco_jax.data.pictures import (
    COLUMNS,
    PLACE,
    PictureError,
    given,
    read_pictures,
)
from diloco_jax.errors import ConfigError
from diloco_jax.files import how_to_mend

ROWS_AT_ONCE, PICTURES_AT_ONCE = 256, 16
"""Rows of a table that are in memory; the latter where they may have pictures."""


@contextlib.contextmanager
def open_table(path: str) -> Iterator[Any]:
    """Open a Parquet file; raise ConfigError, naming the file, if it cannot be read as
    one.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package pyarrow; pip install 'diloco-jax[text]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as table:
            yield table
    except Exception as error:  # The library raises errors of many kinds.
        raise ConfigError(
            f"SOURCES: {path} cannot be read as Parquet ({error}); "
            f"{how_to_mend(path)}, write it anew, or leave it out"
        ) from error


def rows(path: str, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a group as dicts of these columns."""
    first, shown = 0, not set(COLUMNS).isdisjoint(columns)
    with open_table(path) as table:
        at_once = PICTURES_AT_ONCE if shown else ROWS_AT_ONCE
        for batch in table.iter_batches(at_once, [group], columns=columns):
            last = first + batch.num_rows - 1
            try:
                found = batch.to_pylist()
            except Exception as error:
                where = f"row group {group}, rows {first} to {last}"
                raise ValueError(f"{where}: {error}") from error
            yield from found
            first = last + 1


PART_BYTES, PICTURE_PART_BYTES = 1 << 26, 1 << 22
"""Bytes of a part; the latter where documents may name pictures, which are larger."""
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
            raise _too_long(f"{path} is a JSON list of {status.st_size:,} bytes")
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
        with open_table(source.path) as table:
            for group in range(table.num_row_groups):
                nbytes = table.metadata.row_group(group).total_byte_size
                yield SourceSlice(number, group, group + 1, nbytes)
    else:
        step = limit
        if source.kind is SourceKind.TEXT:
            # Cuts of text are those of its documents, wherever a part ends.
            step = max(limit // DOCUMENT_BYTES, 1) * DOCUMENT_BYTES
        for start in range(0, source.size, step):
            stop = min(start + step, source.size)
            yield SourceSlice(number, start, stop, stop - start)


PAIR = {"prompt", "completion"}
SEARCHED = 1 << 16
"""Bytes in which an end of a line is looked for before text is cut elsewhere."""


class Document(NamedTuple):
    """A document of a source.

    `key` decides whether it is held out for validation. It is the name of a text file,
    and otherwise a digest of the text, so that copies are on one side.
    """

    key: str
    example: Example
    roles: tuple[str, ...] = ()
    """Roles of its messages."""


def read(source: SourceFile, part: SourceSlice, reader: Reader) -> Iterator[Document]:
    """Yield the documents that begin in a slice.

    Raises ConfigError, naming file and place, for content that does not fit the file's
    kind.
    """
    try:
        require_unchanged(source)
        if source.kind is SourceKind.TEXT:
            yield from _texts(source, part)
            return
        for where, found in _objects(source, part, reader):
            try:
                document = _document(found, reader, source)
            except ValueError as error:
                raise _no_document(where, error) from error
            yield document
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.filename:
            raise unreadable(error, FIELD) from error
        raise ConfigError(
            f"{FIELD}: {source.path} cannot be read ({error}); "
            f"{files.how_to_mend(source.path)}"
        ) from error


def _texts(source: SourceFile, part: SourceSlice) -> Iterator[Document]:
    with open(source.path, "rb") as file:
        begin = _cut(file, part.start, source.size)
        for nominal in range(part.start, part.stop, DOCUMENT_BYTES):
            stop = min(nominal + DOCUMENT_BYTES, source.size)
            end = _cut(file, stop, source.size)
            file.seek(begin)
            data = file.read(end - begin)
            require_text(data, source.path, begin, FIELD)
            text = (data if begin else data.removeprefix(BOM)).decode()
            number = nominal // DOCUMENT_BYTES
            key = f"{source.name}#{number}" if number else source.name
            yield Document(key, Example([Passage(text, True)]))
            begin = end


def _cut(file: BinaryIO, at: int, size: int) -> int:
    """Return where a document may end at or after `at`: after a line break, or else
    between two characters."""
    if at == 0 or at >= size:
        return min(at, size)
    file.seek(at)
    data = file.read(SEARCHED)
    line = data.find(b"\n")
    if line >= 0:
        return at + line + 1
    return at + next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), 0)


def _objects(
    source: SourceFile, part: SourceSlice, reader: Reader
) -> Iterator[tuple[str, Any]]:
    """Yield where each object or row of a slice stands, and what it is."""
    if source.kind is SourceKind.LIST:
        with _opened(source) as file:
            data = file.read(MOST_LIST_BYTES + 1)  # Unpacked, it may be any length.
        if len(data) > MOST_LIST_BYTES:
            raise _too_long(f"{source.path} is a longer JSON list")
        found = _parsed(data.removeprefix(BOM), 0, source.path)
        for number, item in enumerate(found):
            yield f"{source.path}, item {number}", item
    elif source.kind is SourceKind.TABLE:
        with open_table(source.path) as table:
            names = table.schema_arrow.names
        group = f"row group {part.start} (its columns are {', '.join(names)})"
        wanted = rows(source.path, part.start, reader.columns(names))
        for number, row in enumerate(wanted):
            yield f"{source.path}, row {number} of {group}", row
    else:
        yield from _lines(source, part)


def _lines(source: SourceFile, part: SourceSlice) -> Iterator[tuple[str, Any]]:
    with _opened(source) as file:
        at = part.start
        if at:
            # A line belongs to the slice in which it begins.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while source.packed or at < part.stop:
            line = file.readline(MOST_LIST_BYTES + 1)
            if not line:
                return
            if len(line) > MOST_LIST_BYTES:
                raise _too_long(f"{source.path} has a longer line at offset {at}")
            bare = line.removeprefix(BOM)  # Files that were joined have several.
            if bare.strip():
                where = f"{source.path}, offset {at}: the line there"
                yield where, _parsed(bare, at, where)
            at += len(line)


def _too_long(what: str) -> ConfigError:
    return ConfigError(
        f"{FIELD}: {what}, and JSON of more than {MOST_LIST_BYTES:,} bytes is not read "
        f"at once; write an object a line: `jq -c '.[]'`, into a file .jsonl"
    )


def _opened(source: SourceFile) -> BinaryIO:
    opened = gzip.open if source.packed else open
    return cast(BinaryIO, opened(source.path, "rb"))


def _parsed(data: bytes, at: int, where: str) -> Any:
    """Return the value of JSON from offset `at` on; raise ConfigError if it is none."""
    try:
        return files.parse_json(data)
    except ValueError as error:
        raise _no_document(where, (fault_of_text(data, at) or [error])[0]) from error


def _no_document(where: str, error: object) -> ConfigError:
    remedy = "mend it, or give --text-field"
    if isinstance(error, PictureError):
        remedy = "mend its pictures, or leave it out"
    return ConfigError(f"{FIELD}: {where} is no document: {error}; {remedy}")


def _document(found: Any, reader: Reader, source: SourceFile) -> Document:
    """Return the document of an object or a row; it is empty if it has null in place of
    a text. Raise ValueError if it has none of the forms, U+0000 in a text, or pictures
    that are none or have no place."""
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    example = Example([])
    pictured = COLUMNS if reader.pictures else ()
    wanted = set(reader.columns(list(found))) - {*pictured}
    missing = {name for name in wanted if found[name] is None}
    if not missing or not wanted - missing < PAIR - {reader.text_field}:
        example = reader.read({k: v for k, v in found.items() if v is not None})
    digest, spans = hashlib.sha256(), []
    for span in example.spans:
        if "\0" in span.text:
            raise ValueError("its text has a NUL character (U+0000)")
        # JSON may spell half a character, which no tokenizer takes.
        data = span.text.encode(errors="replace")
        digest.update(f"{len(data)}:{int(span.learned)}:".encode() + data)
        spans.append(span._replace(text=data.decode()))
    if reader.pictures is not None and spans:
        pictures = _pictures(found, spans, Path(source.path).parent)
        for file in pictures:
            digest.update(hashlib.sha256(file).digest())
        spans = list(_with_places(spans, reader.pictures.text))
        example = example._replace(pictures=pictures)
    spoken = found.get("messages")
    messages = spoken if isinstance(spoken, list) else []
    roles = {str(m.get("role")) for m in messages if isinstance(m, dict)}
    return Document(
        digest.hexdigest(), example._replace(spans=spans), tuple(sorted(roles))
    )


def _pictures(
    found: Mapping[str, Any], spans: Sequence[Passage], folder: Path
) -> tuple[bytes, ...]:
    """Return the pictures of a document, in whose text each has a place."""
    values = given(found)
    places = sum(span.text.count(PLACE) for span in spans)
    if places != len(values):
        raise PictureError(
            f"it has {len(values)} pictures, and its text has the place of one, "
            f"{PLACE}, {places} times; give each picture a place, or leave all out"
        )
    return read_pictures(values, folder)


def _with_places(spans: Sequence[Passage], text: str) -> Iterator[Passage]:
    """Yield spans, with the text that stands for a picture in its places, which is not
    learned."""
    for span in spans:
        for number, part in enumerate(span.text.split(PLACE)):
            if number:
                yield Passage(text, False)
            if part:
                yield span._replace(text=part)
