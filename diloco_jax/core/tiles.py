"""Tiles of an array, the units that are encoded, sent and put on a mesh.

Tiles depend only on an array's shape, so all islands and the coordinator cut it alike,
whatever their meshes. A mesh whose shards end on tile boundaries encodes without
communication. At the coordinator all arrays of a piece lie in the order of its tiles,
as they are encoded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy.typing as npt

ArrayLike = jax.Array | npt.NDArray[Any]
"""An array of jax or numpy, as the functions of this package take it."""
MOST_ELEMENTS = 16384
"""Elements of a tile, unless odd extents keep it larger."""


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """`grid` tiles of shape `tile` each: shape = grid * tile, axis by axis."""

    tile: tuple[int, ...]
    grid: tuple[int, ...]

    @staticmethod
    @functools.cache
    def of(shape: tuple[int, ...]) -> TileGrid:
        """Return the tiling of an array of that shape.

        Starting from the whole array, even extents are halved, the one halved least
        so far first (ties: the largest, then the lowest axis), until a tile has at
        most clip(size / 256, 1024, MOST_ELEMENTS) elements or no extent is even.

        Raises:
          ValueError: the array has no elements.
        """
        size = math.prod(shape)
        if size < 1:
            raise ValueError(f"shape {shape} has no elements; leave the piece out")
        limit = min(max(size / 256, 1024), MOST_ELEMENTS)
        tile, halvings = list(shape), [0] * len(shape)
        while math.prod(tile) > limit:
            even = [axis for axis, extent in enumerate(tile) if extent % 2 == 0]
            if not even:
                break
            axis = min(even, key=lambda a: (halvings[a], -tile[a], a))
            tile[axis] //= 2
            halvings[axis] += 1
        return TileGrid(tuple(tile), tuple(2**h for h in halvings))

    @property
    def elements(self) -> int:
        """Elements of one tile."""
        return math.prod(self.tile)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return math.prod(self.grid)

    @property
    def in_order(self) -> tuple[int, int]:
        """(tiles, elements): the shape of an array that lies in the order of tiles."""
        return self.tiles, self.elements

    def to_tiles(self, x: Any) -> Any:
        """Put [shape] in the order of the tiles: [tiles, elements]."""
        return self.split(x).reshape(self.in_order)

    def from_tiles(self, tiles: Any) -> Any:
        """Invert `to_tiles`."""
        return self.join(tiles.reshape(*self.grid, self.elements))

    # Axes are split and merged one at a time: explicit sharding allows no more.

    def split(self, x: Any) -> Any:
        """Split [shape] -> [*grid, elements]; the grid's axes stay apart for shards."""
        rank = len(self.grid)
        for axis in reversed(range(rank)):
            pair = (self.grid[axis], self.tile[axis])
            x = x.reshape((*x.shape[:axis], *pair, *x.shape[axis + 1 :]))
        x = x.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)])
        return x.reshape((*self.grid, self.elements))

    def join(self, tiles: Any) -> Any:
        """Join [*grid, elements] -> [shape]: the inverse of `split`."""
        rank = len(self.grid)
        x = tiles.reshape((*self.grid, *self.tile))
        x = x.transpose([axis for i in range(rank) for axis in (i, rank + i)])
        for axis in range(rank):
            x = x.reshape((*x.shape[:axis], -1, *x.shape[axis + 2 :]))
        return x
