"""Check a codec from outside the package on a tiny array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.core.codecs.codec import TileCodec

TILES, ELEMENTS = 3, 40


def check(codec: TileCodec) -> None:
    """Raise an error that describes the fault of the codec, if it has one."""
    nbytes = codec.tile_bytes(ELEMENTS)
    if not isinstance(nbytes, int) or nbytes < 1:
        raise ValueError(f"tile_bytes({ELEMENTS}) = {nbytes!r}; it must be an int > 0")
    rng = np.random.default_rng(0)
    tiles = jnp.asarray(rng.standard_normal((TILES, ELEMENTS)), jnp.float32)
    octets = jax.jit(codec.encode)(tiles)
    if (octets.shape, octets.dtype) != ((TILES, nbytes), jnp.uint8):
        raise ValueError(
            f"encode made {octets.dtype}{list(octets.shape)} of float32"
            f"{list(tiles.shape)}; with tile_bytes = {nbytes} it must make uint8"
            f"{[TILES, nbytes]}"
        )
    decoded = jax.jit(codec.decode, static_argnums=1)(octets, ELEMENTS)
    if (decoded.shape, decoded.dtype) != (tiles.shape, jnp.float32):
        raise ValueError(
            f"decode made {decoded.dtype}{list(decoded.shape)}; it must make float32"
            f"{list(tiles.shape)}, as was encoded"
        )
    if not np.isfinite(decoded).all():
        raise ValueError("decode made numbers that are not finite of finite ones")
    bad = codec.decode(codec.encode(tiles.at[0, 1].set(jnp.nan)), ELEMENTS)
    if np.isfinite(bad[0]).all():
        raise ValueError(
            "a NaN is not seen after decode; it must stay one, or infinite"
        )
