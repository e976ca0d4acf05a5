"""The functions of takes and adoptions, compiled once per kind of tensor.

They are the functions of `core/`, one piece at a time, with the indices of a stacked
layer and of a band traced. They work where the data lies: a shard of a piece makes its
tiles, and tiles make their shard.

A mesh axis may cut a piece inside its tiles (`mesh.py`). Then a take first gathers the
delta along that axis, and an adoption the anchor. All devices along it make the same
tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco_jax.config import AnchorMemory, SyncConfig
from diloco_jax.core.adopt import RULES
from diloco_jax.core.adopt.rule import moved
from diloco_jax.core.changes import delta
from diloco_jax.core.codecs.codec import encode_with_feedback, get_codec
from diloco_jax.core.fragments import Piece
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.device.mesh import tile_spec
from diloco_jax.island.device.piece_layout import PieceLayout, barrier, on
from diloco_jax.island.device.placing import abstract, place
from diloco_jax.island.device.spread import Spread, spread_of

Index = tuple[Any, Any]
"""Layer of a stacked tensor, or None; number of a band, or None. Each is an int32 on
all devices of the mesh."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """The compiled functions of one kind of piece, from `jax.jit`, and its shardings.

    `index` is what `index_of` returns: the layer and the band of a piece.
    """

    layout: PieceLayout
    piece: NamedSharding
    """Sharding of anchors, bases and residuals, f32[shape]: that of the parameter."""
    encoded: NamedSharding
    """Sharding of bytes, uint8[*grid, tile_bytes]."""
    spread: Spread
    """Where fetched tiles land: bytes of a publish, or bits of an anchor."""
    take: Any
    """(leaf, index, anchor, residual or None) -> (encoded, residual, base)."""
    gather: Any
    """(landed publish) -> encoded publish, if the spread is to be moved."""
    gather_anchor: Any
    """(landed anchor) -> anchor."""
    arrive: Any
    """(leaf, index, base, anchor, encoded publish, alpha) -> (leaf, anchor): `advance`
    and `adopt` in one. The leaf is donated."""
    advance: Any
    """(anchor, encoded publish) -> anchor; of a chain, all but the last one."""
    adopt: Any
    """(leaf, index, base, anchor, alpha) -> leaf, which is donated; of an anchor that
    came in full."""
    move: Any
    """(base, anchor before, anchor) -> base."""
    reset: Any
    """(leaf, index, value) -> leaf, which is donated; in the leaf's dtype."""
    whole: Any
    """(anchor) -> the anchor in f32 tiles."""
    read: Any
    """(leaf, index) -> the piece, a copy laid out as an anchor."""

    def gathered(self, landed: jax.Array) -> jax.Array:
        """Return the encoded publish that has landed."""
        encoded: jax.Array = self.gather(landed) if self.spread.moved else landed
        return encoded

    def lower(
        self, sync: SyncConfig, piece: Piece, leaf: jax.ShapeDtypeStruct
    ) -> dict[str, jax.stages.Lowered]:
        """Lower what a cycle executes, by name, without arrays, as `Trainer.lower`
        does."""
        everywhere = _everywhere(self.piece)
        index = tuple(
            None if n < 0 else abstract((), np.int32, everywhere)
            for n in (piece.layer, piece.band)
        )
        value = abstract(piece.shape, np.float32, self.piece)
        shape = get_codec(sync.codec_down).encoded_shape(piece.shape)
        octets = abstract(shape, np.uint8, self.encoded)
        residual = value if sync.error_feedback else None
        alpha = abstract((), np.float32, everywhere)
        moved = {}
        if self.spread.moved:
            landed = self.spread.landed_shape(shape)
            there = abstract(landed, np.uint8, self.spread.landing)
            moved["gather"] = self.gather.lower(there)
        return {
            **moved,
            "take": self.take.lower(leaf, index, value, residual),
            "arrive": self.arrive.lower(leaf, index, value, value, octets, alpha),
            "advance": self.advance.lower(value, octets),
            "adopt": self.adopt.lower(leaf, index, value, value, alpha),
            "move": self.move.lower(value, value, value),
            "reset": self.reset.lower(leaf, index, value),
        }

    def lower_whole(self, piece: Piece) -> dict[str, jax.stages.Lowered]:
        """Lower what moves whole anchors, in the same way."""
        anchor = abstract(piece.shape, np.float32, self.piece)
        landed = self.spread.landed_shape(bits_shape(piece.shape))
        bits = abstract(landed, np.uint32, self.spread.landing)
        return {
            "whole": self.whole.lower(anchor),
            "gather_anchor": self.gather_anchor.lower(bits),
        }


