"""Deltas of one piece, by island, and the sums that merges need of them.

Sums go block by block over the tiles, and decode no more than a block at a time. With
`Passes` they are those of the merge route "native", else of "xla"; the bits are the
same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.core.blocks import blocks, tile_squares
from diloco_jax.core.codecs.codec import Codec
from diloco_jax.core.kernels.passes import Passes
from diloco_jax.core.merge.rule import Shape
from diloco_jax.core.tiles import ArrayLike, TileGrid


class Deltas(Protocol):
    """One piece's deltas, by island. Values are computed on demand, and not kept."""

    @property
    def shape(self) -> Shape:
        """Shape of each delta."""

    def __len__(self) -> int: ...

    def __getitem__(self, island: int) -> ArrayLike:
        """Return the island's delta, f32[shape]."""

    def tiles(self, island: int, rows: slice, every: int = 1) -> ArrayLike:
        """Return these of its tiles, f32[rows, elements], in the order of the grid;
        of each only the elements at multiples of `every`."""

    def weighted_sum(
        self, factors: Sequence[float], out: npt.NDArray[np.float32]
    ) -> list[float]:
        """Sum the deltas, each times its factor, into f32[tiles, elements]; return the
        sum of the squares of each tile of that."""

    @property
    def squares(self) -> Sequence[float]:
        """The sum of the squares of each delta."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """`Deltas` as they arrived: uint8[*grid, tile_bytes] each."""

    codec: Codec
    shape: Shape
    encoded: Sequence[ArrayLike]
    known: Sequence[float] = ()
    """`squares`, if they are known already."""
    passes: Passes | None = None
    """The merge route "native"; None: "xla"."""

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, island: int) -> ArrayLike:
        return self.codec.decode(self.encoded[island], self.shape)

    def tiles(self, island: int, rows: slice, every: int = 1) -> ArrayLike:
        """Decode only these tiles."""
        encoded = self._in_order(island)[rows]
        return self.codec.decode_tiles(encoded, self._elements, every)

    def weighted_sum(
        self, factors: Sequence[float], out: npt.NDArray[np.float32]
    ) -> list[float]:
        """See `Deltas`."""
        if self._native is None:
            return sum_blocks(self, factors, out)
        encoded = [self._in_order(island) for island in range(len(self))]
        return self._native.sum(self.codec.name, encoded, factors, out)

    @functools.cached_property
    def squares(self) -> Sequence[float]:
        """See `Deltas`."""
        if self.known:
            return self.known
        if self._native is None:
            return square_sums(self)
        name, elements = self.codec.name, self._elements
        return [
            self._native.squares(name, self._in_order(island), elements)
            for island in range(len(self))
        ]

    @property
    def _elements(self) -> int:
        return TileGrid.of(self.shape).elements

    @property
    def _native(self) -> Passes | None:
        if self.passes is not None and self.passes.knows(self.codec.name):
            return self.passes
        return None

    def _in_order(self, island: int) -> Any:
        """Return uint8[tiles, tile_bytes]."""
        encoded = self.encoded[island]
        return encoded.reshape(-1, encoded.shape[-1])


@dataclasses.dataclass(frozen=True)
class Plain:
    """`Deltas` as arrays, f32[shape] each."""

    arrays: Sequence[ArrayLike]

    @property
    def shape(self) -> Shape:
        """Shape of each delta."""
        return tuple(self.arrays[0].shape)

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, island: int) -> ArrayLike:
        return self.arrays[island]

    def tiles(self, island: int, rows: slice, every: int = 1) -> ArrayLike:
        """Split the whole delta, and return these tiles."""
        tiles: ArrayLike = TileGrid.of(self.shape).to_tiles(self.arrays[island])
        return tiles[rows, ::every]

    def weighted_sum(
        self, factors: Sequence[float], out: npt.NDArray[np.float32]
    ) -> list[float]:
        """See `Deltas`."""
        return sum_blocks(self, factors, out)

    @functools.cached_property
    def squares(self) -> Sequence[float]:
        """See `Deltas`."""
        return square_sums(self)


def square_sums(deltas: Deltas) -> list[float]:
    """Return the sum of the squares of each delta; inf or NaN if a value is not
    finite."""
    shape = TileGrid.of(deltas.shape).in_order
    return [
        math.fsum(
            square
            for rows in blocks(*shape)
            for square in tile_squares(deltas.tiles(island, rows))
        )
        for island in range(len(deltas))
    ]


def sum_blocks(
    deltas: Deltas, factors: Sequence[float], out: npt.NDArray[np.float32]
) -> list[float]:
    """`Deltas.weighted_sum` by the merge route "xla"."""
    found: list[float] = []
    for rows in blocks(*out.shape):
        block = jnp.zeros(out[rows].shape, jnp.float32)
        for island, factor in enumerate(factors):
            block = _added(block, deltas.tiles(island, rows), np.float32(factor))
            # Otherwise all deltas would be decoded ahead of the sum, into memory.
            jax.block_until_ready(block)  # type: ignore[no-untyped-call]
        out[rows] = block
        found += tile_squares(block)
    return found


@functools.partial(jax.jit, donate_argnums=0)
def _added(total: jax.Array, delta: jax.Array, factor: jax.Array) -> jax.Array:
    return total + factor * delta
