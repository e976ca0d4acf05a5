"""The functions of takes and adoptions, compiled once per kind of tensor.

They are the functions of `core/`, one piece at a time, with the indices of a stacked
layer and of a band traced; or a stack of small pieces at a time (`Held`): arguments and
results that are marked "by piece" are then tuples. They work where the data lies: a
shard of a piece makes its tiles, and tiles make their shard.

A mesh axis may cut a piece inside its tiles (`mesh.py`). Then a take first gathers the
delta along that axis, and an adoption the anchor. All devices along it make the same
tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco_jax.config import AnchorMemory, SyncConfig
from diloco_jax.core.changes import adopt, apply_publish, delta, moved
from diloco_jax.core.codecs import Codec, encode_with_feedback, get_codec
from diloco_jax.core.families import ADOPT_RULES, AdoptRule
from diloco_jax.core.fragments import Bands, Piece
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.device.mesh import abstract, in_turn, place, tile_spec
from diloco_jax.island.device.spread import Spread, spread_of


@dataclasses.dataclass(frozen=True)
class PieceLayout:
    """Shardings of a kind's arrays, and the way from a tensor of the parameters to a
    piece.

    at_work: on the device, as the parameter is cut. at_rest: where anchors, bases and
    residuals stay. on_tiles: bytes, cut at tile bounds.
    """

    leaf: NamedSharding
    spec: PartitionSpec
    """Spec of a piece."""
    tiles: PartitionSpec
    memory: AnchorMemory
    bands: Bands | None
    shape: tuple[int, ...]
    """Shape of a piece."""
    rows: int = 1
    """Above 1, whole leaves are read and written together, as a tuple, and values are
    stacks of so many pieces."""

    @property
    def at_work(self) -> NamedSharding:
        return NamedSharding(self.leaf.mesh, self._stacked(self.spec))

    @property
    def at_rest(self) -> NamedSharding:
        spec = self._stacked(self.spec)
        return NamedSharding(self.leaf.mesh, spec, memory_kind=self.memory)

    @property
    def on_tiles(self) -> NamedSharding:
        return NamedSharding(self.leaf.mesh, self._stacked(self.tiles))

    @property
    def one(self) -> PieceLayout:
        """Places of one piece."""
        return dataclasses.replace(self, rows=1)

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of a piece, or of the stack."""
        return self.shape if self.rows == 1 else (self.rows, *self.shape)

    def together(self, one: Any) -> Any:
        """Return what an argument by piece is like, if it is `one` for a piece."""
        return one if self.rows == 1 else (one,) * self.rows

    def stack(self, values: Any) -> Any:
        """Stack values that come by piece."""
        return values if self.rows == 1 else jnp.stack(values)

    def apart(self, values: Any) -> Any:
        """Return the values by piece."""
        return values if self.rows == 1 else tuple(values)

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a piece as one of such values."""
        return function if self.rows == 1 else jax.vmap(function)

    def _stacked(self, spec: PartitionSpec) -> PartitionSpec:
        return spec if self.rows == 1 else PartitionSpec(None, *spec)  # type: ignore[no-untyped-call]

    def fetch(self, *arrays: Any) -> Any:
        """Fetch the value from where it rests to the device."""
        if self.memory == "device":
            return arrays
        at_work = self.at_work
        return tuple(x if x is None else jax.device_put(x, at_work) for x in arrays)

    def read(self, leaf: Any, index: Any) -> jax.Array:
        """Read a piece: a layer or a band of a tensor, or the whole of it."""
        layer, band = index
        whole: jax.Array = self.stack(leaf)
        if layer is not None:
            whole = jax.lax.dynamic_index_in_dim(whole, layer, 0, keepdims=False)
        if self.bands is None:
            return whole
        striped = self.bands.striped(whole)
        rows = self.shape[self.bands.axis] // self.bands.stripes
        own = jax.lax.dynamic_slice_in_dim(
            striped, band * self.bands.rows, rows, self.bands.axis
        )
        piece: jax.Array = self.bands.joined(own)
        return piece

    def advance(self, down: Codec, anchor: jax.Array, encoded: Any) -> jax.Array:
        """Advance the anchor, at work, by a publish; the result lies on the tiles."""
        on_tiles, moved = self.on_tiles, functools.partial(apply_publish, down)
        encoded = self.stack(encoded)
        return on(self.each(moved)(on(anchor, on_tiles), encoded), on_tiles)

    def adopt(
        self, rule: AdoptRule, stacked: Any, index: Any, values: Any, alpha: Any
    ) -> Any:
        """Write a piece's new local values into its leaf. values: base and anchor."""
        # Without the barriers `blend` is fused with its surroundings, where its
        # products and sum are contracted, and rounded differently than in core.
        local = barrier(self.read(stacked, index))
        new = self.each(lambda local, *values: adopt(rule, local, *values, alpha))
        return self.write(stacked, index, barrier(new(local, *values)))

    def write(self, leaf: Any, index: Any, value: jax.Array) -> Any:
        """Write a piece into its leaf, in place if that is donated."""
        if self.rows > 1:
            return self.apart(value)
        layer, band = index
        if layer is None and band is None:
            # As in a take: the anchor itself must not become the parameter.
            return jnp.copy(value)
        if self.bands is None:
            new: jax.Array = jax.lax.dynamic_update_index_in_dim(leaf, value, layer, 0)
            return new
        striped, own = self.bands.striped(leaf), self.bands.striped(value)
        starts = [0] * striped.ndim
        starts[self.bands.axis] = band * self.bands.rows
        if layer is not None:
            own, starts[0] = own[None], layer
        written: jax.Array = self.bands.joined(
            jax.lax.dynamic_update_slice(striped, own, starts)
        )
        return written


