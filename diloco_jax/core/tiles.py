"""Tiles of an array, which are encoded, sent and put on a mesh, and passes over them.

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

The merge route "native" makes these passes in C, for rules, codecs and optimizers of
the package. `Passes` bind the compiled functions of `merge.c`. Each goes over some
tiles of a piece, f32[tiles, elements], in one call that holds no lock of the
interpreter, and makes the bits that the functions compiled by XLA make
(`fragment_merge.py`, `merging.py`). A piece is cut into blocks of tiles, which `each`
may give to threads: no bit depends on the cut.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

if TYPE_CHECKING:
    import jax

ArrayLike: TypeAlias = "jax.Array | npt.NDArray[Any]"
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


SOURCES = tuple(Path(__file__).with_name(name) for name in ("merge.c", "codec.h"))
"""The file to compile, and what it includes."""
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Flags of the compiler on which the bits depend, and the speed."""
CODECS = ("f32", "bf16", "int8", "int4", "int2")
"""Codecs that the functions know, as `codec.h` numbers them."""
STEPS = ("keep", "flush", "sgd", "nesterov", "guarded_nesterov")
"""Outer steps, as `merge.c` numbers them. "keep": none."""

StepKind = Literal["keep", "flush", "sgd", "nesterov", "guarded_nesterov"]
Values = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """An outer step on tiles: theta' = theta - rate (g + momentum b'), b' = momentum b
    + g.

    g = guard * factor * the sum of the deltas. "sgd" has no b, and "flush" subtracts
    factor * the sum. "guarded_nesterov" rounds in the order of the optimizer with a
    norm guard.
    """

    kind: StepKind
    factor: float = 1.0
    guard: float = 1.0
    momentum: float = 0.0
    rate: float = 1.0
    trace: Values | None = None
    """b, of "nesterov" alone."""
    new_trace: Values | None = None
    """The place of b'."""


Each = Callable[[Callable[[slice], Any], Iterable[slice]], Iterable[Any]]
"""A `map`: it returns the results in order, whatever computes them."""


