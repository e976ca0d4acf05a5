"""An island's mesh: how parameters, batches and a publish are placed on it.

Mesh axes: "data" repeats the parameters, "fsdp" cuts them where they rest and each
layer gathers its own, "expert" cuts the experts of a layer and repeats all else,
"tensor" cuts the layer's work as well. Sequences are cut over all but "tensor".
("sequence" is to come.)

A parameter is cut where its pieces' tiles end (`core/tiles.py`), so that every device
encodes and decodes what it holds. Where a mesh axis divides no axis of the tile grid,
small parameters lie whole on its devices, and large ones are cut regardless: takes and
adoptions gather such a piece along that mesh axis.

A host sends the shards that it holds, and fetches those that the spread gives it. If
every host has the whole value, each puts its own shards on its devices.

The spread divides a publish over the hosts: each tile comes to one of them. Devices of
several hosts may need the same tiles: copies of the parameters along "data", and pieces
that the mesh cuts inside their tiles. Each host fetches other tiles, so every byte
crosses the island's link once. Then a compiled reshard moves them over the slice's own
interconnect to the devices that need them (`programs.py`).

All hosts compute the same spread, from the mesh, the host of every device and the tile
grid. No message is needed for it, and no device: a topology will do.

`R`: rows of a piece that has fewer tiles than the island has hosts. One row of each
tile has its bytes, and the others have zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from diloco_jax import machine
from diloco_jax.before_jax import HOST_DEVICES
from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.core.fragments import LAYERS, Box, Part, groups_of
from diloco_jax.core.tiles import TileGrid
from diloco_jax.models.model import Layout

Index = tuple[slice, ...]
Tiles = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and stop, axis by axis of the grid, as in a `Box`."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Landing places of the tiles of one kind of piece."""

    landing: NamedSharding
    """Sharding of what lands: [R, *grid, n] if it is to be moved, else [*grid, n]."""
    rows: int
    """R; 0: every tile lands where it belongs, and nothing is to be moved."""
    hosts: Mapping[Tiles, tuple[int, ...]]
    """Host on whose devices these tiles land, for each row; without rows, one host."""

    @property
    def moved(self) -> bool:
        """True if a reshard moves the tiles after they have landed."""
        return self.rows > 0

    def row_of(self, host: int, tiles: Tiles) -> int:
        """Return the row into which this host puts the bytes of these tiles."""
        return self.hosts[tiles].index(host)

    def landed_shape(self, encoded: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what lands, of tiles [*grid, n]."""
        return (self.rows, *encoded) if self.moved else encoded


Spreads = Sequence[tuple[Spread, TileGrid]]
"""For every piece of a fragment its spread, and its tiles."""


def parts_by_host(pieces: Spreads) -> dict[int, Part]:
    """Return the part of a fragment's payload that each host fetches, by process index.

    The parts are disjoint and cover the payload. A host without a tile gets an empty
    box, since an empty part means the whole payload.
    """
    devices = pieces[0][0].landing.mesh.devices.flat
    boxes: dict[int, list[Box]] = {
        host: [] for host in sorted({*map(host_of, devices)})
    }
    loads = dict.fromkeys(boxes, 0)
    # The largest piece first: small ones even out what large ones leave.
    sizes = [math.prod(grid.in_order) for _, grid in pieces]
    for number in sorted(range(len(pieces)), key=lambda i: -sizes[i]):
        spread, grid = pieces[number]
        for (start, stop), hosts in spread.hosts.items():
            host = min(hosts, key=loads.__getitem__)
            boxes[host].append(Box(number, start, stop))
            loads[host] += grid.elements * math.prod(
                high - low for low, high in zip(start, stop, strict=True)
            )
    corner = (0,) * len(pieces[0][1].grid)
    nothing = Box(0, corner, corner)
    return {host: tuple(found) or (nothing,) for host, found in boxes.items()}


@functools.lru_cache(maxsize=256)
def spread_of(encoded: NamedSharding, grid: tuple[int, ...]) -> Spread:
    """Return the spread of pieces whose tiles belong on this sharding, [*grid, n].

    What the sharding cuts stays cut. The tiles are cut further by each prime factor of
    the mesh that lies across hosts, as long as the grid divides by it. The other
    factors make the rows.
    """
    belong = _hosts(encoded, grid, rows=0)
    if all(len(set(hosts)) == 1 for hosts in belong.values()):
        return Spread(encoded, 0, {tiles: h[:1] for tiles, h in belong.items()})
    assert isinstance(encoded.mesh, Mesh)
    mesh, factors = _by_primes(encoded.mesh)
    axes = (*encoded.spec, *(None,) * len(grid))
    cuts = [list(factors[axis] if axis else ()) for axis in axes[: len(grid)]]
    rows: list[str] = []
    for name in _across_hosts(mesh):
        if any(name in cut for cut in cuts):
            continue
        fits = [
            cut
            for cut, extent in zip(cuts, grid, strict=True)
            if extent % _size(mesh, [*cut, name]) == 0
        ]
        # The first axis: the tiles of a box then lie together in the payload.
        (fits[0] if fits else rows).append(name)
    spec = PartitionSpec(tuple(rows), *map(tuple, cuts))  # type: ignore[no-untyped-call]
    landing, count = NamedSharding(mesh, spec), _size(mesh, rows)
    return Spread(landing, count, _hosts(landing, grid, count))


def host_of(device: jax.Device) -> int:
    """Return the process index of a device's host."""
    index: int = device.process_index
    return index


def tiles_at(index: Index, grid: tuple[int, ...]) -> Tiles:
    """Return the tiles of the shard at this index of [*grid, n]."""
    bounds = [
        part.indices(extent)[:2] for part, extent in zip(index, grid, strict=False)
    ]
    return tuple(low for low, _ in bounds), tuple(high for _, high in bounds)


def _hosts(
    sharding: NamedSharding, grid: tuple[int, ...], rows: int
) -> dict[Tiles, tuple[int, ...]]:
    """Return the hosts of the devices that have these tiles: one by row, or all of
    them if there are no rows."""
    shape = (rows, *grid, 1) if rows else (*grid, 1)
    found: dict[Tiles, dict[int, int]] = {}
    for place, (device, index) in enumerate(
        sharding.devices_indices_map(shape).items()
    ):
        row = index[0].indices(rows)[0] if rows else place
        tiles = tiles_at(index[1:] if rows else index, grid)
        found.setdefault(tiles, {}).setdefault(row, host_of(device))
    return {
        tiles: tuple(host for _, host in sorted(by_row.items()))
        for tiles, by_row in sorted(found.items())
    }


def _by_primes(mesh: Mesh) -> tuple[Mesh, dict[str, list[str]]]:
    """Return the mesh with an axis for each prime factor of its axes, and the names of
    each axis's factors, the outermost first."""
    factors = {axis: _primes(size) for axis, size in mesh.shape.items()}
    names = {
        axis: [f"{axis}.{number}" for number in range(len(primes))]
        for axis, primes in factors.items()
    }
    shape = [prime for primes in factors.values() for prime in primes]
    flat = [name for found in names.values() for name in found]
    types = (AxisType.Auto,) * len(flat)
    return Mesh(mesh.devices.reshape(shape), flat, axis_types=types), names


def _across_hosts(mesh: Mesh) -> list[str]:
    """Return the axes along which the host changes."""
    hosts = np.vectorize(host_of)(mesh.devices)
    return [
        name
        for axis, name in enumerate(mesh.axis_names)
        if (hosts != np.take(hosts, [0], axis)).any()
    ]


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _primes(number: int) -> list[int]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


MESH_AXES = ("data", "fsdp", "expert", "tensor")

# Mesh axis -> the logical axes of parameters that it may cut. It cuts the first one
# on whose tiles its shards end and that no other mesh axis cuts.
RULES = {
    "expert": ("expert",),
    "tensor": ("mlp", "heads", "kv_heads", "vocab"),
    "fsdp": ("embed", "mlp", "vocab", "heads", "kv_heads", "head_dim"),
}
BATCH = ("data", "fsdp", "expert")
# For activations and weights in use: an axis that only "fsdp" cuts is gathered.
IN_USE = {
    "batch": BATCH,
    "expert": ("expert",),
    **dict.fromkeys(RULES["tensor"], ("tensor",)),
}

LARGE = 1 << 20
"""Elements of a piece from which on it is better to gather it now and then than to hold
it whole everywhere."""


def require_accelerator(
    config: IslandConfig, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise RuntimeError if an island of TPUs finds only CPUs, and nobody asked for
    these: jax goes on without a lost accelerator."""
    asked = "cpu" in environment.get("JAX_PLATFORMS", "")
    if config.topology and not asked and jax.default_backend() == "cpu":
        raise RuntimeError(
            f"the island's topology is {config.topology}, and jax finds "
            f"{len(jax.devices())} CPU devices alone: this host has lost its "
            f"accelerator, or libtpu is missing; look with `diloco doctor`, and "
            f"replace the host; for CPUs set JAX_PLATFORMS=cpu"
        )


def memory_here() -> dict[str, float]:
    """Return the bytes that programs took so far, at most, and those that they may
    have: of a device or, where it has no memory of its own, of this machine."""
    stats = jax.local_devices()[0].memory_stats() or {
        "peak_bytes_in_use": machine.peak_bytes(),
        "bytes_limit": machine.left_bytes()[1],
    }
    return {
        "memory_bytes": float(stats.get("peak_bytes_in_use", math.nan)),
        "memory_limit_bytes": float(stats.get("bytes_limit", math.nan)),
    }


def make_mesh(
    config: IslandConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Return the island's mesh of the first `config.devices` devices, with Auto axes.

    Raises:
      ConfigError: there are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < config.devices:
        raise ConfigError(
            f"mesh_data * mesh_fsdp * mesh_expert * mesh_tensor = "
            f"{' * '.join(map(str, config.mesh))} = {config.devices} devices, but "
            f"there are {len(devices)}; lower them, or for virtual CPU devices set "
            f"XLA_FLAGS={HOST_DEVICES}={config.devices} (or jax_num_cpu_devices) "
            f"before jax starts"
        )
    grid = np.array(devices[: config.devices], dtype=object).reshape(config.mesh)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def layout(mesh: Mesh) -> Layout:
    """Return where a model's activations and weights lie on this mesh."""
    return Layout(mesh, IN_USE, functools.partial(param_spec, mesh.shape))


def abstract_mesh(config: IslandConfig) -> AbstractMesh:
    """Return the island's mesh without devices, for what follows from its sizes."""
    types = (AxisType.Auto,) * len(MESH_AXES)
    return AbstractMesh(config.mesh, MESH_AXES, axis_types=types)


def param_shardings(
    mesh: Mesh | AbstractMesh, axes: dict[str, Any], shapes: dict[str, Any]
) -> dict[str, Any]:
    """Return a NamedSharding for every parameter.

    Args:
      mesh: the island's mesh.
      axes: nested dict of tuples of logical axis names.
      shapes: the same structure of arrays, or of abstract ones.
    """
    found: dict[str, Any] = jax.tree.map(
        lambda leaf, names: NamedSharding(
            mesh, param_spec(mesh.shape, names, leaf.shape)
        ),
        shapes,
        axes,
    )
    return found


def param_spec(
    mesh: Mapping[str, int], names: tuple[str | None, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    """Return the spec of a parameter. Vectors stay whole: gathering them costs more
    than they weigh.

    mesh: the size of each mesh axis.
    """
    stacked = names[:1] == (LAYERS,)
    piece = shape[stacked:]
    cuts: list[str | None] = [None] * len(piece)
    if len(piece) >= 2:
        grid = TileGrid.of(piece, groups_of(names[stacked:], piece)).grid
        for mesh_axis, candidates in RULES.items():
            size = mesh[mesh_axis]
            axes = [names.index(name) - stacked for name in candidates if name in names]
            free = [axis for axis in axes if cuts[axis] is None]
            fits = [axis for axis in free if grid[axis] % size == 0]
            if not fits and math.prod(piece) > LARGE:
                fits = [axis for axis in free if piece[axis] % size == 0]
            if size > 1 and fits:
                cuts[fits[0]] = mesh_axis
    return _partition(*(None,) * stacked, *cuts)


def tile_spec(
    spec: Sequence[str | None], mesh: Mapping[str, int], grid: tuple[int, ...]
) -> PartitionSpec:
    """Return the part of a spec whose shards end on tiles; other axes stay uncut.

    spec: a mesh axis or None for each axis of the piece. grid: of its tiles.
    """
    return _partition(
        *(
            axis if axis and count % mesh[axis] == 0 else None
            for axis, count in zip(spec, grid, strict=True)
        )
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding that cuts sequences, the leading axis, over the batch
    axes."""
    return NamedSharding(mesh, _partition(BATCH))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding that puts the whole array on every device."""
    return NamedSharding(mesh, _partition())


def _partition(*axes: str | tuple[str, ...] | None) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


def shardings_like_params(
    state: Any, shapes: Any, shardings: Any, whole: NamedSharding
) -> Any:
    """Return the shardings of an optimizer's state: moments lie as their parameter
    does.

    A leaf belongs to the parameter whose path its own path ends with, if both have the
    same shape. Every other leaf lies whole on every device.
    """
    flat_shapes = jax.tree_util.tree_leaves_with_path(shapes)
    known: dict[tuple[Any, ...], tuple[tuple[int, ...], NamedSharding]] = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            flat_shapes, jax.tree.leaves(shardings), strict=True
        )
    }

    def choose(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            found = known.get(path[start:])
            if found and found[0] == leaf.shape:
                return found[1]
        return whole

    return jax.tree_util.tree_map_with_path(choose, state)


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