def donated(layout: PieceLayout) -> tuple[int, ...]:
    """Return the arguments to be donated by a function whose first one is the leaf. A
    leaf may be in a stack twice."""
    return (0,) if layout.rows == 1 else ()


def barrier(x: jax.Array) -> jax.Array:
    """Return x, and keep XLA from fusing its computation with that of its users."""
    y: jax.Array = jax.lax.optimization_barrier(x)  # type: ignore[no-untyped-call]
    return y


def on(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Constrain x to this sharding."""
    y: jax.Array = jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]
    return y


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
    """Sharding of anchors, bases and residuals, f32[shape]: that of the parameter. Of a
    stack, f32[rows, *shape]."""
    encoded: NamedSharding
    """Sharding of a piece's bytes, uint8[*grid, tile_bytes]."""
    spread: Spread
    """Where a piece's fetched tiles land: bytes of a publish, or bits of an anchor."""
    take: Any
    """(leaf, index, anchor, residual or None) -> (encoded by piece, residual, base).
    The leaf is by piece, here and below."""
    gather: Any
    """(landed publish) -> encoded publish, of a piece, if the spread is to be moved."""
    gather_anchor: Any
    """(landed anchor by piece) -> anchor."""
    arrive: Any
    """(leaf, index, base, anchor, encoded publish by piece, alpha) -> (leaf, anchor):
    `advance` and `adopt` in one. The leaf is donated, but not those of a stack."""
    advance: Any
    """(anchor, encoded publish by piece) -> anchor; of a chain, all but the last."""
    adopt: Any
    """(leaf, index, base, anchor, alpha) -> leaf, donated as by `arrive`; of an anchor
    that came in full."""
    move: Any
    """(base, anchor before, anchor) -> base."""
    reset: Any
    """(leaf, index, value) -> leaf, which is donated; in the leaf's dtype. Of a stack,
    (value, dtype) -> leaves."""
    whole: Any
    """(anchor) -> the anchor in f32 tiles, by piece."""
    read: Any
    """(leaf, index) -> the piece, a copy laid out as an anchor."""

    def gathered(self, landed: Any) -> Any:
        """Return the encoded publish that has landed, by piece."""
        if not self.spread.moved:
            return landed
        if self.layout.rows == 1:
            return in_turn(self.gather(landed))
        return tuple([in_turn(self.gather(piece)) for piece in landed])

    def put(self, leaf: Any, index: Index, value: Any) -> Any:
        """Return the leaf, which may be donated, with this value in it."""
        if self.layout.rows == 1:
            return self.reset(leaf, index, value)
        return self.reset(value, leaf[0].dtype)

    def lower(
        self, sync: SyncConfig, piece: Piece, leaf: jax.ShapeDtypeStruct
    ) -> dict[str, jax.stages.Lowered]:
        """Lower what a cycle executes, by name, without arrays, as `Trainer.lower`
        does. leaf: of one piece."""
        everywhere = _everywhere(self.piece)
        index = tuple(
            None if n < 0 else abstract((), np.int32, everywhere)
            for n in (piece.layer, piece.band)
        )
        layout = self.layout
        value = abstract(layout.values_shape, np.float32, self.piece)
        shape = get_codec(sync.codec_down).encoded_shape(piece.shape)
        octets = layout.together(abstract(shape, np.uint8, self.encoded))
        residual = value if sync.error_feedback else None
        alpha = abstract((), np.float32, everywhere)
        moved = {}
        if self.spread.moved:
            landed = self.spread.landed_shape(shape)
            there = abstract(landed, np.uint8, self.spread.landing)
            moved["gather"] = self.gather.lower(there)
        leaves = layout.together(leaf)
        return {
            **moved,
            "take": self.take.lower(leaves, index, value, residual),
            "arrive": self.arrive.lower(leaves, index, value, value, octets, alpha),
            "advance": self.advance.lower(value, octets),
            "adopt": self.adopt.lower(leaves, index, value, value, alpha),
            "move": self.move.lower(value, value, value),
            "reset": self.lower_reset(leaf, index),
        }

    def lower_reset(self, leaf: jax.ShapeDtypeStruct, index: Any) -> jax.stages.Lowered:
        """Lower what `put` executes, for leaves like this one."""
        value = abstract(self.layout.values_shape, np.float32, self.piece)
        given = (leaf, index, value) if self.layout.rows == 1 else (value, leaf.dtype)
        lowered: jax.stages.Lowered = self.reset.lower(*given)
        return lowered

    def lower_whole(self, piece: Piece) -> dict[str, jax.stages.Lowered]:
        """Lower what moves whole anchors, in the same way."""
        anchor = abstract(self.layout.values_shape, np.float32, self.piece)
        landed = self.spread.landed_shape(bits_shape(piece.shape))
        bits = abstract(landed, np.uint32, self.spread.landing)
        return {
            "whole": self.whole.lower(anchor),
            "gather_anchor": self.gather_anchor.lower(self.layout.together(bits)),
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
    rows: int = 1,
) -> Kind:
    """Return the kind of a piece of this leaf, which need not have values; or of stacks
    of so many such pieces, which are whole leaves.

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
    layout = PieceLayout(
        sharding, at_work, tiles, memory, piece.bands, piece.shape, rows
    )
    encoded = layout.one.on_tiles
    spread = spread_of(encoded, grid.grid)
    return Kind(
        layout=layout,
        piece=layout.at_rest,
        encoded=encoded,
        spread=spread,
        gather=_gather(encoded),
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
            encoded = layout.each(up.encode)(change)
        else:
            encode = layout.each(functools.partial(encode_with_feedback, up))
            encoded, residual = encode(change, on(residual, on_tiles))
            residual = on(residual, on_tiles)
        # A copy, whatever jit does with outputs that are inputs: the next step donates
        # the parameter's buffer.
        return layout.apart(encoded), residual, jnp.copy(local)

    return jax.jit(take, out_shardings=(layout.one.on_tiles, at_rest, at_rest))


@_kept
def _gather(on_tiles: NamedSharding) -> Any:
    return jax.jit(_sum_rows, out_shardings=on_tiles)


@_kept
def _gather_anchor(layout: PieceLayout, grid: TileGrid, moved: bool) -> Any:
    def gather_anchor(bits: Any) -> jax.Array:
        bits = layout.stack(bits)
        if moved:
            bits = on(layout.each(_sum_rows)(bits), layout.on_tiles)
        tiles = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return on(layout.each(grid.join)(tiles), layout.on_tiles)

    return jax.jit(gather_anchor, out_shardings=layout.at_rest)


def _sum_rows(landed: jax.Array) -> jax.Array:
    """Sum rows of which one has the bits and the others are zeros."""
    return jnp.sum(landed, axis=0, dtype=landed.dtype)


@_kept
def _arrive(layout: PieceLayout, codec: str, name: str) -> Any:
    down, rule = get_codec(codec), ADOPT_RULES.find(name)

    def arrive(
        stacked: Any, index: Any, base: Any, anchor: Any, encoded: Any, alpha: Any
    ) -> tuple[jax.Array, jax.Array]:
        base, anchor = layout.fetch(base, anchor)
        anchor = barrier(on(layout.advance(down, anchor, encoded), layout.at_work))
        return layout.adopt(rule, stacked, index, (base, anchor), alpha), anchor

    return jax.jit(
        arrive,
        donate_argnums=donated(layout),
        out_shardings=(layout.leaf, layout.at_rest),
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
    rule = ADOPT_RULES.find(name)

    def take_over(stacked: Any, index: Any, base: Any, anchor: Any, alpha: Any) -> Any:
        return layout.adopt(rule, stacked, index, layout.fetch(base, anchor), alpha)

    return jax.jit(take_over, donate_argnums=donated(layout), out_shardings=layout.leaf)


@_kept
def _move(layout: PieceLayout) -> Any:
    def move(base: Any, before: Any, anchor: Any) -> jax.Array:
        return moved(*layout.fetch(base, before, anchor))

    return jax.jit(move, out_shardings=layout.at_rest)


@_kept
def _reset(layout: PieceLayout) -> Any:
    def apart(values: Any, dtype: Any) -> Any:
        (values,) = layout.fetch(values)
        return layout.apart(values.astype(dtype))

    if layout.rows > 1:
        return jax.jit(apart, static_argnums=1, out_shardings=layout.leaf)

    def reset(stacked: Any, index: Any, value: Any) -> Any:
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

    def whole(anchor: Any) -> Any:
        (anchor,) = layout.fetch(anchor)
        return layout.apart(layout.each(f32.encode)(on(anchor, on_tiles)))

    return jax.jit(whole, out_shardings=layout.one.on_tiles)
