"""Several sources in one global index, each with its share of the positions.

A source that ends begins anew, in another order, whatever the others do: position p is
row r of epoch e of source s, and each (s, e, r) has one position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diloco_jax.data.index import GlobalIndex
from diloco_jax.data.shares import Shares
from diloco_jax.data.source import Fields, Row, Source

SEED_STEP, SEEDS = 0x9E3779B1, 1 << 32
"""Apart from one source's seed to the next one's, and seeds that there are."""


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