class Passes:
    """The passes of one process over whole pieces, by the functions of one compiled
    library.

    Arrays are contiguous; ValueError if not, or if their shapes or dtypes do not agree.
    """

    def __init__(self, path: Path, each: Each = map) -> None:
        """Load the library; OSError if that is none of this machine."""
        library = ctypes.CDLL(str(path))
        self.path, self.each = path, each
        self._squares = library.merge_squares
        self._sum = library.merge_sum
        self._finish = library.merge_finish
        self._replay = library.merge_replay
        whole, number, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        reals = [ctypes.c_float] * 4
        self._squares.argtypes = [whole, number, number, *[pointer] * 2]
        self._sum.argtypes = [whole, *[number] * 7, *[pointer] * 4]
        self._finish.argtypes = [*[whole] * 2, *reals, *[number] * 5, *[pointer] * 8]
        reals.append(ctypes.c_float)
        self._replay.argtypes = [*[whole] * 2, *reals, *[number] * 2, *[pointer] * 6]

    def knows(self, codec: str) -> bool:
        """Tell whether there are functions in C for this codec, by its name in the
        config.
        """
        return codec in CODECS

    def tile_squares(self, codec: str, encoded: Octets, elements: int) -> list[float]:
        """Decode uint8[tiles, tile_bytes]; return the sum of each tile's squares."""

        def of(rows: slice, halved: npt.NDArray[np.float64]) -> None:
            tiles = len(halved)
            self._call(
                self._squares,
                *(CODECS.index(codec), tiles, elements),
                _at(encoded[rows], np.uint8, (tiles, tile_bytes(codec, elements))),
                _at(halved, np.float64, halved.shape),
            )

        return self._by_tile(of, len(encoded), elements)

    def sum(
        self,
        codec: str,
        encoded: Sequence[Octets],
        factors: Sequence[float] | Values,
        total: Values,
        grid: TileGrid | None = None,
    ) -> list[float]:
        """Sum deltas times their factors into `total`; return each tile's sum of
        squares.

        Deltas are uint8[tiles, tile_bytes] each, `total` is f32[tiles, elements]. With
        the grid of the piece, factors are f32[deltas, rows of its first axis].
        """
        given: npt.NDArray[np.float32] = np.array(factors, np.float32)
        given = given.reshape(len(encoded), -1)
        elements = total.shape[1]

        def of(rows: slice, halved: npt.NDArray[np.float64]) -> None:
            shape = len(halved), tile_bytes(codec, elements)
            places = [_at(array[rows], np.uint8, shape) for array in encoded]
            self._call(
                self._sum,
                *(CODECS.index(codec), len(encoded), len(halved), elements),
                *(given.shape[1], *_rows_at(grid, rows)),
                (ctypes.c_void_p * len(encoded))(*places),
                _at(given, np.float32, given.shape),
                _at(total[rows], np.float32, (len(halved), elements)),
                _at(halved, np.float64, halved.shape),
            )

        return self._by_tile(of, *total.shape)

    def finish(
        self,
        codec: str,
        step: Step,
        *,
        old: Values,
        anchor: Values,
        theta: Values,
        new_anchor: Values,
        encoded: Octets,
        unused: npt.NDArray[np.bool_] | None = None,
        grid: TileGrid | None = None,
        digest: xxh3_128 | None = None,
    ) -> None:
        """Take the outer step of a piece and encode its publish; all f32[tiles,
        elements].

        Args:
          codec: of the publish.
          old, anchor: before the merge.
          theta: the sum of the deltas, which the new values replace; at "keep" they are
            there already.
          new_anchor, encoded: the results; encoded: uint8[tiles, tile_bytes].
          unused, grid: the rows of the first axis that keep their values and momentum,
            and the piece's tiles; None: no row.
          digest: goes on over the new theta, a block as soon as it is made.
        """
        values = old, step.trace, anchor, theta, step.new_trace, new_anchor

        def of(rows: slice) -> None:
            tiles, elements = shape = theta[rows].shape
            self._call(
                self._finish,
                *(CODECS.index(codec), STEPS.index(step.kind)),
                *(step.factor, step.guard, step.momentum, step.rate),
                *(tiles, elements, *_rows_at(grid, rows)),
                None if unused is None else _at(unused, np.bool_, unused.shape),
                *(
                    None if v is None else _at(v[rows], np.float32, shape)
                    for v in values
                ),
                _at(encoded[rows], np.uint8, (tiles, tile_bytes(codec, elements))),
            )

        tiles, elements = theta.shape
        self._over_blocks(of, tiles, elements, made=theta, digest=digest)

    def replay(
        self,
        codec: str,
        step: Step,
        *,
        encoded: Octets,
        anchor: Values,
        new_anchor: Values,
        digest: xxh3_128 | None = None,
    ) -> list[float]:
        """Apply a publish to a piece, f32[tiles, elements] each, and advance its
        momentum by the delta that such a step infers from it (`outer.advance`). Return
        the sums of that delta's squares, by tile; zeros of a "flush": it infers none.

        Args:
          codec: of the publish, uint8[tiles, tile_bytes].
          anchor, new_anchor: before it, and the place of the result.
          digest: goes on over the new anchor.
        """
        values = anchor, step.trace, new_anchor, step.new_trace
        one, mu = np.float32(1), step.momentum
        by, part = one / np.float32(step.rate), one / np.float32(1 + mu)

        def of(rows: slice, halved: npt.NDArray[np.float64]) -> None:
            tiles, elements = shape = anchor[rows].shape
            self._call(
                self._replay,
                *(CODECS.index(codec), STEPS.index(step.kind)),
                *(step.guard, mu, by, mu**2, part, tiles, elements),
                _at(encoded[rows], np.uint8, (tiles, tile_bytes(codec, elements))),
                *(
                    None if v is None else _at(v[rows], np.float32, shape)
                    for v in values
                ),
                _at(halved, np.float64, halved.shape),
            )

        tiles, elements = anchor.shape
        return self._by_tile(of, tiles, elements, made=new_anchor, digest=digest)

    def _by_tile(
        self,
        of: Callable[[slice, npt.NDArray[np.float64]], None],
        tiles: int,
        elements: int,
        made: Values | None = None,
        digest: xxh3_128 | None = None,
    ) -> list[float]:
        """Return the sums of tiles' squares, whose parts `of` writes, by blocks."""

        def summed(rows: slice) -> list[float]:
            halved = np.empty((rows.stop - rows.start, _parts(elements)))
            of(rows, halved)
            # As `tile_squares` does.
            found: list[float] = halved.sum(axis=1).tolist()
            return found

        found = self._over_blocks(summed, tiles, elements, made=made, digest=digest)
        return [value for block in found for value in block]

    def _over_blocks(
        self,
        function: Callable[[slice], Any],
        tiles: int,
        elements: int,
        made: Values | None = None,
        digest: xxh3_128 | None = None,
    ) -> list[Any]:
        """Call the function for every block; a single one needs no other thread. A
        digest goes on over what is made, in order, while later blocks are computed."""
        given, found = list(blocks(tiles, elements)), []
        each = map if len(given) == 1 else self.each
        for rows, result in zip(given, each(function, given), strict=True):
            found.append(result)
            if made is not None and digest is not None:
                digest.update(made[rows].data)
        return found

    def _call(self, function: Any, *arguments: Any) -> None:
        if function(*arguments):
            raise MemoryError("no memory for a tile of a merge")


def tile_bytes(codec: str, elements: int) -> int:
    """Return the bytes of an encoded tile; `codec.h` has the same formula."""
    whole = {"f32": 4 * elements, "bf16": 2 * elements}
    if codec in whole:
        return whole[codec]
    bits, block = {"int8": (8, 256), "int4": (4, 32), "int2": (2, 32)}[codec]
    return -(-elements * bits // 8) + 2 * -(-elements // block)


def _at(array: npt.NDArray[Any], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> int:
    """Return the address of an array."""
    if (array.dtype, array.shape) != (dtype, shape) or not array.flags.c_contiguous:
        raise ValueError(
            f"{array.dtype}{list(array.shape)} with strides {array.strides} was given "
            f"for a contiguous {np.dtype(dtype)}{list(shape)}"
        )
    return array.ctypes.data


def _rows_at(grid: TileGrid | None, tiles: slice) -> tuple[int, int, int]:
    """Return the number of the first of these tiles, and how many beside each other
    have the same rows of the first axis, and how many rows; without a grid there is
    one row."""
    if grid is None:
        return tiles.start, tiles.stop, 1
    return tiles.start, grid.tiles // grid.grid[0], grid.tile[0]


def _parts(elements: int) -> int:
    """Return how many numbers are left of a tile's squares: its largest odd divisor,
    since halves are added to each other; or the number of runs of a large tile.
    """
    if elements > MOST_ELEMENTS:
        return -(-elements // MOST_ELEMENTS)
    return elements // (elements & -elements)
