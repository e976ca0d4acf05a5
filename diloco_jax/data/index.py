"""The global index: an endless order of a source's rows, the same on every machine.

Position p is in epoch p // n, n rows to an epoch; each epoch is a permutation of all
rows drawn from (seed, epoch). Islands are leased ranges of positions, so numbers alone
decide which island trains on what.
"""

from __future__ import annotations

import grain

from diloco_jax.data.source import Fields, Row, Source


class GlobalIndex:
    """Rows of one source by position, without a table in memory."""

    def __init__(self, source: Source, seed: int) -> None:
        self._source = source
        rows = grain.MapDataset.range(len(source)).seed(seed)
        self._order = rows.shuffle().repeat()

    @property
    def fields(self) -> Fields:
        """Arrays of every row by name."""
        return self._source.fields

    def __getitem__(self, position: int) -> Row:
        """Return the row of a position."""
        return self._source[int(self._order[position])]