def bits_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an anchor in tiles, (*grid, elements). As u32 they hold the
    bits of f32."""
    grid = TileGrid.of(shape)
    return (*grid.grid, grid.elements)


def kind_of(
    sync: SyncConfig,
    piece: Piece,
    leaf: jax.Array | jax.ShapeDtypeStruct,
    memory: AnchorMemory,
) -> Kind:
    """Return the kind of a piece of this leaf; the leaf need not have values.

    Kinds that compute the same share their compiled functions. So runs in one process
    compile only the functions that their settings make different.
    """
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    spec = (*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec)))
    spec, mesh = spec[1:] if piece.layer >= 0 else spec, sharding.mesh.shape
    at_work = tile_spec(spec, mesh, piece.shape)  # A band may not divide as the whole.
    grid = TileGrid.of(piece.shape)
    tiles = tile_spec(tuple(at_work), mesh, grid.grid)
    layout = PieceLayout(sharding, at_work, tiles, memory, piece.bands, piece.shape)
    spread = spread_of(layout.on_tiles, grid.grid)
    return Kind(
        layout=layout,
        piece=layout.at_rest,
        encoded=layout.on_tiles,
        spread=spread,
        gather=_gather(layout.on_tiles),
        gather_anchor=_gather_anchor(layout, grid, spread.moved),
        take=_take(layout, sync.codec_up),
        arrive=_arrive(layout, sync.codec_down, sync.adopt),
        advance=_advance(layout, sync.codec_down),
        adopt=_adopt(layout, sync.adopt),
        move=_move(layout),
        reset=_reset(layout),
        whole=_whole(layout),
        read=_read(layout),
    )


def index_of(piece: Piece, kind: Kind) -> Index:
    """Return the layer and the band of a piece as arguments of its kind's functions."""
    layer, band = (
        None if n < 0 else number(np.int32(n), kind) for n in (piece.layer, piece.band)
    )
    return layer, band


def number(value: np.int32 | np.float32, kind: Kind) -> jax.Array:
    """Put a number on all devices of the kind, as an argument of its functions. A
    number on the host would be transferred at every call.
    """
    return _placed(value, _everywhere(kind.piece))


def _everywhere(piece: NamedSharding) -> NamedSharding:
    return NamedSharding(piece.mesh, PartitionSpec())  # type: ignore[no-untyped-call]


# Typed, since 1 and 1.0 are equal keys.
@functools.lru_cache(maxsize=4096, typed=True)
def _placed(value: np.int32 | np.float32, sharding: NamedSharding) -> jax.Array:
    return place(np.asarray(value), sharding)


def alike(piece: Piece) -> tuple[Any, ...]:
    """Return a key: pieces of one tensor with equal keys share compiled functions."""
    return piece.layer < 0, piece.bands, piece.shape


# jit compiles each function once per shape; results lie like the arguments.
_kept = functools.lru_cache(maxsize=256)


