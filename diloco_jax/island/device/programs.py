"""The compiled programs of takes and adoptions, for each kind of piece.

They are the functions of `core/`, one piece at a time, with the indices of a stacked
layer and of a band traced; or a stack of small pieces at a time. What comes and goes by
piece, leaves of the parameters and encoded tiles, is always a tuple, and anchors, bases
and residuals are one array. Programs work where the data lies: a shard of a piece makes
its tiles, and tiles make their shard.

A mesh axis may cut a piece inside its tiles (`mesh.py`). Then a take first gathers the
delta along that axis, and an adoption the anchor. All devices along it make the same
tiles. What a host fetched lands on its own devices alone, before any program runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from diloco_jax.config import AnchorMemory, SyncConfig
from diloco_jax.core import changes
from diloco_jax.core.codecs import encode_with_feedback, get_codec
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import Bands, Piece
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.device.mesh import (
    Spread,
    Tiles,
    abstract,
    place,
    spread_of,
    tile_spec,
    tiles_at,
)

T = TypeVar("T")

Index = tuple[Any, Any]
"""Layer of a stacked tensor, or None; number of a band, or None. Each is an int32 on
all devices of the mesh."""
NAMES = (
    *("gather_anchor", "take", "arrive", "put"),
    *("advance", "adopt", "move", "whole"),
)
"""Programs of every kind: first those that every island runs, then those of one that
was away or late, or is asked for its anchors."""


def _program(
    places: str, uses: str = "", *, donates: bool = False
) -> Callable[[Callable[..., Any]], functools.cached_property[Any]]:
    """Compile a method of `PiecePrograms`, once for all kinds that compute the same. So
    runs in one process compile only what their settings make different.

    Args:
      places: names of the shardings of its results.
      uses: names of the settings that it depends on.
      donates: it changes the leaves, its first argument, in place. A leaf may be in a
        stack twice, so those of a stack are not donated.
    """

    def compiled(function: Callable[..., Any]) -> functools.cached_property[Any]:
        @functools.lru_cache(maxsize=256)
        def program(own: PiecePrograms) -> Any:
            out = tuple(getattr(own, place) for place in places.split())
            return jax.jit(
                functools.partial(function, own),
                out_shardings=out if len(out) > 1 else out[0],
                donate_argnums=(0,) if donates and own.rows == 1 else (),
            )

        @functools.wraps(function)
        def of(own: PiecePrograms) -> Any:
            unused = {"codec_up", "codec_down", "rule"} - set(uses.split())
            left_out: dict[str, Any] = dict.fromkeys(unused, "")
            return program(dataclasses.replace(own, feeds_back=False, **left_out))

        return functools.cached_property(of)

    return compiled


@dataclasses.dataclass(frozen=True)
class PiecePrograms:
    """The compiled programs of one kind of piece, and where its arrays lie. Pieces with
    equal ones share them."""

    leaf: NamedSharding
    leaf_shape: tuple[int, ...]
    layered: bool
    """True if a piece is a layer of the leaf."""
    moved: bool
    """True if tiles move to other devices after they have landed: see `spread`."""
    bands: Bands | None
    shape: tuple[int, ...]
    """Shape of a piece."""
    groups: int
    """As `Piece.groups`."""
    cut: PartitionSpec
    """Spec of a piece: as the parameter is cut."""
    tiles: PartitionSpec
    """Spec of a piece that is cut at the bounds of tiles alone."""
    memory: AnchorMemory
    codec_up: str
    codec_down: str
    rule: str
    """The adopt rule."""
    feeds_back: bool
    rows: int = 1
    """Above 1, whole leaves are read and written together, and values are stacks of so
    many pieces."""

    @classmethod
    def of(
        cls,
        sync: SyncConfig,
        piece: Piece,
        leaf: jax.Array | jax.ShapeDtypeStruct,
        memory: AnchorMemory,
    ) -> PiecePrograms:
        """Return the programs for a piece of this leaf, which need not have values."""
        lies, grid = piece_sharding(piece, leaf), piece.grid.grid
        cut, sharding = lies.spec, leaf.sharding
        assert isinstance(sharding, NamedSharding)
        tiles = tile_spec(tuple(cut), sharding.mesh.shape, grid)
        return cls(
            leaf=sharding,
            leaf_shape=leaf.shape,
            layered=piece.layer >= 0,
            moved=spread_of(NamedSharding(sharding.mesh, tiles), grid).moved,
            bands=piece.bands,
            shape=piece.shape,
            groups=piece.groups,
            cut=cut,
            tiles=tiles,
            memory=memory,
            codec_up=sync.codec_up,
            codec_down=sync.codec_down,
            rule=sync.adopt,
            feeds_back=sync.error_feedback,
        )

    # ---- where arrays lie -------------------------------------------------------

    @functools.cached_property
    def piece(self) -> NamedSharding:
        """Sharding of anchors, bases and residuals, f32[shape]; of a stack, f32[rows,
        *shape]."""
        spec = self._stacked(self.cut)
        return NamedSharding(self.leaf.mesh, spec, memory_kind=self.memory)

    @functools.cached_property
    def encoded(self) -> NamedSharding:
        """Sharding of a piece's bytes, uint8[*grid, tile_bytes]."""
        return NamedSharding(self.leaf.mesh, self.tiles)

    @functools.cached_property
    def spread(self) -> Spread:
        """Where a piece's fetched tiles land: bytes of a publish, or bits of an
        anchor."""
        return spread_of(self.encoded, self.grid.grid)

    @property
    def grid(self) -> TileGrid:
        """Tiles of a piece."""
        return TileGrid.of(self.shape, self.groups)

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of a piece, or of the stack."""
        return self.shape if self.rows == 1 else (self.rows, *self.shape)

    def number(self, value: np.int32 | np.float32) -> jax.Array:
        """Put a number on all devices, as an argument of programs. A number on the host
        would be transferred at every call."""
        return _placed(value, self._everywhere)

    def index_of(self, piece: Piece) -> Index:
        """Return the layer and the band of a piece as arguments of programs."""
        layer, band = (
            None if n < 0 else self.number(np.int32(n))
            for n in (piece.layer, piece.band)
        )
        return layer, band

    # ---- programs ---------------------------------------------------------------

    @_program("encoded piece piece", "codec_up")
    def take(self, leaf: Any, index: Any, anchor: Any, residual: Any) -> Any:
        """Encode a delta: (leaf, index, anchor, residual or None) -> (encoded,
        residual, base)."""
        up = get_codec(self.codec_up)
        anchor, residual = self._fetch(anchor, residual)
        local = self._of_leaf(leaf, index)
        change = on(changes.delta(anchor, local), self._on_tiles)
        if residual is None:
            encoded = self._each(lambda x: up.encode(x, self.groups))(change)
        else:
            encode = self._each(
                lambda x, lost: encode_with_feedback(up, x, lost, self.groups)
            )
            encoded, residual = encode(change, on(residual, self._on_tiles))
            residual = on(residual, self._on_tiles)
        # A copy, whatever jit does with outputs that are inputs: the next step donates
        # the parameter's buffer.
        return self._apart(encoded), residual, jnp.copy(local)

    @_program("encoded")
    def gather(self, landed: Any) -> Any:
        """Move landed tiles: (landed publish) -> encoded publish."""
        return tuple(map(_sum_rows, landed))

    @_program("piece")
    def gather_anchor(self, bits: Any) -> Any:
        """Move and join landed tiles: (landed anchor) -> anchor."""
        bits, grid = self._stack(bits), self.grid
        if self.moved:
            bits = on(self._each(_sum_rows)(bits), self._on_tiles)
        tiles = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return on(self._each(grid.join)(tiles), self._on_tiles)

    @_program("leaf piece", "codec_down rule", donates=True)
    def arrive(
        self, leaf: Any, index: Any, base: Any, anchor: Any, encoded: Any, alpha: Any
    ) -> Any:
        """Advance and adopt: (leaf, index, base, anchor, encoded publish, alpha) ->
        (leaf, anchor)."""
        base, anchor = self._fetch(base, anchor)
        anchor = barrier(on(self._advanced(anchor, encoded), self._at_work))
        return self._adopted(leaf, index, base, anchor, alpha), anchor

    @_program("piece", "codec_down")
    def advance(self, anchor: Any, encoded: Any) -> Any:
        """Apply a publish of a chain but the last: (anchor, encoded publish) ->
        anchor."""
        (anchor,) = self._fetch(anchor)
        return self._advanced(anchor, encoded)

    @_program("leaf", "rule", donates=True)
    def adopt(self, leaf: Any, index: Any, base: Any, anchor: Any, alpha: Any) -> Any:
        """Adopt an anchor that came in full: (leaf, index, base, anchor, alpha) ->
        leaf."""
        base, anchor = self._fetch(base, anchor)
        return self._adopted(leaf, index, base, anchor, alpha)

    @_program("piece")
    def move(self, base: Any, before: Any, anchor: Any) -> Any:
        """Move a kept base: (base, anchor before, anchor) -> base."""
        return changes.moved(*self._fetch(base, before, anchor))

    @_program("leaf", donates=True)
    def put(self, leaf: Any, index: Any, value: Any) -> Any:
        """Write a value: (leaf, index, value) -> leaf, in its dtype."""
        (value,) = self._fetch(value)
        return self._written(leaf, index, value.astype(leaf[0].dtype))

    @_program("leaf", donates=True)
    def follow(self, leaf: Any, index: Any, before: Any, local: Any) -> Any:
        """Move a leaf beside the parameters as these moved: (leaf, index, local values
        before, leaf of the parameters) -> leaf."""
        (before,) = self._fetch(before)
        beside, new = self._of_leaf(leaf, index), self._of_leaf(local, index)
        own = beside.astype(jnp.float32)
        # Local values that are not finite cannot be moved to those of a reset.
        moved = changes.moved(new, before, own)
        value = jnp.where(jnp.isfinite(before), moved, new)
        return self._written(leaf, index, value.astype(beside.dtype))

    @_program("piece")
    def read(self, leaf: Any, index: Any) -> Any:
        """Copy a piece: (leaf, index) -> value, laid out as an anchor."""
        return jnp.copy(self._of_leaf(leaf, index))

    @_program("leaf")
    def unstack(self, values: Any) -> Any:
        """Cut a stack: (value) -> values by piece, laid out as leaves."""
        return self._apart(*self._fetch(values))

    @_program("encoded")
    def whole(self, anchor: Any) -> Any:
        """Encode an anchor: (anchor) -> f32 tiles by piece."""
        (anchor,) = self._fetch(anchor)
        encode = self._each(lambda x: get_codec("f32").encode(x, self.groups))
        return self._apart(encode(on(anchor, self._on_tiles)))

    # ---- for callers of programs ------------------------------------------------

    def gathered(self, landed: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return the encoded publish that has landed."""
        return in_turn(self.gather(landed)) if self.moved else landed

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the programs, for `lower`."""
        moved = ("gather",) if self.moved else ()
        stacked = ("unstack",) if self.rows > 1 else ()
        return (*moved, *NAMES, *stacked)

    def lower(self, name: str, dtype: npt.DTypeLike = np.float32) -> jax.stages.Lowered:
        """Lower one of `names` without arrays, as `Trainer.lower` does. dtype: of the
        leaf."""

        def by_piece(
            shape: tuple[int, ...], dtype: npt.DTypeLike, lies: NamedSharding
        ) -> Any:
            return (abstract(shape, dtype, lies),) * self.rows

        layer, band = (
            abstract((), np.int32, self._everywhere) if given else None
            for given in (self.layered, self.bands)
        )
        leaf, index = by_piece(self.leaf_shape, dtype, self.leaf), (layer, band)
        value = abstract(self.values_shape, np.float32, self.piece)
        alpha = abstract((), np.float32, self._everywhere)
        landed, landing = self.spread.landed_shape, self.spread.landing
        shape = get_codec(self.codec_down).encoded_shape(self.shape, self.groups)
        octets = by_piece(shape, np.uint8, self.encoded)
        bits = by_piece(landed(bits_shape(self.grid)), np.uint32, landing)
        given: dict[str, tuple[Any, ...]] = {
            "gather": (by_piece(landed(shape), np.uint8, landing),),
            "gather_anchor": (bits,),
            "take": (leaf, index, value, value if self.feeds_back else None),
            "arrive": (leaf, index, value, value, octets, alpha),
            "put": (leaf, index, value),
            "advance": (value, octets),
            "adopt": (leaf, index, value, value, alpha),
            "move": (value, value, value),
            "whole": (value,),
            "unstack": (value,),
        }
        lowered: jax.stages.Lowered = getattr(self, name).lower(*given[name])
        return lowered

    # ---- inside programs --------------------------------------------------------

    @property
    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self.leaf.mesh, PartitionSpec())  # type: ignore[no-untyped-call]

    @property
    def _at_work(self) -> NamedSharding:
        """Sharding on the device of what rests as `piece`."""
        return NamedSharding(self.leaf.mesh, self._stacked(self.cut))

    @property
    def _on_tiles(self) -> NamedSharding:
        return NamedSharding(self.leaf.mesh, self._stacked(self.tiles))

    def _stacked(self, spec: PartitionSpec) -> PartitionSpec:
        return spec if self.rows == 1 else PartitionSpec(None, *spec)  # type: ignore[no-untyped-call]

    def _stack(self, values: Any) -> Any:
        return values[0] if self.rows == 1 else jnp.stack(values)

    def _apart(self, values: Any) -> Any:
        return (values,) if self.rows == 1 else tuple(values)

    def _each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a piece as one of such values."""
        return function if self.rows == 1 else jax.vmap(function)

    def _fetch(self, *arrays: Any) -> Any:
        """Fetch values from where they rest to the device."""
        if self.memory == "device":
            return arrays
        at_work = self._at_work
        return tuple(x if x is None else jax.device_put(x, at_work) for x in arrays)

    def _of_leaf(self, leaf: Any, index: Any) -> jax.Array:
        """Return a layer or a band of a tensor, or the whole of it."""
        layer, band = index
        whole: jax.Array = self._stack(leaf)
        if layer is not None:
            whole = jax.lax.dynamic_index_in_dim(whole, layer, 0, keepdims=False)
        if self.bands is None:
            return whole
        rows = self.shape[self.bands.axis] // self.bands.stripes
        own = jax.lax.dynamic_slice_in_dim(
            self.bands.striped(whole), band * self.bands.rows, rows, self.bands.axis
        )
        piece: jax.Array = self.bands.joined(own)
        return piece

    def _written(self, leaf: Any, index: Any, value: jax.Array) -> Any:
        """Return the leaf with a piece written into it, in place if it is donated."""
        layer, band = index
        if self.rows > 1:
            return self._apart(value)
        if layer is None and band is None:
            # As in a take: the anchor itself must not become the parameter.
            return (jnp.copy(value),)
        if self.bands is None:
            new = jax.lax.dynamic_update_index_in_dim(leaf[0], value, layer, 0)
            return (new,)
        striped, own = self.bands.striped(leaf[0]), self.bands.striped(value)
        starts: list[Any] = [np.int32(0)] * striped.ndim
        starts[self.bands.axis] = band * self.bands.rows
        if layer is not None:
            own, starts[0] = own[None], layer
        return (self.bands.joined(jax.lax.dynamic_update_slice(striped, own, starts)),)

    def _advanced(self, anchor: Any, encoded: Any) -> jax.Array:
        """Return the anchor, at work, after a publish; it lies on the tiles."""
        down, groups = get_codec(self.codec_down), self.groups
        apply = self._each(lambda a, x: changes.apply_publish(down, a, x, groups))
        new = apply(on(anchor, self._on_tiles), self._stack(encoded))
        return on(new, self._on_tiles)

    def _adopted(
        self, leaf: Any, index: Any, base: Any, anchor: Any, alpha: Any
    ) -> Any:
        """Return the leaf with a piece's new local values in it."""
        rule = ADOPT_RULES.find(self.rule)
        # Without the barriers `blend` is fused with its surroundings, where its
        # products and sum are contracted, and rounded differently than in core.
        local = barrier(self._of_leaf(leaf, index))

        def adopt(local: Any, base: Any, anchor: Any) -> jax.Array:
            return changes.adopt(rule, local, base, anchor, alpha)

        new = self._each(adopt)(local, base, anchor)
        return self._written(leaf, index, barrier(new))


