"""The merge route "native": passes over tiles in C, for rules, codecs and optimizers of
the package.

`Kernels` binds the compiled functions of `merge.c`. Each goes over some tiles of a
piece, f32[tiles, elements], in one call that holds no lock of the interpreter: callers
may divide the tiles among threads. It makes the bits that the functions compiled by XLA
make (`fragment_merge.py`, `merging.py`). `Passes` go over whole pieces, cut into blocks
of tiles, which `each` may give to threads: no bit depends on the cut.
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
CODECS = ("f32", "bf16", "int8", "int4")
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


class Kernels:
    """The functions of one compiled library. Arrays are contiguous; ValueError if not,
    or if their shapes or dtypes do not agree."""

    def __init__(self, path: Path) -> None:
        """Load it; OSError if that is no library of this machine."""
        library = ctypes.CDLL(str(path))
        self._squares = library.merge_squares
        self._sum = library.merge_sum
        self._finish = library.merge_finish
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        self._squares.argtypes = [ctypes.c_int, number, number, *[pointer] * 2]
        self._sum.argtypes = [ctypes.c_int, *[number] * 3, *[pointer] * 4]
        reals = [ctypes.c_float] * 4
        self._finish.argtypes = [
            *[ctypes.c_int] * 2,
            *reals,
            *[number] * 2,
            *[pointer] * 7,
        ]

    def squares(self, codec: str, encoded: Octets, elements: int) -> list[float]:
        """Decode uint8[tiles, tile_bytes]; return the sum of each tile's squares."""
        tiles = len(encoded)
        halved = np.empty((tiles, _parts(elements)))
        self._call(
            self._squares,
            *(CODECS.index(codec), tiles, elements),
            _at(encoded, np.uint8, (tiles, tile_bytes(codec, elements))),
            _at(halved, np.float64, halved.shape),
        )
        return _summed(halved)

    def sum(
        self,
        codec: str,
        encoded: Sequence[Octets],
        factors: npt.NDArray[np.float32],
        total: Values,
    ) -> list[float]:
        """Sum deltas times their factors into `total`; return each tile's sum of
        squares.

        Deltas are uint8[tiles, tile_bytes] each, `total` is f32[tiles, elements].
        """
        tiles, elements = total.shape
        halved = np.empty((tiles, _parts(elements)))
        shape = tiles, tile_bytes(codec, elements)
        places = [_at(array, np.uint8, shape) for array in encoded]
        self._call(
            self._sum,
            *(CODECS.index(codec), len(encoded), tiles, elements),
            (ctypes.c_void_p * len(encoded))(*places),
            _at(factors, np.float32, (len(encoded),)),
            _at(total, np.float32, total.shape),
            _at(halved, np.float64, halved.shape),
        )
        return _summed(halved)

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
        """Take the outer step and encode the publish of some tiles, f32[tiles,
        elements] each.

        Args:
          codec: of the publish.
          old, trace, anchor: before the merge; trace: momentum of "nesterov" alone.
          theta: the sum of the deltas, which the new values replace; at "keep" they are
            there already.
          new_trace, new_anchor, encoded: the results; encoded: uint8[tiles,
            tile_bytes].
        """
        tiles, elements = theta.shape
        values = old, trace, anchor, theta, new_trace, new_anchor
        self._call(
            self._finish,
            *(CODECS.index(codec), STEPS.index(step.kind)),
            *(step.factor, step.guard, step.momentum, step.rate),
            *(tiles, elements),
            *(v if v is None else _at(v, np.float32, theta.shape) for v in values),
            _at(encoded, np.uint8, (tiles, tile_bytes(codec, elements))),
        )

    def _call(self, function: Any, *arguments: Any) -> None:
        if function(*arguments):
            raise MemoryError("no memory for a tile of a merge")


def tile_bytes(codec: str, elements: int) -> int:
    """Return the bytes of an encoded tile; `codec.h` has the same formula."""
    whole = {"f32": 4 * elements, "bf16": 2 * elements}
    if codec in whole:
        return whole[codec]
    if codec == "int8":
        return elements - 2 * (-elements // 256)
    return -(-elements // 2) - 2 * (-elements // 32)


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


def _summed(halved: npt.NDArray[np.float64]) -> list[float]:
    """Add up f64[tiles, parts] tile by tile, as `tiles.tile_squares` does."""
    found: list[float] = halved.sum(axis=1).tolist()
    return found


Each = Callable[[Callable[[slice], Any], Iterable[slice]], Iterable[Any]]
"""A `map`: it returns the results in order, whatever computes them."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """The passes of one process."""

    kernels: Kernels
    each: Each = map

    def knows(self, codec: str) -> bool:
        """Tell whether there are functions in C for this codec, by its name in the
        config.
        """
        return codec in CODECS

    def squares(self, codec: str, encoded: Octets, elements: int) -> float:
        """Return the sum of the squares of a delta, uint8[tiles, tile_bytes]."""

        def of(rows: slice) -> list[float]:
            return self.kernels.squares(codec, encoded[rows], elements)

        return math.fsum(self._flat(of, (len(encoded), elements)))

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

        def of(rows: slice) -> list[float]:
            parts = [delta[rows] for delta in encoded]
            return self.kernels.sum(codec, parts, given, total[rows])

        return self._flat(of, total.shape)

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
        """Take the outer step of a piece and encode its publish: see
        `Kernels.finish`."""

        def of(rows: slice) -> None:
            self.kernels.finish(
                codec,
                step,
                old=old[rows],
                trace=None if trace is None else trace[rows],
                anchor=anchor[rows],
                theta=theta[rows],
                new_trace=None if new_trace is None else new_trace[rows],
                new_anchor=new_anchor[rows],
                encoded=encoded[rows],
            )

        for _ in self.each(of, blocks(*theta.shape)):
            pass

    def _flat(
        self, of: Callable[[slice], list[float]], shape: tuple[int, ...]
    ) -> list[float]:
        tiles, elements = shape
        found = self.each(of, blocks(tiles, elements))
        return [value for block in found for value in block]
