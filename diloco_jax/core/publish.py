"""What the coordinator publishes, and what islands make of it.

A_v = A_{v-1} + dec(enc(Theta_v - A_{v-1})): encoded once, and the same bits wherever
it is applied. Theta - A is what the codec has not brought across yet, so the next
publish carries it: downward error feedback without a residual of its own.
"""

from __future__ import annotations

import functools

import jax

from diloco_jax.core.codecs.codec import Codec, flush_subnormals
from diloco_jax.core.tiles import ArrayLike


def publish(
    codec: Codec, theta: ArrayLike, anchor: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """(encoded change uint8[*grid, tile_bytes], new anchor f32[shape]) of one piece.

    The new anchor comes from the encoded bytes through `apply_publish`, as on the
    islands. Nothing is donated.
    """
    encoded = _encode_change(codec, theta, anchor)
    return encoded, apply_publish(codec, anchor, encoded)


@functools.partial(jax.jit, static_argnums=0)
def apply_publish(codec: Codec, anchor: jax.Array, encoded: jax.Array) -> jax.Array:
    """The anchor after a publish, f32[shape]. Nothing is donated."""
    # Products in the decoded change are exact, so a fused multiply-add changes no bit;
    # a sum below the smallest normal would be zero on some devices only.
    return flush_subnormals(anchor + codec.decode(encoded, anchor.shape))


@functools.partial(jax.jit, static_argnums=0)
def _encode_change(codec: Codec, theta: jax.Array, anchor: jax.Array) -> jax.Array:
    return codec.encode(theta - anchor)
