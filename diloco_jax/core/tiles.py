"""Tiles of an array: the units that are encoded, sent and put on a mesh.

Tiles depend only on an array's shape, so all islands and the coordinator cut it alike,
whatever their meshes. A mesh whose shards end on tile boundaries encodes without
communication. At the coordinator all arrays of a piece lie in the order of its tiles,
as they are encoded.

Passes over large arrays there go by blocks of tiles, which stay in a core's cache, and
their results into arrays that exist: a fresh array of a piece's size costs page faults,
which are dearer than the arithmetic. Nothing depends on the number of threads or of
tiles in a block: sums of squares are made tile by tile in f64, and added up exactly.

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
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

ArrayLike = jax.Array | npt.NDArray[Any]
"""An array of jax or numpy, as the functions of this package take it."""
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(
    *static: int, donates: tuple[int, ...] = ()
) -> Callable[[Function], Function]:
    """Compile a function with `jax.jit`; its arguments of these numbers are static."""
    made: Any = functools.partial(
        jax.jit, static_argnums=static, donate_argnums=donates
    )
    return made  # type: ignore[no-any-return]


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


Empty = Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
"""(shape, dtype) -> an array whose bytes are not set."""
BLOCK_ELEMENTS = 1 << 20
"""Elements of a block, unless a single tile has more."""


def blocks(tiles: int, elements: int, arrays: int = 1) -> Iterator[slice]:
    """Yield slices of the tiles, all equally long if the number of tiles is a power of
    two. arrays: number of arrays that a pass works on at a time."""
    most = max(1, BLOCK_ELEMENTS // (elements * arrays))
    rows = min(tiles, 1 << (most.bit_length() - 1))
    for start in range(0, tiles, rows):
        yield slice(start, min(start + rows, tiles))


def tile_squares(tiles: ArrayLike) -> list[float]:
    """Return the sum of the squares of each tile of f32[n, elements], in f64."""
    found: list[float] = []
    for rows in blocks(*tiles.shape):
        part = tiles if rows.stop - rows.start == len(tiles) else tiles[rows]
        with jax.enable_x64(True):
            halved: npt.NDArray[np.float64] = np.asarray(halved_squares(part))
        found += halved.sum(axis=1).tolist()
    return found


@jax.jit
def halved_squares(tiles: jax.Array) -> jax.Array:
    """Return f64[n, an odd number]: the squares, one half added to the other again and
    again. So the order of the sum is given, and vectors add it.

    A tile of more than `MOST_ELEMENTS` is cut into runs of so many, with zeros at the
    end, and the result is f64[n, runs].
    """
    squares = jnp.square(tiles.astype(jnp.float64))
    count, elements = squares.shape
    if elements > MOST_ELEMENTS:
        squares = jnp.pad(squares, ((0, 0), (0, -elements % MOST_ELEMENTS)))
        squares = squares.reshape(-1, MOST_ELEMENTS)
    while squares.shape[1] % 2 == 0:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares.reshape(count, -1)


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
