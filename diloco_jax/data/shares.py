"""Divide the positions of a mixture among its sources, by arithmetic alone.

The weights are scaled to whole numbers, which add up to the slots of a period. In each
period a source has as many slots as its number. They are spread evenly: over any
positions from the first on, its share is less than one row off. Only the slots are kept
in memory, no table of rows.
"""

from __future__ import annotations

import fractions
import heapq
import math
from collections.abc import Sequence

import numpy as np

MOST_SLOTS = 10_000
"""Slots of a period; weights that need more are rounded to these."""


class Shares:
    """Positions 0, 1, ... without end, divided among sources.

    Each position is one draw of one source: `draw` returns it, and `position` inverts
    that.
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
        self._places = [np.flatnonzero(column) for column in hits.T]

    def draw(self, position: int) -> tuple[int, int]:
        """Return the source of a position, and the number of that source's draw."""
        period, slot = divmod(position, self.period)
        source = int(self._order[slot])
        return source, period * self.slots[source] + int(self._before[slot, source])

    def position(self, source: int, draw: int) -> int:
        """Return the position of a source's draw."""
        period, number = divmod(draw, self.slots[source])
        return period * self.period + int(self._places[source][number])

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
