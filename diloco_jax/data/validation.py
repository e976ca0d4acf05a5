"""Validation batches: every prediction of the validation source exactly once.

`B` rows; `T` tokens are predicted of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diloco_jax.data.reader import Arrays, BatchReader
from diloco_jax.data.source import WEIGHTS, Fields, Source
from diloco_jax.data.stream import Batch, Range, by_range


class ValidationBatches:
    """A sequence of equally shaped batches in the order of the source. They always have
    "weights", which are 0 in rows that fill up the last batch."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        fields: Fields,
        sequence_length: int,
        *,
        bytes_per_token: float | None = 1.0,
    ):
        """fields: of a training batch. bytes_per_token: of the text, for each token
        predicted; None where that is unknown."""
        fields = {**fields, "weights": WEIGHTS}
        self.batch_size = batch_size
        self.bytes_per_token = bytes_per_token
        self._reader = BatchReader(source, fields, sequence_length)
        self._count = len(source)
        self._own: tuple[Range, ...] = ()

    def read_only(self, own: Sequence[Range]) -> None:
        """Read only these rows of every batch from now on; all rows if `own` is
        empty.
        """
        self._own = tuple(dict.fromkeys(own))

    def __len__(self) -> int:
        return -(-self._count // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        own = self._own or ((0, self.batch_size),)
        first = index * self.batch_size
        numbers = np.concatenate([np.arange(a, b) + first for a, b in own])
        arrays = self._read(numbers)
        return by_range(arrays, self._own, self.batch_size)

    def _read(self, numbers: np.ndarray) -> Arrays:
        """Return these rows; zeros in place of those that the source does not have."""
        arrays = self._reader.empty(len(numbers))
        for place, number in enumerate(numbers):
            if number < self._count:
                self._reader.read(int(number), arrays, place)
            else:
                for array in arrays.values():
                    array[place] = 0
        return arrays

    def spread(self, count: int) -> list[int]:
        """Return the indices of at most `count` batches, evenly over the source."""
        count = min(count, len(self))
        return [i * len(self) // count for i in range(count)]
