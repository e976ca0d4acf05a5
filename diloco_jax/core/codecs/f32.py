"""The codec "f32": 4 bytes per element, nothing lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from diloco_jax.core.codecs.codec import from_octets, to_octets


class Float32:
    """See `TileCodec`."""

    def tile_bytes(self, elements: int) -> int:
        """Return 4 bytes per element."""
        return 4 * elements

    def encode(self, tiles: jax.Array) -> jax.Array:
        """Write the values as octets, unchanged."""
        return to_octets(tiles, jnp.float32)

    def decode(self, octets: jax.Array, elements: int) -> jax.Array:
        """Return the values unchanged."""
        return from_octets(octets, jnp.float32)

    def largest_error(self, tiles: jax.Array) -> jax.Array:
        """Return zeros."""
        return jnp.zeros_like(tiles)


F32 = Float32()
