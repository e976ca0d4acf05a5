"""Merges the deltas of one piece by a rule, decoding only the parts that it needs.

Deltas are summed in the given order. Callers sort them by island name, so the order of
arrival does not matter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from diloco_jax.core.codecs.codec import Codec
from diloco_jax.core.fragments import Piece
from diloco_jax.core.merge.mean import MEAN
from diloco_jax.core.merge.rule import (
    Elementwise,
    Fold,
    MergeRule,
    Shape,
    State,
    Whole,
)
from diloco_jax.core.tiles import ArrayLike, TileGrid

MOST_SQUARES = 1e36
"""Largest sum of a delta's squares: f32 results of it are far from overflowing."""
BLOCK_ELEMENTS = 1 << 22
"""Approximate elements per block of an elementwise rule, over all deltas."""


class Deltas(Protocol):
    """One piece's deltas, by island. Values are computed on demand, and not kept."""

    @property
    def shape(self) -> Shape:
        """Shape of each delta."""

    def __len__(self) -> int: ...

    def __getitem__(self, island: int) -> ArrayLike:
        """Return the island's delta, f32[shape]."""

    def tiles(self, island: int, rows: slice) -> ArrayLike:
        """Return these of its tiles, f32[rows, elements], in the order of the grid."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """`Deltas` as they arrived: uint8[*grid, tile_bytes] each."""

    codec: Codec
    shape: Shape
    encoded: Sequence[ArrayLike]

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, island: int) -> ArrayLike:
        return self.codec.decode(self.encoded[island], self.shape)

    def tiles(self, island: int, rows: slice) -> ArrayLike:
        """Decode only these tiles."""
        encoded = self.encoded[island]
        chosen = encoded.reshape(-1, encoded.shape[-1])[rows]
        return self.codec.decode_tiles(chosen, TileGrid.of(self.shape).elements)


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

    def tiles(self, island: int, rows: slice) -> ArrayLike:
        """Split the whole delta, and return these tiles."""
        grid = TileGrid.of(self.shape)
        tiles: ArrayLike = grid.split(self.arrays[island])
        return tiles.reshape(-1, grid.elements)[rows]


class MergedPiece(NamedTuple):
    """A merged piece."""

    delta: jax.Array
    """f32[shape]."""
    state: State
    """The rule's state, for the next merge."""
    squares: list[jax.Array]
    """f32 by island: sum of the squares of the island's delta."""
    direction_square: jax.Array | None
    """|sum of w unit(d)|^2, if the rule knows it."""


def merge_piece(
    rule: MergeRule,
    deltas: Deltas,
    weights: Sequence[float],
    share: float = 1.0,
    state: State = (),
) -> MergedPiece:
    """Merge the deltas of one piece. Waits for the result under some rules.

    Args:
      rule: see `rule_for`.
      deltas: by island in the order of the sum.
      weights: one per delta, finite and >= 0; only their ratios matter.
      share: share of the islands' work in these deltas, above 0 and at most 1.
      state: from the last merge of the piece; `start(rule, shape)` at first.

    Raises:
      ValueError: no deltas, not one weight per delta, weights that are negative or
        not finite or all zero, or a share out of bounds.
    """
    total = math.fsum(weights)
    if len(deltas) != len(weights) or not weights:
        raise ValueError(
            f"{len(deltas)} deltas and {len(weights)} weights; give one weight per "
            f"delta, and at least one delta"
        )
    if not (all(w >= 0 for w in weights) and 0 < total < math.inf):
        raise ValueError(
            f"weights {list(weights)} must be finite, not negative and not all zero"
        )
    if not 0 < share <= 1:
        raise ValueError(f"share = {share}; it must be above 0 and at most 1")
    shares = [w / total for w in weights]
    if rule.needs == "fold":
        return _fold(rule, deltas, shares, share, state)
    if rule.needs == "elementwise":
        return _by_blocks(rule, deltas, shares, share, state)
    return _whole(rule, deltas, shares, share, state)


def merge_deltas(
    deltas: Sequence[ArrayLike],
    weights: Sequence[float],
    rule: MergeRule,
    share: float = 1.0,
) -> jax.Array:
    """Merge arrays, f32[shape] each, by `merge_piece` and a rule without state."""
    state = start(rule, tuple(deltas[0].shape)) if deltas else ()
    return merge_piece(rule, Plain(deltas), weights, share, state).delta


def rule_for(piece: Piece, rule: MergeRule, *, final: bool = False) -> MergeRule:
    """Return the rule for this piece, in the last merge of a run if `final`."""
    by_mean = piece.embedding and rule.embeddings_by_mean
    return MEAN if by_mean or (final and rule.flush_by_mean) else rule


def may_cut(piece: Piece, rule: MergeRule) -> bool:
    """Tell whether the bands of a piece are merged as the whole piece would be."""
    own = rule_for(piece, rule)
    return own.needs == "elementwise" or own.by_element


