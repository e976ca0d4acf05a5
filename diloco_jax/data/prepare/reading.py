"""The documents of a slice of a source, one after the other."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, cast

from diloco_jax import files
from diloco_jax.data.documents import SourceKind, unreadable
from diloco_jax.data.prepare.examples import Example, Passage, Reader
from diloco_jax.data.prepare.parts import (
    DOCUMENT_BYTES,
    FIELD,
    SourceFile,
    SourceSlice,
    require_unchanged,
)
from diloco_jax.data.text import BOM, fault, require_text
from diloco_jax.errors import ConfigError

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
    nbytes: int
    """Bytes that were read for it."""
    roles: tuple[str, ...] = ()
    """Roles of its messages."""


def read(source: SourceFile, part: SourceSlice, reader: Reader) -> Iterator[Document]:
    """Yield the documents that begin in a slice.

    Raises ConfigError, naming file and place, for content that does not fit the file's
    kind.
    """
    try:
        require_unchanged(source)
        if source.kind is SourceKind.TABLE:
            yield from _table(source, part, reader)
        elif source.kind is SourceKind.LIST:
            yield from _list(source, reader)
        elif source.kind is SourceKind.LINES:
            yield from _lines(source, part, reader)
        else:
            yield from _texts(source, part)
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
            yield Document(key, Example([Passage(text, True)]), len(data))
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


def _lines(source: SourceFile, part: SourceSlice, reader: Reader) -> Iterator[Document]:
    with _opened(source) as file:
        at = part.start
        if at:
            # A line belongs to the slice in which it begins.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while source.packed or at < part.stop:
            line = file.readline()
            if not line:
                return
            bare = line.removeprefix(BOM)  # Files that were joined have several.
            if bare.strip():
                where = f"{source.path}, offset {at}: the line there"
                found = _parsed(bare, at, where)
                yield _document(found, reader, where, len(line))
            at += len(line)


def _list(source: SourceFile, reader: Reader) -> Iterator[Document]:
    with _opened(source) as file:
        found = _parsed(file.read().removeprefix(BOM), 0, source.path)
    for number, item in enumerate(found):
        where = f"{source.path}, item {number}"
        yield _document(item, reader, where, source.size // len(found))


def _opened(source: SourceFile) -> BinaryIO:
    opened = gzip.open if source.packed else open
    return cast(BinaryIO, opened(source.path, "rb"))


def _parsed(data: bytes, at: int, where: str) -> Any:
    """Return the value of JSON from offset `at` on; raise ConfigError if it is none."""
    try:
        return files.parse_json(data)
    except ValueError as error:
        raise _no_document(where, (fault(data, at) or [error])[0]) from error


def _no_document(where: str, error: object) -> ConfigError:
    return ConfigError(
        f"{FIELD}: {where} is no document: {error}; mend it, or give --text-field"
    )


def _table(source: SourceFile, part: SourceSlice, reader: Reader) -> Iterator[Document]:
    from diloco_jax.data.prepare.tables import open_table, rows

    with open_table(source.path) as table:
        names = table.schema_arrow.names
    columns = reader.columns(names)
    for number, row in enumerate(rows(source.path, part.start, columns)):
        try:
            found = _read(row, reader)
        except ValueError as error:
            raise ConfigError(
                f"{FIELD}: {source.path}, row {number} of row group {part.start}: "
                f"{error} (its columns are {', '.join(names)}); give --text-field"
            ) from error
        yield found


def _document(found: Any, reader: Reader, where: str, nbytes: int) -> Document:
    try:
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        return _read(found, reader)._replace(nbytes=nbytes)
    except ValueError as error:
        raise _no_document(where, error) from error


def _read(found: Mapping[str, Any], reader: Reader) -> Document:
    """Return the document of an object or a row; it is empty if it has null in place of
    a text. Raise ValueError if it has none of the forms, or U+0000 in a text."""
    wanted = reader.columns(list(found))
    given = {name for name in wanted if found[name] is not None}
    example = Example([])
    if len(given) == len(wanted) or not given < PAIR - {reader.text_field}:
        example = reader.read({k: v for k, v in found.items() if v is not None})
    digest, spans = hashlib.sha256(), []
    for span in example.spans:
        if "\0" in span.text:
            raise ValueError("its text has a NUL character (U+0000)")
        # JSON may spell half a character, which no tokenizer takes.
        data = span.text.encode(errors="replace")
        digest.update(f"{len(data)}:{int(span.learned)}:".encode() + data)
        spans.append(span._replace(text=data.decode()))
    spoken = found.get("messages")
    messages = spoken if isinstance(spoken, list) else []
    roles = {str(m.get("role")) for m in messages if isinstance(m, dict)}
    return Document(
        digest.hexdigest(),
        example._replace(spans=spans),
        sum(len(span.text) for span in spans),
        tuple(sorted(roles)),
    )
