"""Integers with a scale per block of a tile: the common part of "int8" and "int4".

An encoded tile is its integers and then one bf16 scale per block of consecutive
elements. An integer times a bf16 scale is exact in f32, so all machines decode the same
bits, fused or not. A block with a NaN or an infinity has a NaN scale.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from diloco_jax.core.codecs.codec import (
    flush_subnormals,
    from_octets,
    round_to_bf16,
    to_octets,
)


class BlockCodec:
    """A `TileCodec` of integers from -peak to peak; a subclass defines their layout."""

    def __init__(self, block: int, peak: int) -> None:
        """block: number of elements that share one scale."""
        self.block, self.peak = block, peak

    def payload_bytes(self, elements: int) -> int:
        """Return the bytes of that many integers."""
        raise NotImplementedError

    def pack(self, octets: jax.Array) -> jax.Array:
        """Pack two's complement uint8[..., elements] -> uint8[..., payload_bytes]."""
        raise NotImplementedError

    def unpack(self, payload: jax.Array) -> jax.Array:
        """Invert `pack`; more elements may follow."""
        raise NotImplementedError

    def tile_bytes(self, elements: int) -> int:
        """Return the bytes of the integers, plus 2 per block."""
        return self.payload_bytes(elements) + 2 * -(-elements // self.block)

    def encode(self, tiles: jax.Array) -> jax.Array:
        """Round to the nearest integer, in units of the block's scale."""
        elements = tiles.shape[-1]
        blocks = self._to_blocks(tiles)
        # NaNs are made infinite: a compiled maximum may pass over a NaN.
        magnitude = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf)
        scale = jnp.max(magnitude, axis=-1, keepdims=True) * (1.0 / self.peak)
        scale = round_to_bf16(flush_subnormals(scale))
        usable = jnp.isfinite(scale) & (scale > 0)
        quantized = jnp.round(blocks / jnp.where(usable, scale, 1.0))
        clipped = jnp.clip(quantized, -self.peak, self.peak)
        quantized = jnp.where(usable, clipped, 0.0)
        flat = quantized.astype(jnp.int8).reshape(*tiles.shape[:-1], -1)[..., :elements]
        payload = self.pack(lax.bitcast_convert_type(flat, jnp.uint8))
        scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)[..., 0]
        return jnp.concatenate([payload, to_octets(scale, jnp.bfloat16)], axis=-1)

    def decode(self, octets: jax.Array, elements: int) -> jax.Array:
        """Multiply integers by scales."""
        cut = self.payload_bytes(elements)
        scale = from_octets(octets[..., cut:], jnp.bfloat16)
        payload = self.unpack(octets[..., :cut])[..., :elements]
        quantized = lax.bitcast_convert_type(payload, jnp.int8).astype(jnp.float32)
        blocks = self._to_blocks(quantized) * scale[..., None]
        return blocks.reshape(*octets.shape[:-1], -1)[..., :elements]

    def largest_error(self, tiles: jax.Array) -> jax.Array:
        """Return half a scale, or slightly more because the scale is rounded."""
        blocks = jnp.abs(self._to_blocks(tiles))
        largest = jnp.max(blocks, axis=-1, keepdims=True) / self.peak * 0.51
        spread = jnp.broadcast_to(largest, blocks.shape)
        return spread.reshape(*tiles.shape[:-1], -1)[..., : tiles.shape[-1]]

    def _to_blocks(self, tiles: jax.Array) -> jax.Array:
        """Reshape [..., n] -> [..., ceil(n / block), block], padded with zeros."""
        missing = -tiles.shape[-1] % self.block
        tiles = jnp.pad(tiles, [(0, 0)] * (tiles.ndim - 1) + [(0, missing)])
        return tiles.reshape(*tiles.shape[:-1], -1, self.block)
