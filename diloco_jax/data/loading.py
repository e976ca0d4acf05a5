"""Load the data of a run for training and evaluation: text, tokens, rows or your own.

The global index is an endless order of a source's rows, the same on every machine.
Position p is in epoch p // n, n rows to an epoch; each epoch is a permutation of all
rows drawn from (seed, epoch). Islands are leased ranges of positions, so numbers alone
decide which island trains on what.

In a mixture each source has its share of the positions. A source that ends begins anew,
in another order, whatever the others do: position p is row r of epoch e of source s,
and each (s, e, r) has one position.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from diloco_jax.config import ConfigError, DataConfig, RunConfig
from diloco_jax.core.members import load, said
from diloco_jax.data.corpus import ValidationWindows, Windows, load_checked_corpus
from diloco_jax.data.pictures import RowPictures
from diloco_jax.data.prepared import (
    SAMPLES,
    TRAIN,
    VALIDATION,
    Contents,
    DataFolder,
    PreparedRows,
    are_prepared,
    read_manifest,
    require_whole,
    tokenizer_of,
)
from diloco_jax.data.reader import BatchReader
from diloco_jax.data.source import (
    Fields,
    Numbered,
    Row,
    RowRange,
    Shares,
    Skipping,
    Source,
    Together,
    cut,
    require_row,
    slots_of,
)
from diloco_jax.data.tokenizers import (
    open_tokenizer,
    require_digest,
    require_tokenizer,
)
from diloco_jax.protocol.messages import MAX_SOURCES

SEED_STEP, SEEDS = 0x9E3779B1, 1 << 32
"""Distance between the seeds of two sources, and the number of seeds."""


class GlobalIndex:
    """Rows of one source by position, without a table in memory."""

    def __init__(self, source: Source, seed: int) -> None:
        # It takes as long as jax to import, and the coordinator draws no rows.
        import grain

        self._source, self.fields = source, source.fields
        rows = grain.MapDataset.range(len(source)).seed(seed)
        self._order = rows.shuffle().repeat()

    def number(self, position: int) -> int:
        """Return the number of a position's row."""
        return int(self._order[position])

    def __getitem__(self, position: int) -> Row:
        """Return the row of a position."""
        number = self.number(position)
        return require_row(self._source[number], number)


class Mixture:
    """Rows of several sources by position, without a table of rows in memory."""

    def __init__(self, sources: Sequence[Source], shares: Shares, seed: int) -> None:
        """sources: with the same arrays, in the order of the shares."""
        self._shares = shares
        # Sources of one length do not go through their rows in step.
        self._indices = [
            GlobalIndex(source, (seed + number * SEED_STEP) % SEEDS)
            for number, source in enumerate(sources)
        ]
        self.fields: Fields = sources[0].fields
        self._begins = np.cumsum([0, *map(len, sources)])

    def number(self, position: int) -> int:
        """Return the number of a position's row in all sources one after the other."""
        source, draw = self._shares.draw(position)
        return int(self._begins[source]) + self._indices[source].number(draw)

    def __getitem__(self, position: int) -> Row:
        """Return the row of a position."""
        source, draw = self._shares.draw(position)
        return self._indices[source][draw]


MOST_ROWS = 2**32
"""Rows of an epoch that the global index can shuffle."""
ROWS_TRIED = 16
"""Rows that a start asks of data of the user's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The rows that a run trains and validates on."""

    train: Source
    validation: Source
    """Rows in which everything that is held out is predicted once."""
    digest: str
    """16 hex digits over all of it."""
    largest: int
    """Highest token."""
    bytes_per_token: float | None
    """Bytes of the validation text for each token predicted; None if unknown."""
    mixed: tuple[Source, ...] = ()
    """The sources that `train` has one after the other, if each has its own share."""
    weights: tuple[float, ...] = ()
    """Shares of `mixed`, in any scale."""
    held_out: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    """Parts of `validation` by name, each with a loss of its own; none: it is one."""
    pictures: RowPictures | None = None
    """The pictures of rows that have the arrays of its `fields`."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays of a row, in order, as `data.arrays` has them."""
        return tuple(sorted(self.train.fields))

    def index(self, seed: int) -> GlobalIndex | Mixture:
        """Return the training rows by position of the global index."""
        if self.mixed:
            return Mixture(self.mixed, Shares(self.weights), seed)
        return GlobalIndex(self.train, seed)

    def skipping(self, ranges: Sequence[tuple[int, int]]) -> Data:
        """Return the data in the same order, of which some rows have no weight. ranges:
        first row in `train` of each, and the one after the last.

        Raises ConfigError for rows that there are not."""
        for first, stop in ranges:
            if not 0 <= first < stop <= len(self.train):
                raise ConfigError(
                    f"skip_rows has {first} {stop}, and the training data has rows 0 "
                    f"to {len(self.train) - 1}; give FIRST below STOP, of rows it has"
                )
        sources, before = [], 0
        for source in self.mixed or (self.train,):
            own = [(first - before, stop - before) for first, stop in ranges]
            sources.append(Skipping(source, own))
            before += len(source)
        mixed = tuple(sources) if self.mixed else ()
        return dataclasses.replace(self, train=Together(sources), mixed=mixed)

    def parts(self, count: int) -> Sequence[Source]:
        """Return the training data in that many parts, one after the other: a text is
        cut anywhere, other data between rows."""
        if isinstance(self.train, Windows):
            return self.train.parts(count)
        return [RowRange(self.train, a, b) for a, b in cut(len(self.train), count)]