def piece_sharding(
    piece: Piece, leaf: jax.Array | jax.ShapeDtypeStruct
) -> NamedSharding:
    """Return how a piece of this leaf lies, f32[piece.shape]: as the parameter is cut,
    whatever memory it is in. The mesh needs no devices."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    spec = (*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec)))
    # A band may not divide as the whole.
    cut = tile_spec(spec[piece.layer >= 0 :], sharding.mesh.shape, piece.shape)
    return NamedSharding(sharding.mesh, cut)


def barrier(x: jax.Array) -> jax.Array:
    """Return x, and keep XLA from fusing its computation with that of its users."""
    y: jax.Array = jax.lax.optimization_barrier(x)  # type: ignore[no-untyped-call]
    return y


def on(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Constrain x to this sharding."""
    y: jax.Array = jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]
    return y


def bits_shape(grid: TileGrid) -> tuple[int, ...]:
    """Return the shape of an anchor in tiles, (*grid, elements). As u32 they hold the
    bits of f32."""
    return (*grid.grid, grid.elements)


def _sum_rows(landed: jax.Array) -> jax.Array:
    """Sum rows of which one has the bits and the others are zeros."""
    return jnp.sum(landed, axis=0, dtype=landed.dtype)


# Typed, since 1 and 1.0 are equal keys.
@functools.lru_cache(maxsize=4096, typed=True)
def _placed(value: np.int32 | np.float32, sharding: NamedSharding) -> jax.Array:
    return place(np.asarray(value), sharding)


