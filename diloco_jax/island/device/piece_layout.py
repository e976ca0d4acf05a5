"""The layout of one kind of piece on the mesh, for use inside compiled functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from diloco_jax.config import AnchorMemory
from diloco_jax.core.changes import adopt, apply_publish
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import AdoptRule
from diloco_jax.core.fragments import Bands


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
