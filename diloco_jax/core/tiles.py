"""Tiles of an array, which are encoded, sent and put on a mesh, and digests.

Tiles depend only on an array's shape, so all islands and the coordinator cut it alike,
whatever their meshes. A mesh whose shards end on tile boundaries encodes without
communication. At the coordinator all arrays of a piece lie in the order of its tiles,
as they are encoded.

A ballot tells about another island's anchor: of each tile its digest, which says
whether both are the same, and a sample of its values, which says how far apart they
are. Digests are SHA-256, since a peer may lie: it would have to find other values with
the same digest.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

MOST_ELEMENTS = 16384
"""Elements of a tile, unless odd extents keep it larger."""


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """`grid` tiles of shape `tile` each: shape = grid * tile, axis by axis."""

    tile: tuple[int, ...]
    grid: tuple[int, ...]

    @staticmethod
    @functools.cache
    def of(shape: tuple[int, ...], groups: int = 1) -> TileGrid:
        """Return the tiling of an array of that shape. groups: parts of equal length
        along the first axis, of which no tile has more than one.

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
        tile, grid = list(shape), [1] * len(shape)
        if groups > 1:
            tile[0], grid[0] = shape[0] // groups, groups
        while math.prod(tile) > limit:
            even = [axis for axis, extent in enumerate(tile) if extent % 2 == 0]
            if not even:
                break
            axis = min(even, key=lambda a: (grid[a], -tile[a], a))
            tile[axis] //= 2
            grid[axis] *= 2
        return TileGrid(tuple(tile), tuple(grid))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(map(operator.mul, self.grid, self.tile))

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

    def by_row(self, values: Any, tiles: slice) -> Any:
        """Put values of the rows of the first axis, [..., rows], beside these tiles:
        [..., tiles, rows of a tile], of which each has an equal run of elements."""
        own = values.reshape(*values.shape[:-1], self.grid[0], self.tile[0])
        places = np.arange(tiles.start, tiles.stop) // (self.tiles // self.grid[0])
        return own[..., places, :]

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


USE_BYTES = 2
"""Bytes of a count of use; all counts of a piece lie in one tile."""
DIGEST_BYTES = 32


def tile_digests(tiles: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the digest of each tile's values, as little-endian f32.

    Args:
      tiles: f32[*grid, elements].

    Returns:
      uint8[*grid, DIGEST_BYTES].
    """
    grid = tiles.shape[:-1]
    found = np.empty((*grid, DIGEST_BYTES), np.uint8)
    for index in np.ndindex(grid):
        values = np.ascontiguousarray(tiles[index], "<f4")
        found[index] = np.frombuffer(hashlib.sha256(values.data).digest(), np.uint8)
    return found


SAMPLED = 100
"""Values of a tile of which a ballot has one; it has one of each tile at least."""


def ballot_bytes(elements: int) -> int:
    """Return the bytes of a ballot about a tile with that many elements."""
    return DIGEST_BYTES + 4 * -(-elements // SAMPLED)


def ballot_of(tiles: npt.NDArray[np.float32], sample: int) -> npt.NDArray[np.uint8]:
    """Return a ballot about each tile: its digest, then some values at random.

    Args:
      tiles: f32[*grid, elements].
      sample: the number with which they are drawn, the same places of each tile.

    Returns:
      uint8[*grid, ballot_bytes(elements)].
    """
    elements = tiles.shape[-1]
    drawn = np.random.default_rng((sample, elements))
    places = np.sort(drawn.choice(elements, -(-elements // SAMPLED), replace=False))
    values = np.ascontiguousarray(tiles[..., places], "<f4").view(np.uint8)
    return np.concatenate([tile_digests(tiles), values], axis=-1)


def compare_ballots(
    ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], elements: int
) -> tuple[bool, float]:
    """Compare the ballots of two anchors about the tiles of one piece.

    Args:
      ours, theirs: uint8[*grid, ballot_bytes(elements)], drawn with one number.
      elements: of a tile.

    Returns:
      True if all digests are equal; the sum of the squares of the difference, as far as
      the sample shows it, infinite if a value is not finite.
    """
    equal = bool(np.array_equal(ours[..., :DIGEST_BYTES], theirs[..., :DIGEST_BYTES]))
    here, there = (
        np.ascontiguousarray(ballot[..., DIGEST_BYTES:]).view("<f4").astype(np.float64)
        for ballot in (ours, theirs)
    )
    if not np.isfinite(there).all():
        return equal, math.inf
    squares = float(np.sum(np.square(here - there)))
    return equal, squares * elements / here.shape[-1]


def digest_arrays(arrays: Iterable[Any]) -> str:
    """Return the digest of own arrays, after its kind: of their bytes, row-major,
    little-endian. It finds damage, and no lie: see `sha256_arrays`."""
    digest = xxh3_128()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return named(digest)


def named(digest: xxh3_128) -> str:
    """Return a digest as tapes and messages have it, after its kind."""
    return f"xxh3-128:{digest.hexdigest()}"


def sha256_arrays(arrays: Iterable[Any]) -> str:
    """Return 64 hex digits: SHA-256 of the same bytes, for values that a peer sends. It
    costs twelve times as much (docs/results/raw/checksums.md)."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def digest_all(digests: Iterable[str]) -> str:
    """Return 16 hex digits over the digests of all fragments, in their order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
