"""The codec "bf16": 2 bytes per element, rounded to nearest even."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from diloco_jax.core.codecs.codec import from_octets, round_to_bf16, to_octets


class BFloat16:
    """See `TileCodec`."""

    def tile_bytes(self, elements: int) -> int:
        """Return 2 bytes per element."""
        return 2 * elements

    def encode(self, tiles: jax.Array) -> jax.Array:
        """Round the values and write them as octets."""
        return to_octets(round_to_bf16(tiles), jnp.bfloat16)

    def decode(self, octets: jax.Array, elements: int) -> jax.Array:
        """Return the rounded values."""
        return from_octets(octets, jnp.bfloat16)

    def largest_error(self, tiles: jax.Array) -> jax.Array:
        """Return half a step of an 8-bit significand."""
        return jnp.abs(tiles) * 2.0**-8


BF16 = BFloat16()
