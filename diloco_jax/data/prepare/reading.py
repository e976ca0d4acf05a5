"""The documents of a slice of a source, one after the other."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from diloco_jax.data.prepare.examples import Example, Passage, Reader
from diloco_jax.data.prepare.parts import (
    DOCUMENT_BYTES,
    FIELD,
    SourceFile,
    SourceKind,
    SourceSlice,
)
from diloco_jax.errors import ConfigError

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


def read(source: SourceFile, part: SourceSlice, reader: Reader) -> Iterator[Document]:
    """Yield the documents that begin in a slice.

    Raises ConfigError, naming file and place, for content that does not fit the file's
    kind.
    """
    if source.kind is SourceKind.TEXT:
        yield from _texts(source, part)
    elif source.kind is SourceKind.TABLE:
        yield from _table(source, part, reader)
    else:
        yield from _lines(source, part, reader)


def _texts(source: SourceFile, part: SourceSlice) -> Iterator[Document]:
    with open(source.path, "rb") as file:
        begin = _cut(file, part.start, source.size)
        for nominal in range(part.start, part.stop, DOCUMENT_BYTES):
            stop = min(nominal + DOCUMENT_BYTES, source.size)
            end = _cut(file, stop, source.size)
            file.seek(begin)
            data = file.read(end - begin)
            at, problem = data.find(b"\0"), "a NUL byte"
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                at, problem = error.start, "a byte that is not UTF-8"
            if at >= 0:
                raise ConfigError(
                    f"{FIELD}: {source.path} is not text: {problem} at offset "
                    f"{begin + at}; convert it to UTF-8, leave it out, or name it "
                    f"after what it is (.jsonl, .jsonl.gz, .parquet)"
                )
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
    packed = source.kind is SourceKind.PACKED_LINES
    with gzip.open(source.path) if packed else open(source.path, "rb") as file:
        at = part.start
        if at:
            # A line belongs to the slice in which it begins.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while packed or at < part.stop:
            try:
                line = file.readline()
            except (OSError, EOFError, zlib.error) as error:
                raise ConfigError(
                    f"{FIELD}: {source.path} cannot be read ({error}); copy it again"
                ) from error
            if not line:
                return
            if not line.isspace():
                yield _document(line, reader, f"{source.path}, offset {at}", len(line))
            at += len(line)


def _document(line: bytes, reader: Reader, where: str, nbytes: int) -> Document:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        return _of_content(reader.read(found), nbytes)
    except ValueError as error:
        raise ConfigError(
            f"{FIELD}: {where}: the line there is no document: {error}; mend it, or "
            f"give --text-field"
        ) from error


def _table(source: SourceFile, part: SourceSlice, reader: Reader) -> Iterator[Document]:
    from diloco_jax.data.prepare.tables import open_table, rows

    with open_table(source.path) as table:
        names = table.schema_arrow.names
    columns = reader.columns(names)
    groups = range(part.start, part.stop)
    for number, row in enumerate(rows(source.path, groups, columns)):
        try:
            example = reader.read({k: v for k, v in row.items() if v is not None})
        except ValueError as error:
            raise ConfigError(
                f"{FIELD}: {source.path}, row {number} of row group {part.start}: "
                f"{error} (its columns are {', '.join(names)}); give --text-field"
            ) from error
        yield _of_content(example, sum(len(span.text) for span in example.spans))


def _of_content(example: Example, nbytes: int) -> Document:
    digest, spans = hashlib.sha256(), []
    for span in example.spans:
        # JSON may spell half a character, which no tokenizer takes.
        data = span.text.encode(errors="replace")
        digest.update(f"{len(data)}:{int(span.learned)}:".encode() + data)
        spans.append(span._replace(text=data.decode()))
    return Document(digest.hexdigest(), example._replace(spans=spans), nbytes)
