"""Floats as little-endian octets: the building blocks of codecs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from diloco_jax.core.codecs.codec import flush_subnormals


def to_octets(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Convert f32[..., n] -> uint8[..., n * width of dtype]."""
    octets = lax.bitcast_convert_type(x.astype(dtype), jnp.uint8)
    return octets.reshape(*x.shape[:-1], -1)


def from_octets(octets: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Invert `to_octets`; subnormals become zeros."""
    width = jnp.dtype(dtype).itemsize
    octets = octets.reshape(*octets.shape[:-1], -1, width)
    values = lax.bitcast_convert_type(octets, dtype).astype(jnp.float32)
    return flush_subnormals(values)


def round_to_bf16(x: jax.Array) -> jax.Array:
    """Return x rounded to the nearest bf16, as f32."""
    # A cast to bf16 and back may be optimised away; this operation may not.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
