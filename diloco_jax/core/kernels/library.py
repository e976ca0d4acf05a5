"""Binds the compiled passes of `merge.c`, the merge route "native".

A pass goes over some tiles of a piece, f32[tiles, elements], in one call that holds no
lock of the interpreter: callers may divide the tiles among threads. It makes the bits
that the functions compiled by XLA make (`fragment_merge.py`, `merging.py`).
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("merge.c")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Flags of the compiler on which the bits depend, or the speed."""
CODECS = ("f32", "bf16", "int8", "int4")
"""Codecs that the passes know, as `merge.c` numbers them."""
STEPS = ("keep", "flush", "sgd", "nesterov", "guarded_nesterov")
"""Outer steps that a pass takes, as `merge.c` numbers them. "keep": none."""

StepKind = Literal["keep", "flush", "sgd", "nesterov", "guarded_nesterov"]
Values = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """An outer step: theta' = theta - rate (d + mu b'), b' = mu b + d, of the delta d =
    guard * factor * the sum; "sgd" without b, "flush" theta - factor * the sum."""

    kind: StepKind
    factor: float = 1.0
    guard: float = 1.0
    momentum: float = 0.0
    rate: float = 1.0


class Kernels:
    """The passes of one compiled library. Arrays are contiguous."""

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
        halved = np.empty((len(encoded), _odd(elements)))
        self._call(
            self._squares,
            CODECS.index(codec),
            *(len(encoded), elements),
            *map(_at, (encoded, halved)),
        )
        return _summed(halved)

    def sum(
        self,
        codec: str,
        encoded: Sequence[Octets],
        factors: npt.NDArray[np.float32],
        total: Values,
    ) -> list[float]:
        """Sum deltas, uint8[tiles, tile_bytes] each, times their factors into `total`,
        f32[tiles, elements]; return the sum of the squares of each tile of it."""
        tiles, elements = total.shape
        halved = np.empty((tiles, _odd(elements)))
        places = (ctypes.c_void_p * len(encoded))(*map(_at, encoded))
        self._call(
            self._sum,
            CODECS.index(codec),
            *(len(encoded), tiles, elements),
            *(places, *map(_at, (factors, total, halved))),
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
        self._call(
            self._finish,
            *(CODECS.index(codec), STEPS.index(step.kind)),
            *(step.factor, step.guard, step.momentum, step.rate),
            *theta.shape,
            *map(_at, (old, trace, anchor, theta, new_trace, new_anchor, encoded)),
        )

    def _call(self, function: Any, *arguments: Any) -> None:
        if function(*arguments):
            raise MemoryError("no memory for a tile of a merge")


def _at(array: npt.NDArray[Any] | None) -> int | None:
    """Return the address of a contiguous array."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of strides {array.strides} is not contiguous")
    return array.ctypes.data


def _odd(elements: int) -> int:
    """Return what is left when a tile is halved as often as it can be."""
    return elements // (elements & -elements)


def _summed(halved: npt.NDArray[np.float64]) -> list[float]:
    """Add up f64[tiles, odd] tile by tile, as `blocks.tile_squares` does."""
    found: list[float] = halved.sum(axis=1).tolist()
    return found
