"""The merge route "native": passes over tiles in C, for rules, codecs and optimizers of
the package.

`Passes` bind the compiled functions of `merge.c`. Each goes over some tiles of a piece,
f32[tiles, elements], in one call that holds no lock of the interpreter, and makes the
bits that the functions compiled by XLA make (`fragment_merge.py`, `merging.py`). A
piece is cut into blocks of tiles, which `each` may give to threads: no bit depends on
the cut.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from diloco_jax.core.tiles import MOST_ELEMENTS, blocks

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
        whole, number, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        reals = [ctypes.c_float] * 4
        self._squares.argtypes = [whole, number, number, *[pointer] * 2]
        self._sum.argtypes = [whole, *[number] * 3, *[pointer] * 4]
        self._finish.argtypes = [*[whole] * 2, *reals, *[number] * 2, *[pointer] * 7]

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
        factors: Sequence[float],
        total: Values,
    ) -> list[float]:
        """Sum deltas times their factors into `total`; return each tile's sum of
        squares.

        Deltas are uint8[tiles, tile_bytes] each, `total` is f32[tiles, elements].
        """
        given: npt.NDArray[np.float32] = np.array(factors, np.float32)
        elements = total.shape[1]

        def of(rows: slice, halved: npt.NDArray[np.float64]) -> None:
            shape = len(halved), tile_bytes(codec, elements)
            places = [_at(array[rows], np.uint8, shape) for array in encoded]
            self._call(
                self._sum,
                *(CODECS.index(codec), len(encoded), len(halved), elements),
                (ctypes.c_void_p * len(encoded))(*places),
                _at(given, np.float32, (len(encoded),)),
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
        """
        values = old, trace, anchor, theta, new_trace, new_anchor

        def of(rows: slice) -> None:
            tiles, elements = theta[rows].shape
            self._call(
                self._finish,
                *(CODECS.index(codec), STEPS.index(step.kind)),
                *(step.factor, step.guard, step.momentum, step.rate),
                *(tiles, elements),
                *(
                    value
                    if value is None
                    else _at(value[rows], np.float32, (tiles, elements))
                    for value in values
                ),
                _at(encoded[rows], np.uint8, (tiles, tile_bytes(codec, elements))),
            )

        for _ in self.each(of, blocks(*theta.shape)):
            pass

    def _by_tile(
        self,
        of: Callable[[slice, npt.NDArray[np.float64]], None],
        tiles: int,
        elements: int,
    ) -> list[float]:
        """Return the sums of tiles' squares, whose parts `of` writes, by blocks."""

        def summed(rows: slice) -> list[float]:
            halved = np.empty((rows.stop - rows.start, _parts(elements)))
            of(rows, halved)
            # As `tiles.tile_squares` does.
            found: list[float] = halved.sum(axis=1).tolist()
            return found

        found = self.each(summed, blocks(tiles, elements))
        return [value for block in found for value in block]

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


def _parts(elements: int) -> int:
    """Return how many numbers are left of a tile's squares: its largest odd divisor,
    since halves are added to each other; or the number of runs of a large tile.
    """
    if elements > MOST_ELEMENTS:
        return -(-elements // MOST_ELEMENTS)
    return elements // (elements & -elements)