@_kept
def _take(layout: PieceLayout, codec: str) -> Any:
    up, at_rest, on_tiles = get_codec(codec), layout.at_rest, layout.on_tiles

    def take(stacked: Any, index: Any, anchor: Any, residual: Any) -> Any:
        anchor, residual = layout.fetch(anchor, residual)
        local = layout.read(stacked, index)
        change = on(delta(anchor, local), on_tiles)
        if residual is None:
            encoded = up.encode(change)
        else:
            residual = on(residual, on_tiles)
            encoded, residual = encode_with_feedback(up, change, residual)
            residual = on(residual, on_tiles)
        # A copy, whatever jit does with outputs that are inputs: the next step donates
        # the parameter's buffer.
        return encoded, residual, jnp.copy(local)

    return jax.jit(take, out_shardings=(on_tiles, at_rest, at_rest))


@_kept
def _gather(on_tiles: NamedSharding) -> Any:
    return jax.jit(_sum_rows, out_shardings=on_tiles)


@_kept
def _gather_anchor(layout: PieceLayout, grid: TileGrid, moved: bool) -> Any:
    def gather_anchor(bits: Any) -> jax.Array:
        if moved:
            bits = on(_sum_rows(bits), layout.on_tiles)
        tiles = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return on(grid.join(tiles), layout.on_tiles)

    return jax.jit(gather_anchor, out_shardings=layout.at_rest)


def _sum_rows(landed: jax.Array) -> jax.Array:
    """Sum rows of which one has the bits and the others are zeros."""
    return jnp.sum(landed, axis=0, dtype=landed.dtype)


@_kept
def _arrive(layout: PieceLayout, codec: str, name: str) -> Any:
    down, rule = get_codec(codec), RULES.find(name)

    def arrive(
        stacked: Any, index: Any, base: Any, anchor: Any, encoded: Any, alpha: Any
    ) -> tuple[jax.Array, jax.Array]:
        base, anchor = layout.fetch(base, anchor)
        anchor = barrier(on(layout.advance(down, anchor, encoded), layout.at_work))
        return layout.adopt(rule, stacked, index, (base, anchor), alpha), anchor

    return jax.jit(
        arrive, donate_argnums=0, out_shardings=(layout.leaf, layout.at_rest)
    )


@_kept
def _advance(layout: PieceLayout, codec: str) -> Any:
    down = get_codec(codec)

    def advance(anchor: Any, encoded: Any) -> jax.Array:
        (anchor,) = layout.fetch(anchor)
        return layout.advance(down, anchor, encoded)

    return jax.jit(advance, out_shardings=layout.at_rest)


@_kept
def _adopt(layout: PieceLayout, name: str) -> Any:
    rule = RULES.find(name)

    def take_over(
        stacked: Any, index: Any, base: Any, anchor: Any, alpha: Any
    ) -> jax.Array:
        return layout.adopt(rule, stacked, index, layout.fetch(base, anchor), alpha)

    return jax.jit(take_over, donate_argnums=0, out_shardings=layout.leaf)


@_kept
def _move(layout: PieceLayout) -> Any:
    def move(base: Any, before: Any, anchor: Any) -> jax.Array:
        return moved(*layout.fetch(base, before, anchor))

    return jax.jit(move, out_shardings=layout.at_rest)


@_kept
def _reset(layout: PieceLayout) -> Any:
    def reset(stacked: Any, index: Any, value: Any) -> jax.Array:
        (value,) = layout.fetch(value)
        return layout.write(stacked, index, value.astype(stacked.dtype))

    return jax.jit(reset, donate_argnums=0, out_shardings=layout.leaf)


@_kept
def _read(layout: PieceLayout) -> Any:
    def read(stacked: Any, index: Any) -> jax.Array:
        return jnp.copy(layout.read(stacked, index))

    return jax.jit(read, out_shardings=layout.at_rest)


@_kept
def _whole(layout: PieceLayout) -> Any:
    f32, on_tiles = get_codec("f32"), layout.on_tiles

    def whole(anchor: Any) -> jax.Array:
        (anchor,) = layout.fetch(anchor)
        return f32.encode(on(anchor, on_tiles))

    return jax.jit(whole, out_shardings=on_tiles)
