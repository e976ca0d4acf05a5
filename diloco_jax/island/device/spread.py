"""The spread of a publish over an island's hosts: each tile comes to one of them.

Devices of several hosts may need the same tiles: copies of the parameters along "data",
and pieces that the mesh cuts inside their tiles (`mesh.py`). Each host fetches other
tiles, so every byte crosses the island's link once. Then a compiled reshard moves them
over the slice's own interconnect to the devices that need them (`programs.py`).

All hosts compute the same spread, from the mesh, the host of every device and the tile
grid. No message is needed for it, and no device: a topology will do.

`R`: rows of a piece that has fewer tiles than the island has hosts. One row of each
tile has its bytes, and the others have zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from diloco_jax.core.payload import Box, Part
from diloco_jax.core.tiles import TileGrid

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


Spreads = Sequence[tuple[Spread, tuple[int, ...]]]
"""For every piece of a fragment its spread, and its shape."""


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
    for number in sorted(range(len(pieces)), key=lambda i: -math.prod(pieces[i][1])):
        spread, shape = pieces[number]
        for (start, stop), hosts in spread.hosts.items():
            host = min(hosts, key=loads.__getitem__)
            boxes[host].append(Box(number, start, stop))
            loads[host] += TileGrid.of(shape).elements * math.prod(
                high - low for low, high in zip(start, stop, strict=True)
            )
    corner = (0,) * len(pieces[0][1])
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