def load_data(run: RunConfig, *, copied: bool = False) -> Data:
    """Load a run's data.

    Raises ConfigError if the data is not the run's, fills no window, or holds nothing
    out. copied: the files are copies, and their manifests are believed (`load_corpus`).
    """
    if run.data.factory:
        data = _own(run)
    elif are_prepared(run.data):
        data = _prepared(run)
    else:
        data = _corpus(run, copied)
    if run.data.digest and set(data.arrays) != set(run.data.arrays):
        raise ConfigError(
            f"data.arrays = {', '.join(run.data.arrays)} in the run's config, but rows "
            f"of the data here have {', '.join(data.arrays)}; give the run's data "
            f"(--data.paths)"
        )
    return data


def _corpus(run: RunConfig, copied: bool) -> Data:
    """Return text or `.npy` tokens, in windows."""
    corpus, length = load_checked_corpus(run.data, copied=copied), run.sequence_length
    return Data(
        train=Windows(corpus.train, length),
        validation=ValidationWindows(corpus.validation, length),
        digest=corpus.digest,
        largest=corpus.largest,
        bytes_per_token=1.0 if corpus.of_bytes else None,
    )


def _prepared(run: RunConfig) -> Data:
    """Return the rows of prepared folders: read their manifests, compare sizes and a
    few chunks of their files. Raise ConfigError if they are not the run's."""
    data = run.data
    paths = [str(DataFolder(path)) for path in data.paths]
    if doubled := {path for path in paths if paths.count(path) > 1}:
        raise ConfigError(
            f"data.paths names {min(doubled)} {paths.count(min(doubled))} times; give "
            f"it once, and the sum of its weights in data.weights"
        )
    found = [read_manifest(path) for path in paths]
    for path, prepared in zip(paths, found, strict=True):
        if prepared.sequence_length != run.sequence_length:
            raise ConfigError(
                f"sequence_length = {run.sequence_length}, but the rows of {path} have "
                f"{prepared.sequence_length} predicted tokens; set it to "
                f"{prepared.sequence_length}, or prepare the data again with "
                f"--sequence-length {run.sequence_length}"
            )
        require_digest(
            prepared.tokenizer.digest,
            found[0].tokenizer.digest,
            path,
            f"that of {paths[0]}",
        )
    weights = _weights(data, [prepared.train.counts.rows for prepared in found])
    digest = _digest(found, weights)
    if data.digest and data.digest != digest:
        raise ConfigError(
            f"data.digest = {data.digest} in the run's config, but the data here "
            f"({', '.join(data.paths)}) has {digest}; give the run's folders "
            f"(--data.paths), in its order and with its data.weights"
        )
    for path, prepared in zip(paths, found, strict=True):
        require_whole(path, prepared, max(1, SAMPLES // len(paths)))
    counts = [prepared.validation.counts for prepared in found]
    pictures = _pictures(data, paths, found)

    def rows(split: str) -> list[Source]:
        pairs = zip(paths, found, strict=True)
        made = [PreparedRows(p, f, getattr(f, split), pictures) for p, f in pairs]
        if not weights:
            return list(made)
        return [Numbered(source, number) for number, source in enumerate(made)]

    train, validation = rows(TRAIN), rows(VALIDATION)
    return Data(
        train=Together(train),
        validation=Together(validation),
        digest=digest,
        largest=max(max(f.train.largest, f.validation.largest) for f in found),
        bytes_per_token=sum(c.text_bytes for c in counts)
        / sum(c.predicted for c in counts),
        mixed=tuple(train) if weights else (),
        weights=weights,
        held_out=dict(zip(data.paths, validation, strict=True)) if weights else {},
        pictures=pictures,
    )


def _pictures(
    data: DataConfig, paths: Sequence[str], found: Sequence[Contents]
) -> RowPictures | None:
    """Return the pictures of all folders together, None if no folder has any. Raise
    ConfigError for folders of unlike placeholders, and rows of more than the run's
    most."""
    having = [(p, f.pictures) for p, f in zip(paths, found, strict=True) if f.pictures]
    if not having:
        return None
    (first, most), *_ = having
    for path, pictures in having:
        ours = pictures.tokens, pictures.token
        if ours != (theirs := (most.tokens, most.token)):
            raise ConfigError(
                f"data.paths: a picture of {path} has {ours[0]} placeholders of token "
                f"{ours[1]}, one of {first} {theirs[0]} of {theirs[1]}; prepare both "
                f"with the same --picture-tokens and tokenizer"
            )
        if 0 < data.pictures < pictures.most:
            raise ConfigError(
                f"data.pictures = {data.pictures}, and a row of {path} has "
                f"{pictures.most} pictures; raise it, or prepare the folder again with "
                f"--pictures-per-row {data.pictures}"
            )
    largest = max(pictures.most for _, pictures in having)
    return msgspec.structs.replace(most, most=data.pictures or largest)


def _weights(data: DataConfig, rows: Sequence[int]) -> tuple[float, ...]:
    """Return the shares of several folders, by their rows if none are given."""
    weights = data.weights or tuple(map(float, rows))
    if len(weights) != len(rows):
        raise ConfigError(
            f"data.weights has {len(weights)} numbers, data.paths {len(rows)} folders; "
            f"give one number for each folder"
        )
    if len(rows) > MAX_SOURCES:
        raise ConfigError(
            f"data.paths has {len(rows)} folders, and a mixture has at most "
            f"{MAX_SOURCES}; prepare several together"
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f"data.weights = {weights}; each has to be above 0, and finite"
        )
    try:
        slots_of(weights)
    except ValueError as error:
        raise ConfigError(
            f"data.weights: {error}; raise it, leave its folder out, or prepare small "
            f"folders together"
        ) from error
    return weights if len(rows) > 1 else ()


def _digest(found: Sequence[Contents], weights: Sequence[float]) -> str:
    """Return the digest of one folder, or of several and their shares."""
    if not weights:
        return found[0].digest
    parts = [prepared.digest for prepared in found]
    return hashlib.sha256(f"{parts}:{slots_of(weights)}".encode()).hexdigest()[:16]


def _own(run: RunConfig) -> Data:
    """Return the data of `data.factory`; raise ConfigError if it makes none."""
    where = f"data.factory = {run.data.factory!r}"
    try:
        data = load(run.data.factory)(run)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} failed: {said(error)}") from error
    if not isinstance(data, Data):
        raise ConfigError(
            f"{where} returned {type(data).__name__}; it must return a "
            f"diloco_jax.data.loading.Data"
        )
    if run.data.digest not in ("", data.digest):
        raise ConfigError(
            f"data.digest = {run.data.digest} in the run's config, but the data of "
            f"{where} has {data.digest} here; give the run's data"
        )
    if not data.digest:
        raise ConfigError(
            f"{where}: digest is empty; give one that changes with the data"
        )
    for name, source in (("train", data.train), ("validation", data.validation)):
        tried = 0
        try:
            if not len(source):
                raise ConfigError("has no row; it needs one")
            if len(source) > MOST_ROWS:
                raise ConfigError(
                    f"has {len(source):,} rows, and at most {MOST_ROWS:,} are "
                    f"shuffled; `.repeat()` has no end: leave it out, since a run "
                    f"repeats its epochs by itself"
                )
            for tried in range(0, len(source), -(-len(source) // ROWS_TRIED)):
                require_row(source[tried], tried)
            tried, row = 0, source[0]
            for key, field in source.fields.items():
                value = row.get(key)
                if not isinstance(value, np.ndarray) or value.dtype != field.dtype:
                    found = getattr(value, "dtype", type(value).__name__)
                    raise ConfigError(
                        f"row 0: {key!r} is {found}, and its field says {field.dtype}"
                    )
            tokens = BatchReader(source, source.fields, run.sequence_length).batch(
                np.zeros(1, np.int64)
            )["tokens"]
            if not 0 <= tokens.min() <= tokens.max() <= data.largest:
                raise ConfigError(
                    f"row 0 has tokens from {tokens.min()} to {tokens.max()}, and "
                    f"largest = {data.largest}; give the highest token"
                )
        except ConfigError as error:
            raise ConfigError(f"{where}: {name} {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{where}: row {tried} of {name} cannot be read: {said(error)}"
            ) from error
    return data


def require_vocabulary(data: Data, run: RunConfig) -> None:
    """Raise ConfigError if the bundled model has no place for a token. The vocabulary
    of a user's own model is not known here."""
    model, path = run.model, tokenizer_of(run.data)
    tokenizer = None if path is None else open_tokenizer(path)
    if data.largest >= model.vocab_size and not model.factory:
        word = tokenizer.word(data.largest) if tokenizer else ""
        size = max(data.largest + 1, tokenizer.vocab_size if tokenizer else 0)
        remedy = f"set it to {size} or more"
        if model.weights:
            remedy = "its weights have no row for it: make the data again without it"
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size}, but the tokens go up to "
            f"{data.largest}{f' ({word})' if word else ''}; {remedy}"
        )
    if tokenizer is not None:
        require_tokenizer(tokenizer, model, path or "the data")
