"""The manifest of a prepared folder: its files, their contents and digests.

A start does not read the files to compute their digests. It compares names and sizes,
and a few chunks that it draws at random.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from diloco_jax.data.prepared.folder import folder_at
from diloco_jax.data.prepared.records import RecordFormat
from diloco_jax.errors import ConfigError

NAME = "prepared.json"
FORMAT = 2
TRAIN, VALIDATION = "train", "validation"
CHUNK_BYTES = 1 << 20
SAMPLES = 16
"""Chunks that a start compares."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A file of rows."""

    name: str
    rows: int
    size: int
    chunks: tuple[str, ...]
    """Digests of its chunks of `CHUNK_BYTES`, each of 16 hex digits."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a split. Tokens are positions without padding."""

    documents: int = 0
    rows: int = 0
    tokens: int = 0
    predicted: int = 0
    """Predictions that count."""
    text_bytes: int = 0
    """Bytes of the text of which the predictions count."""
    left_out: int = 0
    """Documents in which no prediction counts."""
    chats: int = 0
    """Documents of messages in which some count."""
    cut: int = 0
    """Answers that do not count, since the template leaves out a part of them."""

    def __add__(self, other: Counts) -> Counts:
        names = self.__struct_fields__
        return Counts(**{n: getattr(self, n) + getattr(other, n) for n in names})


class Split(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rows to train on, or to validate on."""

    counts: Counts
    shards: tuple[Shard, ...]
    largest: int = -1
    """Highest token of the rows; -1, and left out, where an older version made them."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer that made the tokens."""

    digest: str
    vocab_size: int
    start: tuple[int, ...]
    end: int | None
    file: str
    """Its name in the folder; empty for bytes."""


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of the sources. `digest`: of its documents."""

    name: str
    size: int
    digest: str
    kind: str = ""
    """A `SourceKind`; folders of before it was noted have none."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a folder."""

    format: int = FORMAT
    sequence_length: int
    """Tokens predicted of a row."""
    row_bytes: int
    """Length of a record before its compression."""
    validation_fraction: float
    turn: str
    """How turns of a chat are written."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer of the chats."""
    tokenizer: Tokens
    train: Split
    validation: Split
    sources: tuple[Origin, ...]

    @property
    def digest(self) -> str:
        """16 hex digits over all of it, and thereby over the contents of the files."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    @property
    def records(self) -> RecordFormat:
        """The format of the records."""
        return RecordFormat(self.sequence_length, self.tokenizer.vocab_size)


def is_prepared(folder: str | Path) -> bool:
    """Tell if a path is a folder that has such a manifest."""
    return folder_at(folder).has(NAME)


def read_manifest(folder: str | Path) -> Contents:
    """Read a folder's manifest; raise ConfigError, naming it, if it cannot be read."""
    there = folder_at(folder)
    path = there.path(NAME)
    try:
        found = msgspec.json.decode(there.read(NAME), type=Contents)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"data.paths: {path} cannot be read ({error}); copy it again, or make the "
            f"folder with `diloco data prepare`"
        ) from error
    if found.format != FORMAT:
        raise ConfigError(
            f"data.paths: {path} has format {found.format}, this version reads format "
            f"{FORMAT}; make the folder again with `diloco data prepare`"
        )
    return found


def require_whole(
    folder: str | Path,
    prepared: Contents,
    samples: int = SAMPLES,
    draw: Callable[[range, int], list[int]] = random.sample,
) -> None:
    """Raise ConfigError, with both values, if files are not the manifest's: compare all
    sizes, and `samples` chunks that are drawn."""
    shards = (*prepared.train.shards, *prepared.validation.shards)
    there = folder_at(folder)
    sizes = there.sizes([shard.name for shard in shards])
    for shard, size in zip(shards, sizes, strict=True):
        if size != shard.size:
            raise _differs(there.path(shard.name), "size", size, shard.size)
    places = [(shard, number) for shard in shards for number in range(_chunks(shard))]
    for at in draw(range(len(places)), min(samples, len(places))):
        shard, number = places[at]
        start = number * CHUNK_BYTES
        chunk = there.read(shard.name, start, min(start + CHUNK_BYTES, shard.size))
        if (found := chunk_digest(chunk)) != shard.chunks[number]:
            what, path = f"digest of bytes from {start} on", there.path(shard.name)
            raise _differs(path, what, found, shard.chunks[number])


def shard_of(path: Path, name: str, rows: int) -> Shard:
    """Return the facts about a file of rows, which is read as a whole."""
    chunks = []
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            chunks.append(chunk_digest(data))
    return Shard(name=name, rows=rows, size=path.stat().st_size, chunks=tuple(chunks))


def chunk_digest(data: bytes) -> str:
    """Return the digest of a chunk, 16 hex digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def _chunks(shard: Shard) -> int:
    return len(shard.chunks)


def _differs(path: str, what: str, here: object, then: object) -> ConfigError:
    return ConfigError(
        f"data.paths: {path} is not the file of {NAME}: {what} is {here} here, {then} "
        f"there; copy the folder again, or make it with `diloco data prepare`"
    )
