"""Sums by bins of time: the whole of a run in bounded memory, for any width of screen.

Shapes: `F` fields, `R` rows (the coordinator and the islands), `B` bins, `C` columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BINS = 4096
WIDTH_S = 0.25
"""Seconds of a bin at first."""

Array = npt.NDArray[np.float64]


class Grid:
    """Sums of quantities by field, row and bin.

    When a run outgrows its bins, each two of them become one, and a bin is twice as
    long: an hour has bins of one second, a week has bins of four minutes.
    """

    def __init__(
        self, fields: Sequence[str], bins: int = BINS, width_s: float = WIDTH_S
    ) -> None:
        """bins: even number B. width_s: seconds of a bin at first."""
        self.width_s = width_s
        self.begin: float | None = None
        """Unix time at which the first bin begins; None before anything is added."""
        self.rows = 0
        self._index = {name: number for number, name in enumerate(fields)}
        self._bins = bins
        self._sums = np.zeros((len(fields), 0, bins), np.float32)

    def new_row(self) -> int:
        """Return the number of one more row."""
        self.rows += 1
        fields, room, bins = self._sums.shape
        if self.rows > room:
            larger = np.zeros((fields, max(4, 2 * room), bins), np.float32)
            larger[:, :room] = self._sums
            self._sums = larger
        return self.rows - 1

    def add(self, field: str, row: int, time: float, value: float) -> None:
        """Add a value to the bin of a time, in unix seconds."""
        self._sums[self._index[field], row, int(self._place(time))] += value

    def spread(
        self, field: str, row: int, start: float, stop: float, value: float
    ) -> None:
        """Add a value evenly over [start, stop), in unix seconds."""
        if self.begin is None:
            self.begin = start
        last = self._place(stop)
        # After the last one: its bins may have become longer.
        first = max(0.0, (start - self.begin) / self.width_s)
        if last <= first:
            return
        sums = self._sums[self._index[field], row]
        low, high = int(first), int(last)
        if low == high:
            sums[low] += value
            return
        each = value / (last - first)
        sums[low] += each * (low + 1 - first)
        if high > low + 1:
            sums[low + 1 : high] += each
        sums[high] += each * (last - high)

    def columns(
        self,
        fields: Sequence[str],
        start: float,
        stop: float,
        count: int,
        rows: slice = slice(None),
    ) -> Array:
        """Return sums [F, R, C] of `count` equal columns of [start, stop), of these
        rows.

        What lies in a bin counts as spread evenly over it.
        """
        numbers = [self._index[name] for name in fields]
        rows = slice(*rows.indices(self.rows))
        if self.begin is None or stop <= start:
            return np.zeros((len(fields), rows.stop - rows.start, count))
        edges = np.linspace(start, stop, count + 1) - self.begin
        edges = np.clip(edges / self.width_s, 0, self._bins)
        low, high = int(edges[0]), int(np.ceil(edges[-1]))
        part = self._sums[numbers, rows, low:high]
        until = np.zeros((*part.shape[:2], high - low + 1))
        np.cumsum(part, axis=-1, out=until[..., 1:])
        whole = np.minimum((edges - low).astype(int), max(high - low - 1, 0))
        rest = edges - low - whole
        after = np.minimum(whole + 1, high - low)
        reached = until[..., whole] + rest * (until[..., after] - until[..., whole])
        found: Array = np.diff(reached, axis=-1)
        return found

    def totals(self, fields: Sequence[str], start: float, stop: float) -> Array:
        """Return sums [F, R] of [start, stop)."""
        numbers = [self._index[name] for name in fields]
        if self.begin is None or stop <= start:
            return np.zeros((len(fields), self.rows))
        ends = (np.array([start, stop]) - self.begin) / self.width_s
        first, last = np.clip(ends, 0, self._bins)
        low, high = int(first), int(np.ceil(last))
        bins = np.arange(low, high)
        shares = np.minimum(bins + 1, last) - np.maximum(bins, first)
        found: Array = self._sums[numbers, : self.rows, low:high] @ shares
        return found

    def _place(self, time: float) -> float:
        """Return a time as a number of bins; make bins longer until it is within."""
        if self.begin is None:
            self.begin = time
        while (place := (time - self.begin) / self.width_s) >= self._bins:
            self._fold()
        return max(0.0, place)

    def _fold(self) -> None:
        half = self._bins // 2
        self._sums[..., :half] = self._sums[..., ::2] + self._sums[..., 1::2]
        self._sums[..., half:] = 0.0
        self.width_s *= 2
