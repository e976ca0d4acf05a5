"""Arrays as bytes, in tiles that do not depend on a mesh.

An array is cut into a grid of equal tiles (`tiles.py`), and each tile is encoded by
itself: f32[shape] <-> uint8[*grid, tile_bytes]. So an encode or decode that is sharded
on tile boundaries needs no communication, and the bytes do not depend on the sharding.
The member of the family decides how to encode a tile, in a fixed number of bytes.

Values below the smallest normal f32 are zeros on both sides, because some devices and
compilers flush them and others do not. A value that is not finite must decode as one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diloco_jax.core.codecs import CODECS
from diloco_jax.core.tiles import ArrayLike, TileGrid

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class TileCodec(Protocol):
    """A member of the family. All arrays end in the axis of one tile.

    Every machine must decode the same bits, fused with other operations or not: use
    only products that are exact in f32, and no sums.
    """

    def tile_bytes(self, elements: int) -> int:
        """Return the bytes of an encoded tile with that many elements."""

    def encode(self, tiles: jax.Array) -> jax.Array:
        """Encode f32[..., elements], free of subnormals -> uint8[..., tile_bytes]."""

    def decode(self, octets: jax.Array, elements: int) -> jax.Array:
        """Decode uint8[..., tile_bytes] -> f32[..., elements], free of subnormals."""

    def largest_error(self, tiles: jax.Array) -> jax.Array:
        """Return the largest change of each element, f32[..., elements]; for tests."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """One way to write f32 arrays as bytes. Hashable: a static argument of a jit."""

    name: str
    """The member's name, as a config has it."""

    @property
    def member(self) -> TileCodec:
        """The member of the family, which encodes tiles."""
        return CODECS.find(self.name)

    def tile_bytes(self, elements: int) -> int:
        """Return the bytes of an encoded tile with that many elements."""
        return self.member.tile_bytes(elements)

    def encoded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (*grid, tile_bytes) of an array with that shape."""
        grid = TileGrid.of(shape)
        return (*grid.grid, self.tile_bytes(grid.elements))

    def encode(self, x: ArrayLike) -> jax.Array:
        """Encode f32[shape] -> uint8[*grid, tile_bytes]."""
        encoded: jax.Array = _encode(self, x)
        return encoded

    def decode(self, encoded: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
        """Decode uint8[*grid, tile_bytes] -> f32[shape], the shape before encoding.

        Raises:
          ValueError: `encoded` does not have the shape that `shape` encodes to.
        """
        if encoded.shape != self.encoded_shape(shape):
            raise ValueError(
                f"{self.name} encodes {shape} as {self.encoded_shape(shape)}, got "
                f"{encoded.shape}; sender and receiver disagree on shape or codec"
            )
        decoded: jax.Array = _decode(self, encoded, tuple(shape))
        return decoded

    def decode_tiles(
        self, encoded: ArrayLike, elements: int, every: int = 1
    ) -> jax.Array:
        """Decode some of an array's tiles, uint8[n, tile_bytes] -> f32[n, elements]; of
        each only the elements at multiples of `every`."""
        decoded: jax.Array = _decode_tiles(self, encoded, elements, every)
        return decoded

    def encode_tiles(self, tiles: ArrayLike) -> jax.Array:
        """Encode f32[n, elements] -> uint8[n, tile_bytes]."""
        encoded: jax.Array = _encode_tiles(self, tiles)
        return encoded


def get_codec(name: str) -> Codec:
    """Return the codec of that name; ValueError with the known names if unknown."""
    CODECS.find(name)
    return Codec(name)


@functools.partial(jax.jit, static_argnums=0)
def encode_with_feedback(
    codec: Codec, x: jax.Array, residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Encode x + residual; return (encoded, new residual that the encoding lost).

    Nothing is donated: the old residual is needed again if the delta is refused.

    Args:
      codec: static.
      x: f32[shape].
      residual: f32[shape], the loss of earlier encodings; zeros at first.
    """
    total = x + residual
    encoded = codec.encode(total)
    return encoded, total - codec.decode(encoded, x.shape)


def flush_subnormals(x: jax.Array) -> jax.Array:
    """Return x with everything below the smallest normal f32 replaced by +0."""
    return jnp.where(jnp.abs(x) < SMALLEST_NORMAL, 0.0, x)


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, x: jax.Array) -> jax.Array:
    encoded: jax.Array = _encode_tiles(codec, TileGrid.of(x.shape).split(x))
    return encoded


@functools.partial(jax.jit, static_argnums=0)
def _encode_tiles(codec: Codec, tiles: jax.Array) -> jax.Array:
    return codec.member.encode(flush_subnormals(tiles.astype(jnp.float32)))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _decode(codec: Codec, encoded: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    grid = TileGrid.of(shape)
    whole: jax.Array = grid.join(codec.member.decode(encoded, grid.elements))
    return whole


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _decode_tiles(
    codec: Codec, encoded: jax.Array, elements: int, every: int
) -> jax.Array:
    decoded = codec.member.decode(encoded, elements)
    return decoded if every == 1 else lax.slice_in_dim(decoded, 0, None, every, axis=1)


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
