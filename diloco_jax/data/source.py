"""Rows by number, the arrays that a row has, and the shares of a mixture.

A row is a mapping of arrays by name. The names are known beforehand, so that steps are
compiled without a row. `T` tokens are predicted of each row.

In a mixture, `Shares` divide the positions among the sources by arithmetic alone. The
weights are scaled to whole numbers, which add up to the slots of a period. In each
period a source has as many slots as its number. They are spread evenly: over any
positions from the first on, its share is less than one row off. Only the slots are kept
in memory, no table of rows.
"""

from __future__ import annotations

import bisect
import fractions
import heapq
import itertools
import math
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
        self.fields: Fields = source.fields

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


class Skipping:
    """The rows of a source, of which nobody learns from some: their weights are 0."""

    def __init__(self, source: Source, ranges: Collection[tuple[int, int]]) -> None:
        """ranges: first row of each, and the one after the last."""
        self._source = source
        # Bounds of the ranges that touch no other: as many as a spike has rows.
        self._bounds: list[int] = []
        for first, stop in sorted(ranges):
            if self._bounds and first <= self._bounds[-1]:
                self._bounds[-1] = max(self._bounds[-1], stop)
            else:
                self._bounds += (first, stop)
        self.fields: Fields = {**source.fields, "weights": WEIGHTS}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, row: int) -> Row:
        found = require_row(self._source[row], row)
        skipped = bool(bisect.bisect_right(self._bounds, row) % 2)
        weights = found.get("weights")
        if weights is None or skipped:
            length = len(found["tokens"]) - 1
            weights = np.full(length, not skipped, np.float32)
        return {**found, "weights": weights}


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


MOST_SLOTS = 10_000
"""Slots of a period; weights that need more are rounded to these."""


class Shares:
    """Positions 0, 1, ... without end, divided among sources.

    Each position is one draw of one source.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """weights: above 0, in proportion to the shares.

        Raises ValueError if one has no slot of its own in `MOST_SLOTS`.
        """
        self.slots = slots_of(weights)
        self.period = sum(self.slots)
        self._order = _spread(self.slots)
        hits = self._order[:, None] == np.arange(len(self.slots))
        self._before = np.concatenate(
            (np.zeros((1, len(self.slots)), np.int64), np.cumsum(hits, axis=0))
        )

    def draw(self, position: int) -> tuple[int, int]:
        """Return the source of a position, and the number of that source's draw."""
        period, slot = divmod(position, self.period)
        source = int(self._order[slot])
        return source, period * self.slots[source] + int(self._before[slot, source])

    def drawn(self, start: int, stop: int) -> list[int]:
        """Return the number of draws of each source at positions [start, stop)."""
        return [int(n) for n in self._until(stop) - self._until(start)]

    def _until(self, position: int) -> np.ndarray:
        period, slot = divmod(position, self.period)
        counts: np.ndarray = period * np.array(self.slots) + self._before[slot]
        return counts


def slots_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the whole numbers in these proportions: exact ones if they add up to
    `MOST_SLOTS` or less, else rounded ones that add up to it.

    Raises ValueError if one becomes 0.
    """
    exact = [fractions.Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    total = sum(whole)
    if total > MOST_SLOTS:
        rounded = [number * MOST_SLOTS // total for number in whole]
        rest = [number * MOST_SLOTS % total for number in whole]
        most = sorted(range(len(whole)), key=lambda i: -rest[i])
        for index in most[: MOST_SLOTS - sum(rounded)]:
            rounded[index] += 1
        whole = rounded
    if 0 in whole:
        small = weights[whole.index(0)]
        raise ValueError(
            f"the weight {small:g} is less than 1 in {MOST_SLOTS} of their sum, "
            f"{float(sum(exact)):g}"
        )
    return tuple(whole)


def _spread(slots: Sequence[int]) -> np.ndarray:
    """Return the source of each slot of a period, int16 [slots].

    The k-th draw of a source, from 0, lies between the slots at which its share passes
    k and k + 1. Each slot goes to the draw with the earliest deadline, which meets all
    deadlines (Balinski and Young's quota method).
    """
    period = sum(slots)
    order = np.empty(period, np.int16)
    waiting = [(0, source, 0) for source in range(len(slots))]  # by first slot
    ready: list[tuple[int, int, int]] = []  # by last slot
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source, draw = heapq.heappop(waiting)
            last = -(-(draw + 1) * period // slots[source]) - 1
            heapq.heappush(ready, (last, source, draw))
        last, source, draw = heapq.heappop(ready)
        assert last >= slot, "a draw is late"
        order[slot] = source
        if draw + 1 < slots[source]:
            first = (draw + 1) * period // slots[source]
            heapq.heappush(waiting, (first, source, draw + 1))
    return order
