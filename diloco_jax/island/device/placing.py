"""Place arrays on an island's devices, whichever host holds these.

A host sends the shards that it holds, and fetches those that the spread gives it. If
every host has the whole value, each puts its own shards on its devices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from diloco_jax.core.payload import Box
from diloco_jax.island.device.spread import Index, Spread, Tiles, tiles_at

T = TypeVar("T")


def place(value: npt.NDArray[np.generic], sharding: NamedSharding) -> jax.Array:
    """Place an array, cut by `sharding`. The values are copied, as an array on a device
    may be donated.

    Every host calls it with the same value, and reads only the shards of its own
    devices.
    """
    placed: jax.Array
    if sharding.is_fully_addressable:
        placed = jax.device_put(value, sharding, may_alias=False)
    else:
        placed = jax.make_array_from_callback(
            value.shape, sharding, lambda index: np.array(value[index])
        )
    return placed


def land(
    spread: Spread,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    boxes: Mapping[tuple[int, Tiles], npt.NDArray[Any]],
) -> jax.Array:
    """Put this host's tiles of a piece on its devices, as the spread has them. It
    communicates with no other host, so any thread may call it.

    shape: of all tiles, [*grid, n]. boxes: by row (0 without rows) and tiles. Rows that
    are not given are zeros. The values are copied, as in `place`.
    """
    sharding = spread.landing
    if not spread.moved and sharding.is_fully_addressable:
        (value,) = boxes.values()
        return place(value, sharding)

    def shard(index: Index | None) -> npt.NDArray[np.generic]:
        assert index is not None
        row, within = 0, index
        if spread.moved:
            row, within = index[0].indices(spread.rows)[0], index[1:]
        start, stop = tiles_at(within, shape[:-1])
        value = boxes.get((row, (start, stop)))
        if value is None:
            assert spread.rows > 1, f"{within} is in none of {list(boxes)}"
            value = np.zeros((*np.subtract(stop, start), shape[-1]), dtype)
        return np.array(value[None] if spread.moved else value)

    landed = spread.landed_shape(shape)
    return jax.make_array_from_callback(landed, sharding, shard)


def in_turn(arrays: T) -> T:
    """Return the arrays; on a CPU island of several hosts, wait until they are
    computed.

    An accelerator runs programs, and so their collectives, in the order of their
    dispatch. A CPU runs independent programs side by side, so hosts could pair
    different collectives with each other.
    """
    if _side_by_side():
        jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
    return arrays


@functools.cache
def _side_by_side() -> bool:
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def zeros(
    shape: tuple[int, ...], dtype: npt.DTypeLike, sharding: NamedSharding
) -> jax.Array:
    """Return zeros cut by `sharding`, one shard at a time."""
    part = np.zeros(sharding.shard_shape(shape), dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: part.copy())


def abstract(
    shape: tuple[int, ...], dtype: npt.DTypeLike, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    """Return an array without values, to compile for devices that this machine may not
    have.
    """
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def held(arrays: Sequence[jax.Array]) -> list[tuple[Box, jax.Array]]:
    """Return the tiles of encoded pieces that this host is to send.

    Of every shard one copy is sent: the first, if it is on a device of this host.
    arrays: uint8[*grid, tile_bytes], by piece of a fragment.
    """
    return [
        (_box(number, shard.index, array.shape), shard.data)
        for number, array in enumerate(arrays)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def _box(piece: int, index: Index, shape: tuple[int, ...]) -> Box:
    """Return the index of a shard as tiles; the last axis, the bytes of a tile, is
    whole."""
    assert index[-1].indices(shape[-1])[:2] == (0, shape[-1]), "a tile is not cut"
    return Box(piece, *tiles_at(index, shape[:-1]))
