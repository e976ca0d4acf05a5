"""The anchors that one host of an island offers to islands that join.

The train loop shows each anchor once it has adopted it; the arrays are those that the
island holds anyway. They are copied to the host when somebody asks. A shard that ends
inside a tile is not offered, since only whole tiles can be checked.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.core.payload import Box, overlap, tiles_of, within
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.device.exchange import Held
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import FetchRequest, Holdings
from diloco_jax.wire.bulk_server import FetchSource, source_of
from diloco_jax.wire.errors import RemoteProtocolError, VersionGone

COPIES_KEPT = 2
"""Fragments of which a copy may be in the host's memory."""


class _Shown(NamedTuple):
    version: Version
    held: tuple[Held, ...]
    anchors: tuple[Any, ...]


class _Shard(NamedTuple):
    """A piece's tiles on one device of this host, before they are copied from it."""

    box: Box
    data: Any
    row: int | None
    """Row of a stack of pieces."""
    tile: tuple[int, ...]

    def tiles(self) -> npt.NDArray[np.float32]:
        """Copy the values to the host: f32[*box, elements]."""
        values = np.asarray(self.data)
        if self.row is not None:
            values = values[self.row]
        extents = zip(values.shape, self.tile, strict=True)
        grid = TileGrid(self.tile, tuple(extent // size for extent, size in extents))
        tiles: npt.NDArray[np.float32] = grid.split(values)
        return tiles


class Offers:
    """Answers `OfferServer`. `show` is called by the loop, the rest by many threads."""

    def __init__(self, fragments: int, kept_s: float) -> None:
        """kept_s: seconds for which a copy stays in the host's memory."""
        self._shown: list[_Shown | None] = [None] * fragments
        self._kept_s = kept_s
        self._lock = threading.Lock()
        self._copies: collections.OrderedDict[
            int, tuple[Version, float, list[tuple[Box, npt.NDArray[np.float32]]]]
        ] = collections.OrderedDict()
        """By fragment; the newest last."""

    def show(self, fragment: int, version: Version, held: Sequence[Held]) -> None:
        """Offer the anchors that are held now, at this version. It waits for nobody."""
        anchors = tuple(one.anchor for one in held)
        self._shown[fragment] = _Shown(version, tuple(held), anchors)
        if self._lock.acquire(blocking=False):
            self._drop_old()
            self._lock.release()

    def holdings(self, fragment: int) -> Holdings:
        """See `OfferHandlers.holdings`."""
        shown = self._of(fragment)
        boxes = tuple(shard.box for shard in _shards(shown))
        return Holdings(version=shown.version, part=boxes)

    def offered(self, request: FetchRequest) -> FetchSource:
        """See `OfferHandlers.offered`."""
        shown = self._of(request.fragment)
        if shown.version != request.want:
            raise VersionGone(
                f"version {tuple(request.want)} is not held any more, the current one "
                f"is {tuple(shown.version)}; fetch this fragment elsewhere"
            )
        here = self._copied(request.fragment, shown)
        cut = [_cut(box, here) for box in request.part]
        if not cut or request.digests or request.have is not None:
            raise RemoteProtocolError(
                f"{request.island!r} asks for {len(cut)} boxes of fragment "
                f"{request.fragment}, with digests or publishes; an island offers the "
                f"values of boxes"
            )
        return source_of(shown.version, cut, count=0)

    def _of(self, fragment: int) -> _Shown:
        shown = self._shown[fragment] if fragment < len(self._shown) else None
        if shown is None:
            raise RemoteProtocolError(
                f"fragment {fragment} is not offered; there are {len(self._shown)}, do "
                f"both islands have one config?"
            )
        return shown

    def _copied(
        self, fragment: int, shown: _Shown
    ) -> list[tuple[Box, npt.NDArray[np.float32]]]:
        """Return this host's tiles; a fetch has several stripes, so they are kept."""
        with self._lock:
            self._drop_old()
            found = self._copies.get(fragment)
            if found is None or found[0] != shown.version:
                copied = [(shard.box, shard.tiles()) for shard in _shards(shown)]
                found = shown.version, time.monotonic(), copied
            self._copies[fragment] = found[0], time.monotonic(), found[2]
            self._copies.move_to_end(fragment)
            while len(self._copies) > COPIES_KEPT:
                self._copies.popitem(last=False)
            return found[2]

    def _drop_old(self) -> None:
        limit = time.monotonic() - self._kept_s
        for fragment in [f for f, (_, at, _) in self._copies.items() if at < limit]:
            del self._copies[fragment]


def _shards(shown: _Shown) -> list[_Shard]:
    """Return the whole tiles on this host, each once on the island."""
    found: dict[int, list[_Shard]] = {}
    for held, anchor in zip(shown.held, shown.anchors, strict=True):
        for row, number in enumerate(held.numbers):
            if number in found:
                continue  # A spare row of a stack.
            rows = len(held.numbers) > 1
            found[number] = [
                shard
                for one in anchor.addressable_shards
                if one.replica_id == 0
                and (shard := _shard(held, one, number, row if rows else None))
            ]
    return [shard for _, shards in sorted(found.items()) for shard in shards]


def _shard(held: Held, one: Any, number: int, row: int | None) -> _Shard | None:
    """Return a shard's tiles; None if it ends inside one."""
    shape = held.kind.layout.shape
    tile = TileGrid.of(shape).tile
    index = one.index if row is None else one.index[1:]
    bounds = [
        part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True)
    ]
    ends = zip(bounds, tile, strict=True)
    if any(low % size or high % size for (low, high), size in ends):
        return None
    start, stop = (
        tuple(bound[end] // size for bound, size in zip(bounds, tile, strict=True))
        for end in (0, 1)
    )
    return _Shard(Box(number, start, stop), one.data, row, tile)


def _cut(
    box: Box, here: Sequence[tuple[Box, npt.NDArray[np.float32]]]
) -> npt.NDArray[np.float32]:
    for outer, tiles in here:
        if overlap(box, outer) == box:
            return tiles[tiles_of(within(box, outer))]
    raise RemoteProtocolError(
        f"{box} is in none of the {len(here)} boxes of this host; ask for its holdings "
        f"again"
    )
