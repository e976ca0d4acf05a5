"""Prepared folders: packed rows in ArrayRecord files, beside a manifest of them.

A folder lies on this machine, or in a bucket of Google Cloud. Rows are read by number,
by ArrayRecord's own reader, which knows both. A start does not read the files to
compute their digests. It compares names and sizes, and a few chunks that it draws at
random. One folder is the data of a run, or several are, in a mixture.

`T` tokens are predicted of each row. A record has, in this order and little-endian:

- the number of tokens without padding, uint32;
- the tokens [T + 1], uint16 if the vocabulary fits, else uint32;
- a bit for each token, set where a document begins [T + 1];
- a bit for each prediction, set where it counts [T].

This has the same length in all records of a folder. The files of the row's pictures
follow, in order, each after its number of bytes, uint32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from etils.epath import Path as BucketPath

from diloco_jax import files
from diloco_jax.config import DataConfig
from diloco_jax.data.pictures import RowPictures
from diloco_jax.data.source import SEGMENTS, TOKENS, WEIGHTS, Fields, Row
from diloco_jax.data.tokenizers import BESIDE, open_tokenizer, require_digest
from diloco_jax.errors import ConfigError
from diloco_jax.files import is_bucket

SCHEME = "gs://"
ASKERS = 16
"""Threads that ask for sizes, since a mounted bucket takes its time for each."""


class DataFolder:
    """A folder of this machine, or a mounted one, or gs://BUCKET/FOLDER. `str` of it is
    its path.

    Methods raise ConfigError, naming the account, where a bucket may not be read, and
    StorageAway where it does not answer.
    """

    def __init__(self, path: str | Path) -> None:
        """Raise ConfigError for a bucket that no library here reads rows of."""
        self._local = not is_bucket(str(path))
        if not self._local and not str(path).startswith(SCHEME):
            raise ConfigError(
                f"data.paths: {path} is a bucket, and rows are read of {SCHEME} alone; "
                f"mount it (mount-s3, rclone mount) and give the folder, or copy it"
            )
        self._path = str(Path(path)) if self._local else str(path).rstrip("/")

    def __str__(self) -> str:
        return self._path

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return f"{self._path}/{name}"

    def has(self, name: str) -> bool:
        """Tell if there is such a file."""
        if self._local:
            return Path(self.path(name)).is_file()
        with contextlib.suppress(FileNotFoundError), self._bucket() as bucket:
            return bool(bucket.info(self.path(name))["type"] == "file")
        return False

    def sizes(self, names: Sequence[str]) -> list[int | str]:
        """Return the bytes of each file, or what is wrong with it."""

        def size(name: str) -> int | str:
            try:
                return Path(self.path(name)).stat().st_size
            except OSError as error:
                return str(error.strerror)

        if self._local:
            with ThreadPoolExecutor(ASKERS) as pool:
                return list(pool.map(size, names))
        with self._bucket() as bucket:
            listed = bucket.ls(self._path, detail=True, refresh=True)
        found = {entry["name"].rpartition("/")[2]: entry["size"] for entry in listed}
        return [found.get(name, "No such object") for name in names]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of a file, as far as there are any."""
        if not self._local:
            with self._bucket() as bucket:
                return bytes(bucket.cat_file(self.path(name), start=start, end=stop))
        with open(self.path(name), "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def at_hand(self, name: str) -> Path:
        """Return a tokenizer's file on this machine, with those that belong to it."""
        folder = self._path if self._local else _copied(self._path, name).name
        return Path(folder, name)

    @contextlib.contextmanager
    def _bucket(self) -> Iterator[Any]:
        there = BucketPath(self._path)
        try:
            import fsspec

            yield fsspec.filesystem(SCHEME.removesuffix("://"))
        except FileNotFoundError:
            raise
        except Exception as error:  # A bucket's library has its own error classes.
            files.raise_if_away(there, error)
            raise ConfigError(files.cannot_read(there, error)) from error


@functools.cache
def _copied(folder: str, name: str) -> tempfile.TemporaryDirectory[str]:
    """Copy a tokenizer's files to this machine, for as long as the process lives."""
    there = DataFolder(folder)
    names = (name, *(file for file in BESIDE if there.has(file)))
    found = {file: there.read(file) for file in names}
    here = tempfile.TemporaryDirectory()  # A bucket that fails leaves none.
    for file, octets in found.items():
        Path(here.name, file).write_bytes(octets)
    return here


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """Records of one sequence length and vocabulary."""

    sequence_length: int
    vocab_size: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of a token."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def nbytes(self) -> int:
        """Length of a record."""
        length = self.sequence_length
        return (
            4
            + (length + 1) * self.dtype.itemsize
            + -(-(length + 1) // 8)
            + (-(-length // 8))
        )

    def encode(
        self,
        parts: list[tuple[np.ndarray, np.ndarray]],
        pictures: Iterable[bytes] = (),
    ) -> bytes:
        """Return the record of documents, or pieces of them, side by side.

        Args:
          parts: tokens, integers [n], and for each of them whether its prediction
            counts, bool [n]; the first of a part is never predicted.
          pictures: their files, in the order of their placeholders.
        """
        length = self.sequence_length
        tokens = np.zeros(length + 1, self.dtype)
        starts, counts = np.zeros((2, length + 1), bool)
        at = 0
        for part, learned in parts:
            end = at + len(part)
            tokens[at:end] = part
            counts[at:end] = learned
            starts[at], counts[at] = True, False
            at = end
        bits = np.packbits(starts).tobytes() + np.packbits(counts[1:]).tobytes()
        files = b"".join(len(one).to_bytes(4, "little") + one for one in pictures)
        return at.to_bytes(4, "little") + tokens.tobytes() + bits + files

    def decode(self, record: bytes) -> tuple[Row, list[bytes]]:
        """Return the arrays of a record, as `source.TOKENS` and its neighbours say, and
        the files of its pictures.

        Raises ValueError if it has another length.
        """
        pictures, at = list[bytes](), self.nbytes
        while at < len(record):
            end = at + 4 + int.from_bytes(record[at : at + 4], "little")
            pictures.append(record[at + 4 : end])
            at = end
        if len(record) != at:
            raise ValueError(
                f"a record has {len(record)} bytes, {at} are those of "
                f"{self.sequence_length} predicted tokens and {len(pictures)} pictures"
            )
        length, size = self.sequence_length, self.dtype.itemsize
        used = int.from_bytes(record[:4], "little")
        bits = 4 + (length + 1) * size
        middle = bits + -(-(length + 1) // 8)
        tokens = np.frombuffer(record, self.dtype, length + 1, 4).astype(np.int32)
        starts = _unpacked(record[bits:middle], length + 1)
        segments = np.cumsum(starts, dtype=np.int32)
        segments[used:] = 0
        rest = record[middle : self.nbytes]
        weights = _unpacked(rest, length).astype(np.float32)
        return {"tokens": tokens, "segments": segments, "weights": weights}, pictures


def _unpacked(data: bytes, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count)


MANIFEST = "prepared.json"
FORMAT, WITH_PICTURES = 2, 3
"""Formats of folders, the second of those whose rows may have pictures."""
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
    largest: int
    """Highest token of the rows."""
    pictures: int = 0
    with_pictures: int = 0
    """Rows that have some."""
    most_pictures: int = 0
    """Most of a row."""
    picture_bytes: int = 0
    """Bytes of their files."""
    largest_picture: int = 0
    """Bytes of the largest."""
    kinds: dict[str, int] = {}
    """Pictures by their kind (`pictures.kind_of`)."""

    def described(self, sequence_length: int) -> str:
        """Say what it has, in a line. sequence_length: T."""
        found = self.counts
        filled = found.tokens / (found.rows * (sequence_length + 1))
        said = (
            f"{found.documents:,} documents in {found.rows:,} rows, "
            f"{found.predicted:,} predicted tokens of {found.text_bytes:,} bytes, rows "
            f"filled to {filled:.1%}"
        )
        if self.pictures:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.items())
            said += (
                f", {self.pictures:,} pictures in {self.with_pictures:,} rows, "
                f"{self.most_pictures} in one at most, {self.picture_bytes:,} bytes, "
                f"{self.largest_picture:,} the largest ({kinds})"
            )
        if found.left_out:
            said += f", {found.left_out:,} with nothing to learn left out"
        if found.cut:
            said += (
                f", {found.cut:,} answers not learned: the chat_template leaves out a "
                f"part of them, or of what they answer, once others follow"
            )
        return said


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer that made the tokens."""

    digest: str
    vocab_size: int
    start: tuple[int, ...]
    end: int | None
    file: str
    """Its name in the folder; empty for bytes."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the sources. `digest`: of its documents."""

    name: str
    size: int
    digest: str
    kind: str
    """A `SourceKind`."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a folder."""

    format: int = FORMAT
    sequence_length: int
    """Tokens predicted of a row."""
    row_bytes: int
    """Length of a record before its compression, and without pictures."""
    validation_fraction: float
    turn: str
    """How turns of a chat are written."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer of the chats."""
    pictures: RowPictures | msgspec.UnsetType = msgspec.UNSET
    """Left out where no row has any."""
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
    return DataFolder(folder).has(MANIFEST)


def read_manifest(folder: str | Path) -> Contents:
    """Read a folder's manifest; raise ConfigError, naming it, if it cannot be read."""
    there = DataFolder(folder)
    path = there.path(MANIFEST)
    try:
        found = msgspec.json.decode(there.read(MANIFEST), type=Contents)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"data.paths: {path} cannot be read ({error}); copy it again, or make the "
            f"folder with `diloco data prepare`"
        ) from error
    split = (*found.train.shards, *found.validation.shards)
    for name in (found.tokenizer.file, *(shard.name for shard in split)):
        if name != Path(name).name:
            raise ConfigError(
                f"data.paths: {path} names the file {name!r}, which does not lie in "
                f"its folder; make the folder again with `diloco data prepare`"
            )
    if found.format not in (FORMAT, WITH_PICTURES):
        raise ConfigError(
            f"data.paths: {path} has format {found.format}, this version reads formats "
            f"{FORMAT} and {WITH_PICTURES}; make the folder again with `diloco data "
            f"prepare`"
        )
    return found


def require_whole(
    folder: str | Path, prepared: Contents, samples: int = SAMPLES
) -> None:
    """Raise ConfigError, with both values, if files are not the manifest's: compare all
    sizes, and `samples` chunks that are drawn at random."""
    shards = (*prepared.train.shards, *prepared.validation.shards)
    there = DataFolder(folder)
    sizes = there.sizes([shard.name for shard in shards])
    for shard, size in zip(shards, sizes, strict=True):
        if size != shard.size:
            raise _differs(there.path(shard.name), "size", size, shard.size)
    places = [
        (shard, number) for shard in shards for number in range(len(shard.chunks))
    ]
    for at in random.sample(range(len(places)), min(samples, len(places))):
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


def _differs(path: str, what: str, here: object, then: object) -> ConfigError:
    return ConfigError(
        f"data.paths: {path} is not the file of {MANIFEST}: {what} is {here} here, "
        f"{then} there; copy the folder again, or make it with `diloco data prepare`"
    )


MOST_OPEN = 256
"""Files that are open at a time."""
FIELDS: Fields = {"tokens": TOKENS, "segments": SEGMENTS, "weights": WEIGHTS}
READER = "readahead_buffer_size:0"
"""A row is read alone: what lies behind it belongs to other steps."""


def _opened(folder: DataFolder, shards: Sequence[Shard], number: int) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(folder.path(shards[number].name), READER)


class PreparedRows:
    """The rows of one split; a `source.Source`. Several threads may read at once."""

    def __init__(
        self,
        folder: str | Path,
        prepared: Contents,
        split: Split,
        pictures: RowPictures | None = None,
    ) -> None:
        """pictures: those of the run's data; None: rows have no arrays of pictures."""
        self.fields: Fields = {**FIELDS, **(pictures.fields if pictures else {})}
        self._pictures = pictures
        self._folder, self._records = DataFolder(folder), prepared.records
        self._shards = split.shards
        self._ends = np.cumsum([shard.rows for shard in split.shards], dtype=np.int64)
        # The one unused for longest is dropped; it closes once its last read ends.
        opened = functools.partial(_opened, self._folder, self._shards)
        self._reader = functools.lru_cache(MOST_OPEN)(opened)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Row:
        """Return a row; raise OSError, naming the file, if it cannot be read."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._ends, row, side="right"))
        shard = self._shards[number]
        within = row - int(self._ends[number]) + shard.rows
        try:
            (record,) = self._reader(number).read([within])
            found, pictures = self._records.decode(record)
            if self._pictures is None:
                return found
            return {**found, **self._pictures.arrays(pictures)}
        except (RuntimeError, ValueError, IndexError) as error:
            raise OSError(
                f"row {within} of {self._folder.path(shard.name)} cannot be read "
                f"({error}); copy the folder again"
            ) from error


def are_prepared(data: DataConfig) -> bool:
    """Tell if the data is prepared folders; raise ConfigError if some of it is."""
    found = [path for path in data.paths if is_prepared(path)]
    if found and len(found) < len(data.paths):
        other = next(path for path in data.paths if path not in found)
        raise ConfigError(
            f"data.paths: {found[0]} is a prepared folder and {other} is none (it has "
            f"no {MANIFEST}); prepare both, or give one kind"
        )
    if data.weights and not found:
        raise ConfigError(
            f"data.weights = {data.weights}, but {', '.join(data.paths) or 'the text'} "
            f"is no prepared folder; make some with `diloco data prepare`"
        )
    for path in data.paths:
        if is_bucket(path) and not found:
            raise ConfigError(
                f"data.paths: {path} is no prepared folder (it has no {MANIFEST}), and "
                f"of a bucket nothing else is read; make one with `diloco data "
                f"prepare`, copy it there (`gcloud storage rsync -r`), or mount the "
                f"bucket"
            )
    return bool(found)


def tokenizer_of(data: DataConfig) -> str | None:
    """Return the path of the data's tokenizer; "" for bytes, None if it is not known.

    The path is `data.tokenizer`, or that of the file in the prepared folder. Raises
    ConfigError, with both digests, if `data.tokenizer` is not the folder's.
    """
    if not data.paths or not is_prepared(data.paths[0]):
        return data.tokenizer or None
    folder = DataFolder(data.paths[0])
    tokens = read_manifest(data.paths[0]).tokenizer
    if data.tokenizer:
        given = open_tokenizer(data.tokenizer)
        require_digest(tokens.digest, given.digest, str(folder), given.name)
    return str(folder.at_hand(tokens.file)) if tokens.file else ""
