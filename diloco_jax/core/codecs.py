"""Codecs: arrays as bytes, in tiles that do not depend on a mesh.

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
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from diloco_jax.core.families import CODECS, TileCodec
from diloco_jax.core.tiles import ArrayLike, TileGrid

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(
    *static: int, donates: tuple[int, ...] = ()
) -> Callable[[Function], Function]:
    """Compile a function with `jax.jit`; its arguments of these numbers are static."""
    made: Any = functools.partial(
        jax.jit, static_argnums=static, donate_argnums=donates
    )
    return made  # type: ignore[no-any-return]


SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


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

    def encoded_shape(self, shape: tuple[int, ...], groups: int = 1) -> tuple[int, ...]:
        """Return (*grid, tile_bytes) of an array with that shape; `TileGrid.of` says
        what groups are, here and below."""
        grid = TileGrid.of(shape, groups)
        return (*grid.grid, self.tile_bytes(grid.elements))

    @compiled(0, 2)
    def encode(self, x: ArrayLike, groups: int = 1) -> jax.Array:
        """Encode f32[shape] -> uint8[*grid, tile_bytes]."""
        return self.encode_tiles(TileGrid.of(x.shape, groups).split(x))

    @compiled(0, 2, 3)
    def decode(
        self, encoded: ArrayLike, shape: tuple[int, ...], groups: int = 1
    ) -> jax.Array:
        """Decode uint8[*grid, tile_bytes] -> f32[shape], the shape before encoding.

        Raises:
          ValueError: `encoded` does not have the shape that `shape` encodes to.
        """
        if encoded.shape != (expected := self.encoded_shape(shape, groups)):
            raise ValueError(
                f"{self.name} encodes {shape} as {expected}, got {encoded.shape}; "
                f"sender and receiver disagree on shape or codec"
            )
        grid = TileGrid.of(shape, groups)
        whole: jax.Array = grid.join(self.decode_tiles(encoded, grid.elements))
        return whole

    @compiled(0, 2)
    def decode_tiles(self, encoded: ArrayLike, elements: int) -> jax.Array:
        """Decode tiles, uint8[..., tile_bytes] -> f32[..., elements]."""
        return self.member.decode(jnp.asarray(encoded), elements)

    @compiled(0)
    def encode_tiles(self, tiles: ArrayLike) -> jax.Array:
        """Encode tiles, f32[..., elements] -> uint8[..., tile_bytes]."""
        return self.member.encode(flush_subnormals(tiles.astype(jnp.float32)))


def get_codec(name: str) -> Codec:
    """Return the codec of that name; ValueError with the known names if unknown."""
    CODECS.find(name)
    return Codec(name)


@compiled(0, 3)
def encode_with_feedback(
    codec: Codec, x: jax.Array, residual: jax.Array, groups: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Encode x + residual; return (encoded, new residual that the encoding lost).

    Nothing is donated: the old residual is needed again if the delta is refused.

    Args:
      codec: static.
      x: f32[shape].
      residual: f32[shape], the loss of earlier encodings; zeros at first.
      groups: static; as `TileGrid.of`.
    """
    total = x + residual
    encoded = codec.encode(total, groups)
    return encoded, total - codec.decode(encoded, x.shape, groups)


EXACT_BITS = 11
"""Bits of a count that are kept."""


@compiled()
def encode_uses(counts: jax.Array) -> jax.Array:
    """Encode counts below 2^32 on a log scale, uint32[n] -> uint8[1, n * USE_BYTES].

    Up to 2047 they are exact; of larger ones the first `EXACT_BITS` bits stay, so that
    what is read is never more than what was counted. All lie in one tile.
    """
    bits = 32 - lax.clz(counts)
    shift = jnp.maximum(bits, EXACT_BITS) - EXACT_BITS
    codes = (shift << (EXACT_BITS - 1)) + (counts >> shift)
    return to_octets(codes.astype(jnp.uint16), jnp.uint16)[None]


