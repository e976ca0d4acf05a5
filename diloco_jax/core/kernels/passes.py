"""Passes of a merge over whole pieces by the merge route "native".

A piece is cut into blocks of tiles, and `each` may give them to threads: no bit depends
on the cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_jax.core.blocks import blocks
from diloco_jax.core.kernels.library import CODECS, Kernels, Octets, Step, Values

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
