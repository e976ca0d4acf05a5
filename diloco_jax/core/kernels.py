"""Passes over large arrays: functions that XLA compiles, and those that C does.

At the coordinator they go by blocks of tiles, which stay in a core's cache, and their
results into arrays that exist: a fresh array of a piece's size costs page faults, which
are dearer than the arithmetic. Nothing depends on the number of threads or of tiles in
a block: sums of squares are made tile by tile in f64, and added up exactly.

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
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from diloco_jax.core.tiles import MOST_ELEMENTS, TileGrid

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


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    def squares(self, codec: str, encoded: Octets, elements: int) -> float:
        """Return the sum of the squares of a delta, uint8[tiles, tile_bytes]."""
        return math.fsum(self.tile_squares(codec, encoded, elements))

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
        trace: Values | None,
        anchor: Values,
        theta: Values,
        new_trace: Values | None,
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
          old, trace, anchor: before the merge; trace: momentum of "nesterov" alone.
          theta: the sum of the deltas, which the new values replace; at "keep" they are
            there already.
          new_trace, new_anchor, encoded: the results; encoded: uint8[tiles,
            tile_bytes].
          unused, grid: the rows of the first axis that keep their values and momentum,
            and the piece's tiles; None: no row.
          digest: goes on over the new theta, a block as soon as it is made.
        """
        values = old, trace, anchor, theta, new_trace, new_anchor

        def of(rows: slice) -> None:
            tiles, elements = theta[rows].shape
            self._call(
                self._finish,
                *(CODECS.index(codec), STEPS.index(step.kind)),
                *(step.factor, step.guard, step.momentum, step.rate),
                *(tiles, elements, *_rows_at(grid, rows)),
                None if unused is None else _at(unused, np.bool_, unused.shape),
                *(
                    value
                    if value is None
                    else _at(value[rows], np.float32, (tiles, elements))
                    for value in values
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
        trace: Values | None,
        new_anchor: Values,
        new_trace: Values | None,
        digest: xxh3_128 | None = None,
    ) -> list[float]:
        """Apply a publish to a piece, f32[tiles, elements] each, and advance its
        momentum by the delta that such a step infers from it (`outer.advance`). Return
        the sums of that delta's squares, by tile; zeros of a "flush": it infers none.

        Args:
          codec: of the publish, uint8[tiles, tile_bytes].
          anchor, trace: before it; trace: momentum of "nesterov" alone.
          new_anchor, new_trace: the results.
          digest: goes on over the new anchor.
        """
        values = anchor, trace, new_anchor, new_trace
        one, mu = np.float32(1), step.momentum
        by, part = one / np.float32(step.rate), one / np.float32(1 + mu)

        def of(rows: slice, halved: npt.NDArray[np.float64]) -> None:
            tiles, elements = anchor[rows].shape
            self._call(
                self._replay,
                *(CODECS.index(codec), STEPS.index(step.kind)),
                *(step.guard, mu, by, mu**2, part, tiles, elements),
                _at(encoded[rows], np.uint8, (tiles, tile_bytes(codec, elements))),
                *(
                    value
                    if value is None
                    else _at(value[rows], np.float32, (tiles, elements))
                    for value in values
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
