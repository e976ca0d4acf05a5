"""Arrays as bytes: f32, bf16, int8 and int4, in tiles that know nothing of a mesh.

An array is cut into a grid of equal tiles (`tiles.py`), and each tile is encoded for
itself: f32[shape] <-> uint8[*grid, tile_bytes]. So an encode or decode that is sharded
on tile boundaries needs no communication, and the bytes do not depend on the sharding.

A tile of n elements, row-major, is its payload and then its block scales:

| codec | payload | scales |
|---|---|---|
| f32 | 4n bytes | none |
| bf16 | 2n bytes, rounded to nearest even | none |
| int8 | n bytes | one bf16 per 256 elements |
| int4 | ceil(n/2) bytes: element i low, element i + ceil(n/2) high | one bf16 per 32 |

An integer times a bf16 scale is exact in f32, so all machines decode the same bits,
fused or not. Values below the smallest normal f32 are zeros on both sides, because
some devices and compilers flush them and others do not. A block with a NaN or an
infinity has a NaN scale: what was not finite decodes as not finite.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diloco_jax.core.choices import CodecName
from diloco_jax.core.tiles import ArrayLike, TileGrid

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_FLOAT_BYTES = {"f32": 4, "bf16": 2}
_BLOCK = {"int8": 256, "int4": 32}
_PEAK = {"int8": 127, "int4": 7}


@dataclasses.dataclass(frozen=True)
class Codec:
    """One way to write f32 arrays as bytes. Hashable: a static argument of a jit."""

    name: CodecName

    def tile_bytes(self, elements: int) -> int:
        """Bytes of an encoded tile with that many elements."""
        if self.name in _FLOAT_BYTES:
            return elements * _FLOAT_BYTES[self.name]
        return self._payload_bytes(elements) + 2 * -(-elements // _BLOCK[self.name])

    def encoded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(*grid, tile_bytes) of an array with that shape."""
        grid = TileGrid.of(shape)
        return (*grid.grid, self.tile_bytes(grid.elements))

    def encode(self, x: ArrayLike) -> jax.Array:
        """f32[shape] -> uint8[*grid, tile_bytes]."""
        encoded: jax.Array = _encode(self, x)
        return encoded

    def decode(self, encoded: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
        """uint8[*grid, tile_bytes] -> f32[shape]; `shape` is what was encoded.

        Raises:
          ValueError: `encoded` has not the shape that `shape` encodes to.
        """
        if encoded.shape != self.encoded_shape(shape):
            raise ValueError(
                f"{self.name} encodes {shape} as {self.encoded_shape(shape)}, got "
                f"{encoded.shape}; sender and receiver disagree on shape or codec"
            )
        decoded: jax.Array = _decode(self, encoded, tuple(shape))
        return decoded

    def _payload_bytes(self, elements: int) -> int:
        return elements if self.name == "int8" else -(-elements // 2)


def get_codec(name: str) -> Codec:
    """The codec of that name; ValueError with the known ones if there is none."""
    if name not in (*_FLOAT_BYTES, *_BLOCK):
        raise ValueError(f"no codec {name!r}; choose one of f32, bf16, int8, int4")
    return Codec(cast(CodecName, name))


@functools.partial(jax.jit, static_argnums=0)
def encode_with_feedback(
    codec: Codec, x: jax.Array, residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Encodes x + residual; returns (encoded, what the encoding lost).

    Nothing is donated: the old residual is needed again if the delta is refused.

    Args:
      codec: static.
      x: f32[shape].
      residual: f32[shape], what earlier encodings lost; zeros at first.
    """
    total = x + residual
    encoded = codec.encode(total)
    return encoded, total - codec.decode(encoded, x.shape)


def square_sum(codec: Codec, encoded: ArrayLike, shape: tuple[int, ...]) -> float:
    """Of what is decoded; inf or NaN if that, or this sum, is not finite in f32. Waits
    for the result."""
    return float(_square_sum(codec, encoded, tuple(shape)))


def flush_subnormals(x: jax.Array) -> jax.Array:
    """x with everything below the smallest normal f32 replaced by +0."""
    return jnp.where(jnp.abs(x) < SMALLEST_NORMAL, 0.0, x)


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, x: jax.Array) -> jax.Array:
    tiles = TileGrid.of(x.shape).split(flush_subnormals(x.astype(jnp.float32)))
    if codec.name in _FLOAT_BYTES:
        dtype = jnp.float32 if codec.name == "f32" else jnp.bfloat16
        return _to_bytes(_round(tiles) if codec.name == "bf16" else tiles, dtype)
    elements = tiles.shape[-1]
    blocks = _to_blocks(tiles, _BLOCK[codec.name])
    peak = _PEAK[codec.name]
    # NaNs are made infinite: a compiled maximum may pass over a NaN.
    magnitude = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf)
    scale = jnp.max(magnitude, axis=-1, keepdims=True) * (1.0 / peak)
    scale = _round(flush_subnormals(scale))
    usable = jnp.isfinite(scale) & (scale > 0)
    quantized = jnp.round(blocks / jnp.where(usable, scale, 1.0))
    quantized = jnp.where(usable, jnp.clip(quantized, -peak, peak), 0.0)
    flat = quantized.astype(jnp.int8).reshape(*tiles.shape[:-1], -1)[..., :elements]
    payload = lax.bitcast_convert_type(flat, jnp.uint8)
    if codec.name == "int4":
        payload = _pack_nibbles(payload)
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)[..., 0]
    return jnp.concatenate([payload, _to_bytes(scale, jnp.bfloat16)], axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _decode(codec: Codec, encoded: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    grid = TileGrid.of(shape)
    if codec.name in _FLOAT_BYTES:
        dtype = jnp.float32 if codec.name == "f32" else jnp.bfloat16
        whole: jax.Array = grid.join(_from_bytes(encoded, dtype))
        return whole
    elements = grid.elements
    cut = codec._payload_bytes(elements)
    payload, scale = encoded[..., :cut], _from_bytes(encoded[..., cut:], jnp.bfloat16)
    if codec.name == "int4":
        payload = _unpack_nibbles(payload)[..., :elements]
    quantized = lax.bitcast_convert_type(payload, jnp.int8).astype(jnp.float32)
    blocks = _to_blocks(quantized, _BLOCK[codec.name]) * scale[..., None]
    whole = grid.join(blocks.reshape(*encoded.shape[:-1], -1)[..., :elements])
    return whole


@functools.partial(jax.jit, static_argnums=(0, 2))
def _square_sum(codec: Codec, encoded: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.sum(jnp.square(codec.decode(encoded, shape)))


def _round(x: jax.Array) -> jax.Array:
    # A cast to bf16 and back may be optimised away; this operation may not.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _to_bytes(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    octets = lax.bitcast_convert_type(x.astype(dtype), jnp.uint8)
    return octets.reshape(*x.shape[:-1], -1)


def _from_bytes(octets: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    width = jnp.dtype(dtype).itemsize
    octets = octets.reshape(*octets.shape[:-1], -1, width)
    values = lax.bitcast_convert_type(octets, dtype).astype(jnp.float32)
    return flush_subnormals(values)


def _to_blocks(tiles: jax.Array, block: int) -> jax.Array:
    """[*grid, n] -> [*grid, ceil(n / block), block], the end filled with zeros."""
    missing = -tiles.shape[-1] % block
    tiles = jnp.pad(tiles, [(0, 0)] * (tiles.ndim - 1) + [(0, missing)])
    return tiles.reshape(*tiles.shape[:-1], -1, block)


def _pack_nibbles(values: jax.Array) -> jax.Array:
    """[..., n] two's complement -> [..., ceil(n/2)]: first half low, second high."""
    missing = values.shape[-1] % 2
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    low, high = jnp.split(values, 2, axis=-1)
    return (low & 0xF) | (high << 4)


def _unpack_nibbles(packed: jax.Array) -> jax.Array:
    """Inverse of `_pack_nibbles`, up to the filled end; signs are extended."""
    nibbles = jnp.concatenate([packed & 0xF, packed >> 4], axis=-1)
    return (nibbles ^ 8) - 8
