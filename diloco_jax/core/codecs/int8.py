"""The codec "int8": a byte per element, and a bf16 scale per 256 elements."""

from __future__ import annotations

import jax

from diloco_jax.core.codecs.blocks import BlockCodec


class Int8(BlockCodec):
    """See `BlockCodec`."""

    def payload_bytes(self, elements: int) -> int:
        """Return one byte per element."""
        return elements

    def pack(self, octets: jax.Array) -> jax.Array:
        """Return the octets unchanged."""
        return octets

    def unpack(self, payload: jax.Array) -> jax.Array:
        """Return the payload unchanged."""
        return payload


INT8 = Int8(block=256, peak=127)
