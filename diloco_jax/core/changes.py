"""The formulas of a piece's way up and down: delta, publish and adoption.

An island sends a delta. The coordinator publishes A_v = A_{v-1} + dec(enc(Theta_v -
A_{v-1})): encoded once, with the same bits wherever it is applied. Theta - A is the
change that the codec has lost so far, and the next publish carries it: downward error
feedback without a separate residual. An island adopts A_v by an adopt rule.

Each fragment on an island has a base: a take sets base = local, an adoption sets base =
anchor. The difference local - base since then is not in any delta yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.core.codecs import Codec, compiled, flush_subnormals
from diloco_jax.core.families import AdoptRule, Alpha, Arrays
from diloco_jax.core.tiles import MOST_ELEMENTS, ArrayLike, TileGrid, blocks


@jax.jit
def delta(anchor: jax.Array, local: jax.Array) -> jax.Array:
    """Return anchor - local in f32: a step along *minus* the delta leads to `local`.

    This is Theta - theta[m] of Decoupled DiLoCo (arXiv 2604.21428), with the anchor in
    place of Theta, which the island does not have.
    """
    return anchor.astype(jnp.float32) - local.astype(jnp.float32)


def publish_tiles(
    codec: Codec, theta: ArrayLike, anchor: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Encode the change of some tiles, f32[n, elements] each; return it, uint8[n,
    tile_bytes], and the new anchor, f32[n, elements].

    The new anchor comes from the encoded bytes, as on the islands. Nothing is donated.
    """
    encoded = _encode_change(codec, theta, anchor)
    return encoded, apply_to_tiles(codec, anchor, encoded)


@compiled(0, 3)
def apply_publish(
    codec: Codec, anchor: jax.Array, encoded: jax.Array, groups: int = 1
) -> jax.Array:
    """Return the anchor after a publish, f32[shape]. groups: static, of its tiles.
    Nothing is donated."""
    return _moved(anchor, codec.decode(encoded, anchor.shape, groups))


@compiled(0)
def apply_to_tiles(codec: Codec, anchor: ArrayLike, encoded: ArrayLike) -> jax.Array:
    """Return some tiles of the anchor after a publish, f32[n, elements]. See
    `apply_publish`.
    """
    return _moved(anchor, codec.decode_tiles(encoded, anchor.shape[-1]))


def _moved(anchor: ArrayLike, change: jax.Array) -> jax.Array:
    # Products in the decoded change are exact, so a fused multiply-add changes no bit;
    # a sum below the smallest normal would be zero on some devices only.
    return flush_subnormals(anchor + change)


@compiled(0)
def _encode_change(codec: Codec, theta: ArrayLike, anchor: ArrayLike) -> jax.Array:
    return codec.encode_tiles(theta - anchor)


def publish_fragment(
    codec: Codec, grids: Sequence[TileGrid], theta: Arrays, anchor: Arrays
) -> tuple[Arrays, Arrays]:
    """Encode the change of a fragment; return (uint8[*grid, tile_bytes] by piece, the
    new anchor)."""
    found = [publish_tiles(codec, *pair) for pair in zip(theta, anchor, strict=True)]
    encoded = tuple(
        octets.reshape(*grid.grid, -1)
        for grid, (octets, _) in zip(grids, found, strict=True)
    )
    return encoded, tuple(new for _, new in found)


@compiled(0)
def adopt(
    rule: AdoptRule,
    local: jax.Array,
    base: jax.Array,
    anchor: jax.Array,
    alpha: jax.Array | float,
) -> jax.Array:
    """Return the piece's new local values, f32[shape]: see `AdoptRule.adopt`. `rule` is
    static; nothing is donated."""
    return rule.adopt(local, base, anchor, alpha)


def moved(value: jax.Array, before: jax.Array, anchor: jax.Array) -> jax.Array:
    """Return anchor + (value - before), f32[shape]: the value as far from the new
    anchor as it was from the old one."""
    return anchor + (value - before)


@dataclasses.dataclass(frozen=True)
class Formula(AdoptRule):
    """An adopt rule of the package: a function of local, base, anchor and alpha, and
    what `AdoptRule` says of it."""

    of: Callable[[jax.Array, jax.Array, jax.Array, Alpha], jax.Array]
    adopts_first: bool = True
    keeps_pending: bool = False
    loses_steps: bool = False

    def adopt(
        self, local: jax.Array, base: jax.Array, anchor: jax.Array, alpha: Alpha
    ) -> jax.Array:
        """Return the function's value."""
        return self.of(local, base, anchor, alpha)


OVERWRITE = Formula(
    lambda local, base, anchor, alpha: anchor, adopts_first=False, loses_steps=True
)
"""The anchor. Steps since the take are lost (Decoupled DiLoCo, arXiv 2604.21428)."""
BLEND = Formula(
    lambda local, base, anchor, alpha: alpha * local + (1 - alpha) * anchor,
    adopts_first=False,
)
"""alpha * local + (1 - alpha) * anchor (Streaming DiLoCo, arXiv 2501.18512). Steps
since the take count in the next delta."""
REBASE = Formula(lambda local, base, anchor, alpha: moved(local, base, anchor))
"""anchor + (local - base), which loses no step."""
KEEP = dataclasses.replace(REBASE, keeps_pending=True)
"""The rule "rebase", beside a delta that no version has yet."""


# ---- how long a change is ----------------------------------------------------------


def tile_squares(tiles: ArrayLike) -> list[float]:
    """Return the sum of the squares of each tile of f32[n, elements], in f64."""
    found: list[float] = []
    for rows in blocks(*tiles.shape):
        part = tiles if rows.stop - rows.start == len(tiles) else tiles[rows]
        with jax.enable_x64(True):
            halved: npt.NDArray[np.float64] = np.asarray(halved_squares(part))
        found += halved.sum(axis=1).tolist()
    return found


@jax.jit
def halved_squares(tiles: jax.Array) -> jax.Array:
    """Return f64[n, an odd number]: the squares, one half added to the other again and
    again. So the order of the sum is given, and vectors add it.

    A tile of more than `MOST_ELEMENTS` is cut into runs of so many, with zeros at the
    end, and the result is f64[n, runs].
    """
    squares = jnp.square(tiles.astype(jnp.float64))
    count, elements = squares.shape
    if elements > MOST_ELEMENTS:
        squares = jnp.pad(squares, ((0, 0), (0, -elements % MOST_ELEMENTS)))
        squares = squares.reshape(-1, MOST_ELEMENTS)
    while squares.shape[1] % 2 == 0:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares.reshape(count, -1)
