"""The codec "int8": a byte per element, and a bf16 scale per 256 elements."""

from __future__ import annotations

import jax

from diloco_jax.core.codecs.blocks import BlockCodec


class Int8(BlockCodec):
    """See `BlockCodec`."""

    def payload_bytes(self, elements: int) -> int:
        """One per element."""
        return elements

    def pack(self, octets: jax.Array) -> jax.Array:
        """As they are."""
        return octets

    def unpack(self, payload: jax.Array) -> jax.Array:
        """As they are."""
        return payload


INT8 = Int8(block=256, peak=127)
