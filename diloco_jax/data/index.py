"""The global index: an endless order of a source's rows, the same on every machine.

Position p is in epoch p // n, n rows to an epoch; each epoch is a permutation of all
rows drawn from (seed, epoch). Islands are leased ranges of positions, so numbers alone
decide which island trains on what. `B` rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import grain

from diloco_jax.data.source import Field, Row, Source


class Index(Protocol):
    """Rows by position, without end."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """Arrays of every row by name, as `Source.fields`."""
        ...

    def row(self, position: int) -> Row:
        """Return the row of a position, from 0."""
        ...


class GlobalIndex:
    """The index of one source, without a table in memory."""

    def __init__(self, source: Source, seed: int):
        self._source = source
        rows = grain.MapDataset.range(len(source)).seed(seed)
        self._order = rows.shuffle().repeat()

    @property
    def fields(self) -> Mapping[str, Field]:
        """Arrays of every row by name."""
        return self._source.fields

    def row(self, position: int) -> Row:
        """Return the row of a position."""
        return self._source[int(self._order[position])]
