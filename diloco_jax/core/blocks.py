"""Blocks of tiles: passes over large arrays that stay in a core's cache.

A fresh array of a piece's size costs page faults, which are dearer than the arithmetic.
So passes go block by block, and their results into arrays that exist. Nothing depends
on the number of threads or of tiles in a block: sums of squares are made tile by tile
in f64, and added up exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.core.tiles import MOST_ELEMENTS, ArrayLike

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
    with jax.enable_x64(True):
        halved: npt.NDArray[np.float64] = np.asarray(_halved_squares(tiles))
    found: list[float] = halved.sum(axis=1).tolist()
    return found


class CutTree:
    """A pytree of arrays that a pass reads and writes by blocks of rows.

    Arrays of the given shape are cut by rows; all other leaves are the same for all
    rows.
    """

    def __init__(self, tree: Any, shape: tuple[int, ...], empty: Empty) -> None:
        self._before, self._structure = jax.tree.flatten(tree)
        self._cut = [leaf.shape == shape for leaf in self._before]
        self._after = [
            empty(leaf.shape, leaf.dtype) if cut else leaf
            for leaf, cut in zip(self._before, self._cut, strict=True)
        ]

    def of(self, rows: slice) -> Any:
        """Return these rows of the tree."""
        return jax.tree.unflatten(
            self._structure,
            [
                leaf[rows] if cut else leaf
                for leaf, cut in zip(self._before, self._cut, strict=True)
            ],
        )

    def put(self, rows: slice, tree: Any) -> None:
        """Put the new values of these rows in their place."""
        for index, leaf in enumerate(jax.tree.leaves(tree)):
            if self._cut[index]:
                self._after[index][rows] = leaf
            else:
                self._after[index] = np.asarray(leaf)

    def whole(self) -> Any:
        """Return the new tree."""
        return jax.tree.unflatten(self._structure, self._after)


@jax.jit
def _halved_squares(tiles: jax.Array) -> jax.Array:
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
