"""Rows by number, and the arrays that a row has.

`T` tokens predicted of each row. A row is a mapping of arrays by name; which ones there
are is known beforehand, so that steps are compiled without a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

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


TOKENS = Field("int32", 1)
"""Token numbers, [T + 1]: inputs, and one place later targets."""
SEGMENTS = Field("int32", 1)
"""Document of each token, [T + 1]: 1, 2, ... from left to right, 0 = padding. A row
with more than one is packed: nothing crosses from one to another."""
WEIGHTS = Field("float32", 0)
"""Weight of each prediction, [T]; 0 where it does not count."""


class Source(Protocol):
    """Rows by number: what windows of a text, `.npy` tokens, ArrayRecord and mixtures
    have in common. Several threads read at a time."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """Arrays of every row by name: "tokens" (`TOKENS`); "segments" (`SEGMENTS`) if
        rows are packed; "weights" (`WEIGHTS`) if some predictions do not count; any
        others that a model asks for."""
        ...

    def __len__(self) -> int:
        """Return the number of rows per epoch."""
        ...

    def __getitem__(self, row: int) -> Row:
        """Return a row, 0 <= row < len, with exactly the arrays of `fields`."""
        ...
