"""Place arrays on an island's devices, whichever host holds these.

A host sends the shards that it holds, and fetches those that its devices need. If every
host has the whole value, each puts its own shards on its devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from diloco_jax.core.payload import Box, Part

Index = tuple[slice, ...]
Region = tuple[Index, npt.NDArray[Any]]
"""Part of an array: where it lies (start and stop of every axis), and its values."""


def place(value: npt.NDArray[np.generic], sharding: NamedSharding) -> jax.Array:
    """Place an array cut by `sharding`. Every host calls it with the same value, of
    which only its devices' shards are read. The values are copied, since an array on a
    device may be donated."""
    placed: jax.Array
    if sharding.is_fully_addressable:
        placed = jax.device_put(value, sharding, may_alias=False)
    else:
        placed = jax.make_array_from_callback(
            value.shape, sharding, lambda index: np.array(value[index])
        )
    return placed


def assemble(
    shape: tuple[int, ...], sharding: NamedSharding, regions: Sequence[Region]
) -> jax.Array:
    """Assemble an array cut by `sharding` from the regions that this host's devices
    need; each shard lies in one of them. The values are copied, as in `place`."""
    if sharding.is_fully_addressable:
        ((_, value),) = regions
        return place(value, sharding)

    def shard(index: Index | None) -> npt.NDArray[np.generic]:
        assert index is not None
        bounds = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
        for region, value in regions:
            if all(
                r.start <= low and high <= r.stop
                for r, (low, high) in zip(region, bounds, strict=True)
            ):
                within = tuple(
                    slice(low - r.start, high - r.start)
                    for r, (low, high) in zip(region, bounds, strict=True)
                )
                return np.array(value[within])
        raise AssertionError(f"shard {index} is in none of the regions {regions}")

    return jax.make_array_from_callback(shape, sharding, shard)


def zeros(
    shape: tuple[int, ...], dtype: npt.DTypeLike, sharding: NamedSharding
) -> jax.Array:
    """Return zeros cut by `sharding`, one shard at a time."""
    part = np.zeros(sharding.shard_shape(shape), dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: part.copy())


def abstract(
    shape: tuple[int, ...], dtype: npt.DTypeLike, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    """Return an array without values, to compile for devices that this machine may
    lack."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def held(arrays: Sequence[jax.Array]) -> list[tuple[Box, jax.Array]]:
    """Return the tiles of encoded pieces that this host is to send: the first copy of
    every shard, where that is on a device of this host.

    arrays: uint8[*grid, tile_bytes], by piece of a fragment.
    """
    return [
        (_box(number, shard.index, array.shape), shard.data)
        for number, array in enumerate(arrays)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def needed(shardings: Sequence[tuple[NamedSharding, tuple[int, ...]]]) -> Part:
    """Return the tiles that this host's devices need of encoded pieces with these
    shardings and shapes; empty, which means all, if every device is this host's own."""
    if all(sharding.is_fully_addressable for sharding, _ in shardings):
        return ()
    boxes = dict.fromkeys(
        _box(number, index, shape)
        for number, (sharding, shape) in enumerate(shardings)
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
    )
    return tuple(boxes)


def _box(piece: int, index: Index, shape: tuple[int, ...]) -> Box:
    """Return the index of a shard as tiles; the last axis, the bytes of a tile, is
    whole."""
    bounds = [
        part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True)
    ]
    assert bounds[-1] == (0, shape[-1]), "a tile's bytes are not cut"
    return Box(
        piece, tuple(b[0] for b in bounds[:-1]), tuple(b[1] for b in bounds[:-1])
    )
