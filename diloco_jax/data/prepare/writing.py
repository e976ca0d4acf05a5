"""One part of the work: documents in, one file of rows for each split out."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from diloco_jax import files
from diloco_jax.data.corpus import is_validation
from diloco_jax.data.prepare.examples import Reader
from diloco_jax.data.prepare.packing import Tokenised, pack
from diloco_jax.data.prepare.parts import Part, SourceFile
from diloco_jax.data.prepare.reading import Document, read
from diloco_jax.data.prepared.contents import (
    TRAIN,
    VALIDATION,
    Counts,
    Shard,
    Split,
    shard_of,
)
from diloco_jax.data.prepared.records import RecordFormat
from diloco_jax.data.tokenizers.tokenizer import Tokenizer
from diloco_jax.files import naming

SUFFIX = ".arrayrecord"
OPTIONS = "group_size:1"
"""A record is read alone, since rows are drawn one by one."""
TRAILING = 4
"""Tokens at the end of a text among which one that ends it is looked for."""
AT_ONCE = 256
"""Documents that a tokenizer gets together."""

Advance = Callable[[int], None]
"""Called with the number of bytes of a source that were read since the last call."""


class PartDone(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a part; its file says that the part is whole."""

    train: Split
    validation: Split
    digests: tuple[str, ...]
    """Digests of what was read from each of its slices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Rules by which documents become rows, the same for every part."""

    tokenizer: Tokenizer
    reader: Reader
    sequence_length: int
    validation_fraction: float

    @property
    def records(self) -> RecordFormat:
        """The format of the records."""
        return RecordFormat(self.sequence_length, self.tokenizer.vocab_size)


def done_path(folder: Path, number: int) -> Path:
    """Return the path of the file that says that a part is done."""
    return folder / "parts" / f"{number:05}.json"


def write_part(
    folder: Path,
    number: int,
    sources: Sequence[SourceFile],
    part: Part,
    recipe: Recipe,
    advance: Advance,
) -> PartDone:
    """Make a part's files in a folder, whole or not at all, and note that it is done.

    Raises ConfigError, naming file and place, for sources that cannot be read.
    """
    digests = [hashlib.sha256() for _ in part]
    sides: dict[str, list[Tokenised]] = {TRAIN: [], VALIDATION: []}
    counts = {TRAIN: Counts(), VALIDATION: Counts()}

    def documents() -> Iterator[Document]:
        for piece, digest in zip(part, digests, strict=True):
            source = sources[piece.source]
            for document in read(source, piece, recipe.reader):
                advance(document.nbytes)
                for span in document.example.spans:
                    digest.update(span.text.encode())
                digest.update(b"\0")
                yield document

    ahead = documents()
    while some := list(itertools.islice(ahead, AT_ONCE)):
        for document, tokenised in zip(some, _tokenised(some, recipe), strict=True):
            held = is_validation(document.key, recipe.validation_fraction)
            side = VALIDATION if held else TRAIN
            spans = document.example.spans
            learned = sum(len(span.text.encode()) for span in spans if span.learned)
            counts[side] += Counts(
                documents=1,
                left_out=int(not learned),
                text_bytes=learned,
                chats=int(document.example.chat and learned > 0),
                cut=document.example.cut,
            )
            if learned:
                sides[side].append(tokenised)
    splits = {
        side: _write(folder, f"{side}-{number:05}{SUFFIX}", found, recipe, counts[side])
        for side, found in sides.items()
    }
    done = PartDone(
        train=splits[TRAIN],
        validation=splits[VALIDATION],
        digests=tuple(digest.hexdigest()[:16] for digest in digests),
    )
    files.write_text(msgspec.json.encode(done).decode(), done_path(folder, number))
    return done


def _tokenised(some: Sequence[Document], recipe: Recipe) -> Iterator[Tokenised]:
    """Yield the tokens of documents, with those that begin and end one.

    The spans of a document are one text for the tokenizer: many put a space before
    whatever they are given. A token is learned if a character of it is.
    """
    tokenizer, end = recipe.tokenizer, recipe.tokenizer.end
    ends = {end, recipe.reader.turn_end} - {None}
    texts, flags = [], []
    for document in some:
        spans = document.example.spans
        texts.append("".join(span.text for span in spans))
        sizes = [len(span.text) for span in spans]
        flags.append(np.repeat([span.learned for span in spans], sizes).astype(bool))
    mixed = [bool(flag.any() and not flag.all()) for flag in flags]
    placed = iter(tokenizer.encode_placed([*itertools.compress(texts, mixed)]))
    alike = iter(tokenizer.encode([*itertools.compress(texts, ~np.array(mixed))]))
    for document, flag, is_mixed in zip(some, flags, mixed, strict=True):
        if is_mixed:
            found, places = next(placed)
            tokens, (begin, stop) = np.array(found, np.int32), np.array(places).T
            before = np.concatenate([[0], np.cumsum(flag)])
            begin = np.minimum(begin, len(flag) - 1)
            learned = before[np.maximum(stop, begin + 1)] > before[begin]
        else:
            tokens = next(alike)
            learned = np.full(len(tokens), flag.any())
        start = tokenizer.start
        if not start and end is not None and learned[:1].all():
            start = (end,)  # The first token, too, is predicted from something.
        if start and tuple(tokens[: len(start)]) == start:
            learned[: len(start)] = False  # The text has them already.
        else:
            tokens = np.concatenate([np.array(start, np.int32), tokens])
            learned = np.concatenate([np.zeros(len(start), bool), learned])
        wants = document.example.ends and not _has_ended(tokens, ends, tokenizer)
        if wants and end is not None:
            tokens = np.append(tokens, np.int32(end))
            learned = np.append(learned, flag[-1:].any())
        yield Tokenised(tokens, learned)


def _has_ended(tokens: np.ndarray, ends: set[int | None], tokenizer: Tokenizer) -> bool:
    """Tell if one of these tokens ends a document, but for spaces after it."""
    last = tokens[:0:-1][:TRAILING].tolist()
    at = next((n for n, token in enumerate(last) if token in ends), None)
    return at is not None and not tokenizer.decode(last[:at]).strip()


def _write(
    folder: Path, name: str, found: list[Tokenised], recipe: Recipe, counts: Counts
) -> Split:
    """Write the rows of one side; a side without any has no file."""
    from array_record.python.array_record_module import ArrayRecordWriter

    scratch = folder / f"{name}.{os.getpid()}.tmp"
    records, rows, tokens, predicted, largest = recipe.records, 0, 0, 0, 0
    writer = None
    try:
        with naming(scratch):
            for row in pack(found, recipe.sequence_length):
                writer = writer or ArrayRecordWriter(str(scratch), OPTIONS)
                writer.write(records.encode([(p.tokens, p.learned) for p in row]))
                rows += 1
                tokens += sum(len(piece.tokens) for piece in row)
                largest = max(largest, *(int(piece.tokens.max()) for piece in row))
                predicted += sum(int(piece.learned[1:].sum()) for piece in row)
            if writer is None:
                return Split(counts=counts, shards=(), largest=0)
            writer.close()
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
        shard: Shard = shard_of(scratch, name, rows)
        scratch.replace(folder / name)
    finally:
        scratch.unlink(missing_ok=True)
    more = Counts(rows=rows, tokens=tokens, predicted=predicted)
    return Split(counts=counts + more, shards=(shard,), largest=largest)
