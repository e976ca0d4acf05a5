"""The codec "int4": half a byte per element, and a bf16 scale per 32 elements.

Element i of n is the low half of byte i, element i + ceil(n / 2) the high one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from diloco_jax.core.codecs.blocks import BlockCodec


class Int4(BlockCodec):
    """See `BlockCodec`."""

    def payload_bytes(self, elements: int) -> int:
        """Return half a byte per element, rounded up."""
        return -(-elements // 2)

    def pack(self, octets: jax.Array) -> jax.Array:
        """Pack the first half of the elements low, the second half high."""
        missing = octets.shape[-1] % 2
        octets = jnp.pad(octets, [(0, 0)] * (octets.ndim - 1) + [(0, missing)])
        low, high = jnp.split(octets, 2, axis=-1)
        return (low & 0xF) | (high << 4)

    def unpack(self, payload: jax.Array) -> jax.Array:
        """Invert `pack`, up to padding at the end; signs are extended."""
        nibbles = jnp.concatenate([payload & 0xF, payload >> 4], axis=-1)
        return (nibbles ^ 8) - 8


INT4 = Int4(block=32, peak=7)
