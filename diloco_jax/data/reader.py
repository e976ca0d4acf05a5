"""Batches of rows in the form that a model takes, read into contiguous arrays.

`B` rows; `T` tokens are predicted of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from diloco_jax.config import ConfigError
from diloco_jax.data.source import DERIVED, Fields, Rows, require_row

Arrays = dict[str, np.ndarray]
"""Arrays of a batch by name, [B, ...]."""


class BatchReader:
    """Rows by number, with the arrays that a model's batch has. Several threads may
    read at a time."""

    def __init__(self, rows: Rows, fields: Fields, sequence_length: int) -> None:
        """fields: of a batch (`source.fields_of_batch`). sequence_length: T. Raises
        ConfigError if the rows have other arrays of these names, or lack one."""
        for name, field in fields.items():
            found = rows.fields.get(name)
            if found is None and name in DERIVED and field.is_like(DERIVED[name]):
                continue
            if found is None or not found.is_like(field):
                raise ConfigError(
                    f"rows have {found or 'nothing'} as {name!r}, and the model takes "
                    f"{field}; change Model.batch or the data (docs/models.md)"
                )
        self.fields, self._rows = fields, rows
        self._derived = set(fields) - set(rows.fields)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: field.shape_of(sequence_length) for name, field in fields.items()
        }
        """Shapes of a row's arrays by name."""
        self.row_bytes = sum(
            np.dtype(field.dtype).itemsize * int(np.prod(self.shapes[name]))
            for name, field in fields.items()
        )

    def empty(self, count: int) -> Arrays:
        """Return arrays for that many rows, whose values are to be `read`."""
        return {
            name: np.empty((count, *self.shapes[name]), field.dtype)
            for name, field in self.fields.items()
        }

    def read(self, number: int, into: Arrays, place: int) -> None:
        """Write a row to its place in a batch.

        Raises ConfigError if an array has not the shape that its source says.
        """
        row = require_row(self._rows[number], number)
        for name, array in into.items():
            value = row.get(name)
            if name in self._derived:
                array[place] = 1
            elif value is None or value.shape != array.shape[1:]:
                found = "no" if value is None else f"{value.shape} as shape of"
                raise ConfigError(
                    f"row {number} has {found} {name!r}, and its source says "
                    f"{array.shape[1:]}"
                )
            else:
                array[place] = value

    def batch(self, numbers: np.ndarray) -> Arrays:
        """Return the rows of int64 [B] numbers."""
        arrays = self.empty(len(numbers))
        for place, number in enumerate(numbers):
            self.read(int(number), arrays, place)
        return arrays
