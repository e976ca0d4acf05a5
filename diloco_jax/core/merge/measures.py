"""Measures of a merge: the agreement of the deltas, and the length of the step.

They cost no pass over a fragment and no copy of it. Lengths and, where the rule has
it, |sum w unit(d)|^2 come from the merge itself. All else is computed from a fixed 1/64
of the tiles, at least one per piece; where odd extents make tiles that are too large
for that, from a fixed part of their elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.core.merge.deltas import Deltas
from diloco_jax.core.merge.merging import MergedPiece
from diloco_jax.core.tiles import MOST_ELEMENTS, TileGrid

SAMPLED = 64
"""Number of a piece's tiles per sampled tile."""
FEWEST_DIRECTIONS = 3
"""Deltas of which each is compared with the others; of two, `pairwise_cosine` tells as
much."""

Sample = npt.NDArray[np.float32]
"""f32[rows, elements]: what is looked at of a piece, by sampled tile."""


class MergeMeasures(NamedTuple):
    """Measures of one merge of one fragment. None: the measure does not exist."""

    pairwise_cosine: float | None = None
    """Mean cosine of two islands' deltas, weighted by both weights; by piece, averaged
    by size. None for fewer than two deltas."""
    cosine_to_last: float | None = None
    """Cosine of the merged delta and the fragment's previous one; None for the first
    merge that a process computes."""
    length_ratio: float | None = None
    """Length of the merged delta over the weighted mean of the deltas' lengths."""
    step_ratio: float | None = None
    """Length of the outer step over that of the merged delta."""


class Measuring:
    """Measures of one merge; its pieces are added in order."""

    def __init__(self, weights: Sequence[float]) -> None:
        """weights: the weights of the deltas."""
        total = math.fsum(weights)
        self.sample: list[Sample] = []
        """Sampled tiles of the merged delta, by piece."""
        self._weights = np.array(weights) / total
        self._squares = np.zeros(len(weights))
        self._norms: list[float] = []
        self._cosines: list[tuple[float, int]] = []
        # Of each delta, over the sampled tiles: its product with the weighted sum of
        # the others, its own square and that sum's.
        self._along, self._own, self._others = np.zeros((3, len(weights)))

    def add(self, deltas: Deltas, piece: MergedPiece) -> None:
        """Add the next piece."""
        self.sample.append(sample(piece.total) * np.float32(piece.factor))
        squares = np.array(deltas.squares)
        self._squares += squares
        self._norms.append(math.sqrt(piece.square))
        weights = np.where(squares > 0, self._weights, 0.0)
        pairs = weights.sum() ** 2 - np.square(weights).sum()
        if pairs > 0 and np.count_nonzero(weights) > 1:
            if piece.direction_square is not None:
                along = piece.direction_square
            else:
                along = _direction_square(deltas, weights)
            cosine = (along - np.square(weights).sum()) / pairs
            self._cosines.append((float(cosine), piece.total.size))
        if len(squares) >= FEWEST_DIRECTIONS:
            self._add_directions(deltas)

    @property
    def norm(self) -> float:
        """Length of the merged delta."""
        return math.hypot(*self._norms)

    @property
    def directions(self) -> tuple[float | None, ...]:
        """Cosine of each delta with the weighted sum of the others, in their order;
        empty if there are fewer than `FEWEST_DIRECTIONS`."""
        if len(self._own) < FEWEST_DIRECTIONS:
            return ()
        lengths = np.sqrt(self._own * self._others)
        return tuple(map(_ratio, self._along, lengths))

    def _add_directions(self, deltas: Deltas) -> None:
        # Each is decoded twice, so that one at a time is in memory.
        total: Any = 0.0
        for island, weight in enumerate(self._weights):
            total = total + sampled(deltas, island) * np.float32(weight)
        whole = _square(total)
        for island, weight in enumerate(self._weights):
            own = sampled(deltas, island)
            product, square = float(np.vdot(own, total)), _square(own)
            others = whole - 2 * weight * product + weight**2 * square
            self._along[island] += product - weight * square
            self._own[island] += square
            self._others[island] += max(others, 0.0)

    def finish(
        self,
        last: Sequence[Sample],
        before: Sequence[Sample],
        after: Sequence[Sample],
    ) -> MergeMeasures:
        """Return the four measures.

        Args:
          last: `sample` of the fragment's previous merge; empty if unknown.
          before, after: `sample` of the global parameters around the outer step, by
            piece.
        """
        size = sum(size for _, size in self._cosines)
        pairwise = sum(cosine * size for cosine, size in self._cosines)
        to_last = _dot(self.sample, last) if last else 0.0
        lengths = _length(self.sample) * _length(last)
        steps = [new - old for old, new in zip(before, after, strict=True)]
        mean_length = float(self._weights @ np.sqrt(self._squares))
        return MergeMeasures(
            pairwise_cosine=_ratio(pairwise, size),
            cosine_to_last=_ratio(to_last, lengths),
            length_ratio=_ratio(self.norm, mean_length),
            step_ratio=_ratio(_length(steps), _length(self.sample)),
        )


def sample(tiles: npt.NDArray[np.float32]) -> Sample:
    """Copy what is looked at of f32[tiles, elements]."""
    return tiles[::SAMPLED, :: _every(*tiles.shape)].copy()


def sampled(deltas: Deltas, island: int) -> npt.NDArray[np.float32]:
    """Return what is looked at of a delta, f32[rows, elements]; decode nothing else."""
    every = _every(*TileGrid.of(deltas.shape).in_order)
    return np.asarray(deltas.tiles(island, slice(None, None, SAMPLED), every))


def sample_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of what is looked at of an f32 array."""
    tiles, elements = TileGrid.of(shape).in_order
    return (
        4 * math.ceil(tiles / SAMPLED) * math.ceil(elements / _every(tiles, elements))
    )


def _every(tiles: int, elements: int) -> int:
    """Return the distance of the elements that are looked at in a sampled tile.

    It is 1 unless the tile has more than `MOST_ELEMENTS`; then about that many are
    looked at, or 1/64 of the piece. A power of two shares no factor with odd extents.
    """
    most = min(SAMPLED // tiles, elements // MOST_ELEMENTS)
    return 1 << max(0, most.bit_length() - 1)


def _direction_square(deltas: Deltas, weights: npt.NDArray[Any]) -> float:
    """Return |sum w unit(d)|^2 over the sampled tiles."""
    along: Any = 0.0
    for island, weight in enumerate(weights):
        if weight > 0:
            tiles = sampled(deltas, island)
            norm = float(np.linalg.norm(tiles.ravel()))
            along = along + tiles * np.float32(weight / norm if norm else 0.0)
    return float(np.sum(np.square(along, dtype=np.float64)))


def _square(array: Any) -> float:
    return float(np.vdot(array, array))


def _dot(one: Sequence[Sample], other: Sequence[Sample]) -> float:
    pairs = zip(one, other, strict=True)
    return math.fsum(float(np.vdot(a, b)) for a, b in pairs)


def _length(arrays: Sequence[Sample]) -> float:
    return math.hypot(*(float(np.linalg.norm(a.ravel())) for a in arrays))


def _ratio(value: float, of: float) -> float | None:
    ratio = float(value) / float(of) if of > 0 else math.nan
    return ratio if math.isfinite(ratio) else None
