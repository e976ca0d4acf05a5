"""The layout of one kind of piece on the mesh, for use inside compiled functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from diloco_jax.config import AnchorMemory
from diloco_jax.core.adopt.rule import AdoptRule
from diloco_jax.core.bands import Bands
from diloco_jax.core.changes import adopt, apply_publish
from diloco_jax.core.codecs.codec import Codec


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

    @property
    def at_work(self) -> NamedSharding:
        return NamedSharding(self.leaf.mesh, self.spec)

    @property
    def at_rest(self) -> NamedSharding:
        return NamedSharding(self.leaf.mesh, self.spec, memory_kind=self.memory)

    @property
    def on_tiles(self) -> NamedSharding:
        return NamedSharding(self.leaf.mesh, self.tiles)

    def fetch(self, *arrays: Any) -> Any:
        """Fetch the value from where it rests to the device."""
        if self.memory == "device":
            return arrays
        at_work = self.at_work
        return tuple(x if x is None else jax.device_put(x, at_work) for x in arrays)

    def read(self, leaf: jax.Array, index: Any) -> jax.Array:
        """Read a piece: a layer or a band of a tensor, or the whole of it."""
        layer, band = index
        if layer is not None:
            leaf = jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
        if self.bands is None:
            return leaf
        striped = self.bands.striped(leaf)
        rows = self.shape[self.bands.axis] // self.bands.stripes
        own = jax.lax.dynamic_slice_in_dim(
            striped, band * self.bands.rows, rows, self.bands.axis
        )
        piece: jax.Array = self.bands.joined(own)
        return piece

    def advance(self, down: Codec, anchor: jax.Array, encoded: Any) -> jax.Array:
        """Advance the anchor, at work, by a publish; the result lies on the tiles."""
        on_tiles = self.on_tiles
        return on(apply_publish(down, on(anchor, on_tiles), encoded), on_tiles)

    def adopt(
        self, rule: AdoptRule, stacked: Any, index: Any, values: Any, alpha: Any
    ) -> jax.Array:
        """Write a piece's new local values into its leaf. values: base and anchor."""
        # Without the barriers `blend` is fused with its surroundings, where its
        # products and sum are contracted, and rounded differently than in core.
        local = barrier(self.read(stacked, index))
        return self.write(stacked, index, barrier(adopt(rule, local, *values, alpha)))

    def write(self, leaf: jax.Array, index: Any, value: jax.Array) -> jax.Array:
        """Write a piece into its leaf, in place if that is donated."""
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


def barrier(x: jax.Array) -> jax.Array:
    """Return x, and keep XLA from fusing its computation with that of its users."""
    y: jax.Array = jax.lax.optimization_barrier(x)  # type: ignore[no-untyped-call]
    return y


def on(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Constrain x to this sharding."""
    y: jax.Array = jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]
    return y
