"""Normal values, drawn a block at a time.

`jax.random.normal` holds four arrays of the size of its result while it draws, which
would be the coordinator's peak of memory at full size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

BLOCK = 1 << 20
"""Values drawn at a time; a power of two, so that the low half of a counter never
overflows inside a block."""


def normal(key: jax.Array, count: int) -> jax.Array:
    """Draw f32[count], bit for bit as `jax.random.normal(key, (count,))` does.

    This needs a generator whose bits depend on key and index alone: threefry with
    `jax_threefry_partitionable`. With any other, `jax.random.normal` draws the values.
    """
    partitionable: bool = getattr(jax.config, "jax_threefry_partitionable", False)
    if (
        count <= BLOCK
        or not partitionable
        or str(jax.random.key_impl(key)) != "threefry2x32"
    ):
        return jax.random.normal(key, (count,), jnp.float32)
    first, second = jax.random.key_data(key)

    def block(index: jax.Array) -> jax.Array:
        one, other = threefry2x32_p.bind(  # type: ignore[no-untyped-call]
            first, second, *counters(index)
        )
        return _normal_of(one ^ other)

    blocks = jax.lax.map(block, jnp.arange(-(-count // BLOCK), dtype=jnp.uint32))
    values: jax.Array = blocks.reshape(-1)[:count]
    return values


def counters(index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the indices of a block's values, of 64 bits: high and low halves."""
    per_high = 2**32 // BLOCK
    high = jnp.broadcast_to(index // per_high, (BLOCK,))
    start = (index % per_high) * np.uint32(BLOCK)
    return high, start + jnp.arange(BLOCK, dtype=jnp.uint32)


def _normal_of(bits: jax.Array) -> jax.Array:
    """Return the normal values that jax makes of random bits."""
    mantissa = (bits >> 9) | np.float32(1).view(np.uint32)
    unit = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(low, unit * (np.float32(1) - low) + low)
    return jnp.multiply(np.float32(np.sqrt(2)), jax.lax.erf_inv(uniform))