def land(
    spread: Spread,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    boxes: Mapping[tuple[int, Tiles], npt.NDArray[Any]],
) -> jax.Array:
    """Put this host's tiles of a piece on its devices, as the spread has them. It
    communicates with no other host, so any thread may call it.

    shape: of all tiles, [*grid, n]. boxes: by row (0 without rows) and tiles. Rows that
    are not given are zeros. The values are copied, as in `place`.
    """
    sharding = spread.landing
    if not spread.moved and sharding.is_fully_addressable:
        (value,) = boxes.values()
        return place(value, sharding)

    def shard(index: tuple[slice, ...] | None) -> npt.NDArray[np.generic]:
        assert index is not None
        row, within = 0, index
        if spread.moved:
            row, within = index[0].indices(spread.rows)[0], index[1:]
        start, stop = tiles_at(within, shape[:-1])
        value = boxes.get((row, (start, stop)))
        if value is None:
            assert spread.rows > 1, f"{within} is in none of {list(boxes)}"
            value = np.zeros((*np.subtract(stop, start), shape[-1]), dtype)
        return np.array(value[None] if spread.moved else value)

    landed = spread.landed_shape(shape)
    return jax.make_array_from_callback(landed, sharding, shard)


def in_turn(arrays: T) -> T:
    """Return the arrays; on a CPU island of several hosts, wait until they are
    computed.

    An accelerator runs programs, and so their collectives, in the order of their
    dispatch. A CPU runs independent programs side by side, so hosts could pair
    different collectives with each other.
    """
    if _side_by_side():
        jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
    return arrays


@functools.cache
def _side_by_side() -> bool:
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
