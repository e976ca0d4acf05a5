"""Rows by number, and the arrays that a row has.

A row is a mapping of arrays by name. The names are known beforehand, so that steps are
compiled without a row. `T` tokens are predicted of each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from diloco_jax.config import ConfigError

Row = Mapping[str, np.ndarray]
"""One row's arrays by name; a batch has one more axis, in front."""


class Field(NamedTuple):
    """One array of a row: its dtype and its shape."""

    dtype: str
    beyond: int | None = 0
    """Positions beyond T along the first axis; None: it has no axis of positions."""
    shape: tuple[int, ...] = ()
    """Axes after that of positions."""
    optional: bool = False
    """In `Model.batch`: the model does without it where the data lacks it."""

    def shape_of(self, sequence_length: int) -> tuple[int, ...]:
        """Return the shape in a row. sequence_length: T."""
        if self.beyond is None:
            return self.shape
        return (sequence_length + self.beyond, *self.shape)

    def is_like(self, other: Field) -> bool:
        """Tell if both are the same array, whether or not it may be missing."""
        return self._replace(optional=False) == other._replace(optional=False)

    def __str__(self) -> str:
        """Return dtype and shape as a reader writes them."""
        axes = list(map(str, self.shape))
        if self.beyond is not None:
            axes.insert(0, f"T + {self.beyond}" if self.beyond else "T")
        return f"{self.dtype}[{', '.join(axes)}]"


Fields = Mapping[str, Field]

TOKENS = Field("int32", 1)
"""Token numbers, [T + 1]: inputs, and one place later targets."""
SEGMENTS = Field("int32", 1)
"""Document of each token, [T + 1]: 1, 2, ... from left to right, 0 = padding. Data with
segments is packed: nothing crosses from one document to another."""
WEIGHTS = Field("float32", 0)
"""Weight of each prediction, [T]; 0 where it does not count."""
SOURCE = Field("int32", None)
"""Number of the row's source in a mixture, [], from 0."""
DERIVED = {"segments": SEGMENTS, "weights": WEIGHTS}
"""Arrays that are ones where the data lacks them, which is exact: a row is one
document, and all of its predictions count."""


class Rows(Protocol):
    """Rows by number. Several threads may read at once."""

    @property
    def fields(self) -> Fields:
        """Arrays of every row by name: "tokens" (`TOKENS`); "segments" (`SEGMENTS`) if
        rows are packed; "weights" (`WEIGHTS`) if some predictions do not count;
        "source_number" (`SOURCE`) in a mixture; any others that a model asks for."""
        ...

    def __getitem__(self, row: int) -> Row:
        """Return a row, with exactly the arrays of `fields`."""
        ...


class Source(Rows, Protocol):
    """Rows numbered from 0: of a text, `.npy` tokens, ArrayRecord files or a
    mixture.
    """

    def __len__(self) -> int:
        """Return the number of rows per epoch."""
        ...


def require_row(row: Row | None, number: int) -> Row:
    """Raise ConfigError if there is no row of this number."""
    if row is None:
        raise ConfigError(
            f"row {number} is None: a filter leaves holes in its source; number the "
            f"rows that stay, and give a source of these alone"
        )
    return row


class RowRange:
    """The rows [start, stop) of a source, as a source."""

    def __init__(self, source: Source, start: int, stop: int) -> None:
        self._source, self._start, self._stop = source, start, stop

    @property
    def fields(self) -> Fields:
        """Arrays of every row by name."""
        return self._source.fields

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, row: int) -> Row:
        return self._source[self._start + row]


class Numbered:
    """The rows of one source of a mixture, which tell its number."""

    def __init__(self, source: Source, number: int) -> None:
        self._source = source
        self._number = np.array(number, np.int32)
        self.fields: Fields = {**source.fields, "source_number": SOURCE}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, row: int) -> Row:
        return {**self._source[row], "source_number": self._number}


class Together:
    """The rows of several sources one after the other, as a source."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])
        self.fields: Fields = sources[0].fields

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Row:
        """Return a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._ends, row, side="right"))
        source = self._sources[number]
        return source[row - int(self._ends[number]) + len(source)]


def cut(length: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of that many contiguous parts, the first ones longer by 1 where
    the length does not divide."""
    each, rest = divmod(length, count)
    bounds = [part * each + min(part, rest) for part in range(count + 1)]
    return itertools.pairwise(bounds)


def fields_of_batch(asked: Fields, arrays: Collection[str]) -> dict[str, Field]:
    """Return the arrays of a training batch by name.

    Args:
      asked: arrays that a model takes (`Model.batch`).
      arrays: names of the arrays that the data has (`data.arrays`).

    Raises:
      ConfigError: the model cannot take an array of the data, or needs one that the
        data lacks.
    """
    has = ", ".join(sorted(arrays))
    takes = ", ".join(sorted(asked))
    if "segments" in arrays and "segments" not in asked:
        raise ConfigError(
            f"the data is packed (data.arrays = {has}), and the model knows no "
            f"documents (its batch is {takes}): attention would cross them; use a "
            f"model whose batch has 'segments' (docs/models.md), or data that is not "
            f"packed"
        )
    found = {}
    for name, field in asked.items():
        if name in arrays or (name in DERIVED and not field.optional):
            found[name] = field
        elif not field.optional:
            raise ConfigError(
                f"the model needs {name!r}, {field}, in each row (its batch is "
                f"{takes}), and the data has {has} (data.arrays); use data that has "
                f"it (data.paths, data.factory), or declare it as optional"
            )
    if "weights" in arrays:
        found["weights"] = WEIGHTS  # Every loss takes them, as in validation.
    if "source_number" in arrays:
        found.setdefault("source_number", SOURCE)  # The step adds up losses by it.
    return found