def start(rule: MergeRule, shape: Shape) -> State:
    """Return the state of a rule before the first merge of a piece."""
    return () if rule.needs == "elementwise" else rule.start(shape)


def recovered(rule: MergeRule, state: State, change: jax.Array) -> State:
    """Return the state after a merge of which only the published change is left."""
    return state if rule.needs == "elementwise" else rule.recovered(state, change)


def state_bytes(rule: MergeRule, shape: Shape) -> int:
    """Return the bytes of a rule's state for a piece."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: start(rule, shape)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def merging_bytes(rule: MergeRule, islands: int, elements: int) -> int:
    """Return the memory for the merge of a piece, without its result."""
    arrays = {
        "fold": 3,  # The sums, a delta, and the next one.
        "elementwise": 1 + math.ceil(2 * BLOCK_ELEMENTS / elements),
        "whole": 2 * islands,  # Each by itself, and all of them stacked.
    }
    return 4 * elements * (arrays[rule.needs] + rule.extra_copies)


def _fold(
    rule: Fold, deltas: Deltas, weights: list[float], share: float, state: State
) -> MergedPiece:
    sums = _init(rule, deltas.shape)
    squares: list[jax.Array] = []
    for island, weight in enumerate(weights):
        if island > 1:
            # Otherwise all deltas would be decoded ahead of the sums, into memory.
            jax.block_until_ready(squares[island - 2])  # type: ignore[no-untyped-call]
        sums, square = _add(rule, sums, deltas[island], weight, state)
        squares.append(square)
    merged, after, cancelled, direction = _finish(
        rule, deltas.shape, sums, share, state
    )
    if cancelled is not None and bool(cancelled):
        merged = _fold(MEAN, deltas, weights, share, ()).delta
        after = state
    return MergedPiece(merged, after, squares, direction)


def _by_blocks(
    rule: Elementwise, deltas: Deltas, weights: list[float], share: float, state: State
) -> MergedPiece:
    grid = TileGrid.of(deltas.shape)
    rows = max(1, BLOCK_ELEMENTS // (len(deltas) * grid.elements))
    blocks, squares = [], jnp.zeros(len(deltas))
    for first in range(0, math.prod(grid.grid), rows):
        chosen = slice(first, first + rows)
        stacked = jnp.stack([deltas.tiles(i, chosen) for i in range(len(deltas))])
        block, own = _merge_block(rule, stacked, jnp.asarray(weights), share)
        blocks.append(block)
        squares = squares + own
    whole = jnp.concatenate(blocks).reshape(*grid.grid, grid.elements)
    return MergedPiece(grid.join(whole), state, list(squares), None)


def _whole(
    rule: Whole, deltas: Deltas, weights: list[float], share: float, state: State
) -> MergedPiece:
    stacked = jnp.stack([deltas[island] for island in range(len(deltas))])
    merged, after, squares = _merge_whole(
        rule, stacked, jnp.asarray(weights), share, state
    )
    return MergedPiece(merged, after, list(squares), None)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init(rule: Fold, shape: Shape) -> Any:
    return rule.init(shape)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add(
    rule: Fold, sums: Any, delta: jax.Array, weight: jax.Array, state: State
) -> tuple[Any, jax.Array]:
    """Add one delta to the sums, which are donated; the delta is not."""
    return rule.add(sums, delta, weight, state), jnp.sum(jnp.square(delta))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _finish(
    rule: Fold, shape: Shape, sums: Any, share: jax.Array, state: State
) -> tuple[jax.Array, State, jax.Array | None, jax.Array | None]:
    merged, after = rule.finish(sums, share, state)
    merged = _required(merged, shape)
    return merged, after, rule.cancelled(sums), rule.direction_square(sums)


@functools.partial(jax.jit, static_argnums=0)
def _merge_block(
    rule: Elementwise, deltas: jax.Array, weights: jax.Array, share: jax.Array
) -> tuple[jax.Array, jax.Array]:
    merged = rule.merge(deltas, weights, share)
    return _required(merged, deltas.shape[1:]), _squares(deltas)


@functools.partial(jax.jit, static_argnums=0)
def _merge_whole(
    rule: Whole, deltas: jax.Array, weights: jax.Array, share: jax.Array, state: State
) -> tuple[jax.Array, State, jax.Array]:
    merged, after = rule.merge(deltas, weights, share, state)
    return _required(merged, deltas.shape[1:]), after, _squares(deltas)


def _required(merged: jax.Array, shape: Shape) -> jax.Array:
    """Return a rule's result; ValueError if it is no delta of that shape."""
    if (merged.shape, merged.dtype) != (shape, jnp.float32):
        raise ValueError(
            f"a merge rule made {merged.dtype}{list(merged.shape)} of deltas of float32"
            f"{list(shape)}; a merged delta has their shape and dtype"
        )
    return merged


def _squares(deltas: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(deltas), axis=tuple(range(1, deltas.ndim)))
