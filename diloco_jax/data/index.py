"""The global index: an endless order of a source's rows, the same on every machine.

Position p is in epoch p // n, n rows to an epoch; each epoch is a permutation of all
rows drawn from (seed, epoch). Islands are leased ranges of positions, so numbers alone
decide which island trains on what.

In a mixture each source has its share of the positions. A source that ends begins anew,
in another order, whatever the others do: position p is row r of epoch e of source s,
and each (s, e, r) has one position.
"""

from __future__ import annotations

from collections.abc import Sequence

import grain

from diloco_jax.data.shares import Shares
from diloco_jax.data.source import Fields, Row, Source, require_row

SEED_STEP, SEEDS = 0x9E3779B1, 1 << 32
"""Distance between the seeds of two sources, and the number of seeds."""


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
        number = int(self._order[position])
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

    def __getitem__(self, position: int) -> Row:
        """Return the row of a position."""
        source, draw = self._shares.draw(position)
        return self._indices[source][draw]
