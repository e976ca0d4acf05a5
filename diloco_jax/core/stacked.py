"""The merge of one fragment's deltas where they lie on a device, stacked.

These are pure functions, to be compiled and mapped over runs. `fragment_merge.py` goes
over the same formulas by blocks, in a host's memory. The numbers of a `WeightedSum`,
which takes no arrays, are computed on the host by both.

All arrays of a piece lie in the order of its tiles: `M` deltas of `n` tiles with `e`
elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diloco_jax.core import merging, outer
from diloco_jax.core.changes import publish_tiles
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import Arrays, MergeRule, State
from diloco_jax.core.outer import OuterSettings
from diloco_jax.core.tiles import TileGrid


def decoded(codec: Codec, grid: TileGrid, encoded: jax.Array) -> jax.Array:
    """Decode a delta, uint8[*grid, tile_bytes] -> f32[n, e]. grid: of the piece."""
    return codec.decode_tiles(encoded, grid.elements).reshape(grid.in_order)


def total(
    rule: MergeRule,
    grid: TileGrid,
    deltas: jax.Array,
    numbers: jax.Array,
    share: Any,
    state: State,
) -> tuple[jax.Array, State]:
    """Merge the deltas of a piece, f32[M, n, e] -> (f32[n, e], the rule's next state).

    numbers: f32[M], the weights; of a `WeightedSum` its factors, which has then still
    to be scaled. share: as `merging.merge_piece`, of the other kinds.
    """
    if rule.needs == "sum":
        found = jnp.zeros(deltas.shape[1:], deltas.dtype)
        for delta, factor in zip(deltas, numbers, strict=True):
            found = merging.added(found, delta, factor)
        return found, state
    if rule.needs == "elementwise":
        return merging.merge_block(rule, deltas, numbers, share), state
    own = [grid.from_tiles(delta) for delta in deltas]
    if rule.needs == "fold":
        merged, after = merging.fold(rule, grid.shape, own, numbers, share, state)
    else:
        merged, after = merging.merge_whole(rule, jnp.stack(own), numbers, share, state)
    return grid.to_tiles(merged), after


def stepped(
    settings: OuterSettings,
    grids: Sequence[TileGrid],
    theta: Arrays,
    state: Any,
    merged: Arrays,
    norm: Any,
    *,
    final: bool,
) -> tuple[Arrays, Any]:
    """Take the outer step of a fragment; return (Theta', the optimizer's next state).

    Args:
      settings: the outer optimizer.
      grids: of the pieces.
      theta, merged: by piece, f32[n, e].
      state: as `fragment_merge.FragmentState.outer`.
      norm: length of the fragment's merged delta.
      final: the flush, which leaves the state as it is.
    """
    if final:
        return outer.flush_step(theta, merged), state
    tx = outer.make_outer(settings)
    if outer.is_elementwise(settings.optimizer):
        steps = [
            outer.outer_step(tx, (own,), kept, (delta,), norm)
            for own, kept, delta in zip(theta, state, merged, strict=True)
        ]
        return tuple(new for (new,), _ in steps), tuple(kept for _, kept in steps)
    whole, deltas = (
        tuple(grid.from_tiles(x) for grid, x in zip(grids, arrays, strict=True))
        for arrays in (theta, merged)
    )
    after, state = outer.outer_step(tx, whole, state, deltas)
    return tuple(g.to_tiles(x) for g, x in zip(grids, after, strict=True)), state


def published(
    codec: Codec, grids: Sequence[TileGrid], theta: Arrays, anchor: Arrays
) -> tuple[Arrays, Arrays]:
    """Encode the change of a fragment; return (uint8[*grid, tile_bytes] by piece, the
    new anchor)."""
    found = [publish_tiles(codec, *pair) for pair in zip(theta, anchor, strict=True)]
    encoded = tuple(
        octets.reshape(*grid.grid, -1)
        for grid, (octets, _) in zip(grids, found, strict=True)
    )
    return encoded, tuple(new for _, new in found)