def decode_uses(octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Invert `encode_uses`, but for what it left out: [1, n * USE_BYTES] -> f64[n].
    Every code stands for a number."""
    codes = octets.reshape(-1).view("<u2").astype(np.int64)
    shift = np.maximum((codes >> (EXACT_BITS - 1)) - 1, 0)
    kept = (codes - (shift << (EXACT_BITS - 1))).astype(np.float64)
    counts: npt.NDArray[np.float64] = np.ldexp(kept, shift)
    return counts


def flush_subnormals(x: ArrayLike) -> jax.Array:
    """Return x with everything below the smallest normal f32 replaced by +0."""
    return jnp.where(jnp.abs(x) < SMALLEST_NORMAL, 0.0, x)


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


@dataclasses.dataclass(frozen=True)
class Floats:
    """A `TileCodec` of floats of one type, rounded to nearest even."""

    dtype: Any

    def tile_bytes(self, elements: int) -> int:
        """Return the bytes of that many floats."""
        width: int = jnp.dtype(self.dtype).itemsize
        return elements * width

    def encode(self, tiles: jax.Array) -> jax.Array:
        """Round the values and write them as octets."""
        rounded = tiles if self.dtype == jnp.float32 else round_to_bf16(tiles)
        return to_octets(rounded, self.dtype)

    def decode(self, octets: jax.Array, elements: int) -> jax.Array:
        """Return the rounded values."""
        return from_octets(octets, self.dtype)

    def largest_error(self, tiles: jax.Array) -> jax.Array:
        """Return half a step of the significand, 0 of f32."""
        return jnp.abs(tiles) * (0.0 if self.dtype == jnp.float32 else 2.0**-8)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A `TileCodec` of integers of few bits, with a scale per block of a tile.

    An encoded tile is its integers and then one bf16 scale per block of consecutive
    elements. An integer times a bf16 scale is exact in f32, so all machines decode the
    same bits, fused or not. A block with a NaN or an infinity has a NaN scale.

    Integers of 8 and 4 bits go from -peak to peak, of 2 bits from -2 to 1: their scale
    has the sign with which the largest magnitude of the block is -2, so that no level
    is lost and nothing larger than the others is cut off (docs/design/codecs.md).

    A byte holds 8 / bits integers. Element i is integer i // w of byte i % w, the
    lowest bits first, where w is the number of bytes.
    """

    bits: int
    """Bits of an integer: 8, 4 or 2."""
    block: int
    """Number of elements that share one scale."""

    @property
    def peak(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def tile_bytes(self, elements: int) -> int:
        """Return the bytes of the integers, plus 2 per block."""
        return self._payload_bytes(elements) + 2 * -(-elements // self.block)

    def encode(self, tiles: jax.Array) -> jax.Array:
        """Round to the nearest integer, in units of the block's scale."""
        elements = tiles.shape[-1]
        blocks = self._to_blocks(tiles)
        # NaNs are made infinite: a compiled maximum may pass over a NaN.
        magnitude = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf)
        largest, least = jnp.max(magnitude, axis=-1, keepdims=True), -self.peak
        scale = largest * (1.0 / self.peak)
        if self.bits == 2:
            below = jnp.any(blocks == -largest, axis=-1, keepdims=True)
            scale, least = jnp.where(below, largest, -largest) * 0.5, -2
        scale = round_to_bf16(flush_subnormals(scale))
        usable = jnp.isfinite(scale) & (scale != 0)
        quantized = jnp.round(blocks / jnp.where(usable, scale, 1.0))
        clipped = jnp.clip(quantized, least, self.peak)
        quantized = jnp.where(usable, clipped, 0.0)
        flat = quantized.astype(jnp.int8).reshape(*tiles.shape[:-1], -1)[..., :elements]
        payload = lax.bitcast_convert_type(flat, jnp.uint8)
        if self.bits < 8:
            planes = jnp.split(_padded(payload, self._planes), self._planes, axis=-1)
            payload = planes[0] & self._mask
            for number, plane in enumerate(planes[1:], 1):
                payload |= (plane & self._mask) << (number * self.bits)
        scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)[..., 0]
        return jnp.concatenate([payload, to_octets(scale, jnp.bfloat16)], axis=-1)

    def decode(self, octets: jax.Array, elements: int) -> jax.Array:
        """Multiply integers by scales."""
        cut = self._payload_bytes(elements)
        scale = from_octets(octets[..., cut:], jnp.bfloat16)
        payload = octets[..., :cut]
        if self.bits < 8:
            shifts = range(0, 8, self.bits)
            planes = [(payload >> shift) & self._mask for shift in shifts]
            sign = 1 << (self.bits - 1)
            payload = (jnp.concatenate(planes, axis=-1) ^ sign) - sign  # Extended.
            payload = payload[..., :elements]
        quantized = lax.bitcast_convert_type(payload, jnp.int8).astype(jnp.float32)
        blocks = self._to_blocks(quantized) * scale[..., None]
        return blocks.reshape(*octets.shape[:-1], -1)[..., :elements]

    def largest_error(self, tiles: jax.Array) -> jax.Array:
        """Return half a scale, or slightly more because the scale is rounded; of 2 bits
        a scale, which may cut off as much as that."""
        blocks = jnp.abs(self._to_blocks(tiles))
        largest = jnp.max(blocks, axis=-1, keepdims=True) / self.peak * 0.51
        spread = jnp.broadcast_to(largest, blocks.shape)
        return spread.reshape(*tiles.shape[:-1], -1)[..., : tiles.shape[-1]]

    @property
    def _planes(self) -> int:
        return 8 // self.bits

    @property
    def _mask(self) -> int:
        return (1 << self.bits) - 1

    def _payload_bytes(self, elements: int) -> int:
        return -(-elements * self.bits // 8)

    def _to_blocks(self, tiles: jax.Array) -> jax.Array:
        """Reshape [..., n] -> [..., ceil(n / block), block], padded with zeros."""
        return _padded(tiles, self.block).reshape(*tiles.shape[:-1], -1, self.block)


def _padded(x: jax.Array, to: int) -> jax.Array:
    """Pad the last axis with zeros to a multiple."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % to)])


F32, BF16 = Floats(jnp.float32), Floats(jnp.bfloat16)
INT8, INT4 = Blocks(bits=8, block=256), Blocks(bits=4, block=32)
INT2 = Blocks(bits=2, block=32)


def decode_piece(codec: Codec, grid: TileGrid, encoded: jax.Array) -> jax.Array:
    """Decode a delta, uint8[*grid, tile_bytes] -> f32[n, e]. grid: of the piece."""
    return codec.decode_tiles(encoded, grid.elements).reshape(grid.in_order)
