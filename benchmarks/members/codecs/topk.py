"""A codec that sends the largest sixteenth of each tile, as bf16, and where they are.

A tile of n elements is k = ceil(n / 16) values and k indices of 2 bytes each (4 if n is
above 65,536), in the order of size: its bytes have a fixed number. All other elements
decode as zero, so that they are lost without error feedback.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diloco_jax.core.codecs import from_octets, round_to_bf16, to_octets

ONE_IN = 16


class TopK:
    """See `TileCodec`."""

    def tile_bytes(self, elements: int) -> int:
        """Values and indices."""
        return _kept(elements) * (2 + _index(elements).itemsize)

    def encode(self, tiles: jax.Array) -> jax.Array:
        """Keeps the largest, and values that are not finite before them."""
        elements = tiles.shape[-1]
        size = jnp.where(jnp.isfinite(tiles), jnp.abs(tiles), jnp.inf)
        one = jnp.arange(elements).reshape((1,) * (tiles.ndim - 1) + (elements,))
        where = jnp.zeros_like(tiles, jnp.int32) + one  # Lies as the tiles do.
        # A sort stays where the tiles are; `lax.top_k` gathers them on one device.
        _, values, where = lax.sort((-size, tiles, where), num_keys=1)
        kept = slice(0, _kept(elements))
        values = round_to_bf16(values[..., kept])
        indices = where[..., kept].astype(_index(elements))
        octets = lax.bitcast_convert_type(indices, jnp.uint8)
        octets = octets.reshape(*tiles.shape[:-1], -1)
        return jnp.concatenate([to_octets(values, jnp.bfloat16), octets], axis=-1)

    def decode(self, octets: jax.Array, elements: int) -> jax.Array:
        """Zeros, and the values in their places; an index beyond the tile is none."""
        cut = 2 * _kept(elements)
        values = from_octets(octets[..., :cut], jnp.bfloat16)
        index = _index(elements)
        split = octets[..., cut:].reshape(*values.shape, index.itemsize)
        where = lax.bitcast_convert_type(split, index).astype(jnp.int32)

        def put(values: jax.Array, where: jax.Array) -> jax.Array:
            return jnp.zeros(elements).at[where].set(values, mode="drop")

        for _ in values.shape[:-1]:
            put = jax.vmap(put)
        return put(values, where)

    def largest_error(self, tiles: jax.Array) -> jax.Array:
        """All of an element."""
        return jnp.abs(tiles)


def _kept(elements: int) -> int:
    return -(-elements // ONE_IN)


def _index(elements: int) -> np.dtype[Any]:
    """The type of an index."""
    return np.dtype(np.uint16 if elements <= 1 << 16 else np.uint32)


topk = TopK()
