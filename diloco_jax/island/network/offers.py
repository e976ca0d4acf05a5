"""Anchors that islands offer to those that join: many joins at once do not fill the
coordinator's link.

The train loop shows each anchor once it has adopted it; the arrays are those that the
island holds anyway. They are copied to the host when somebody asks. A shard that ends
inside a tile is not offered, since only whole tiles can be checked.

To an island that joins, the coordinator gives the digests of all tiles, and another
island their values. What does not come, or is not what the coordinator has, is fetched
from the coordinator.
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.config import Config
from diloco_jax.core.payload import Box, Part, PayloadLayout, overlap, tiles_of, within
from diloco_jax.core.tiles import DIGEST_BYTES, TileGrid, tile_digests
from diloco_jax.deadlines import Deadlines
from diloco_jax.errors import ConfigError
from diloco_jax.island.device.exchange import Exchange, PieceState
from diloco_jax.island.network.link import Lanes
from diloco_jax.protocol.island.fetching import Fetch, order_of_peers
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses, bulk, principal
from diloco_jax.wire.bulk_server import BulkServer
from diloco_jax.wire.errors import RemoteProtocolError, VersionGone, WireError
from diloco_jax.wire.session import Handlers
from diloco_jax.wire.threads import IdleWatch
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.wire.transfers import Connections, Fetched, Transfers

logger = logging.getLogger(__name__)

COPIES_KEPT = 2
"""Fragments of which a copy may be in the host's memory."""
ASKED_AT_ONCE = 16
"""Hosts of an island that are asked at once what they have."""


class _Shown(NamedTuple):
    version: Version
    held: tuple[PieceState, ...]
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


class Offers(Handlers):
    """Answers other islands of the run. The loop calls `show`, many threads the
    rest."""

    def __init__(self, run_id: str, fragments: int, kept_s: float) -> None:
        """kept_s: seconds for which a copy stays in the host's memory."""
        self._run_id = run_id
        self._shown: list[_Shown | None] = [None] * fragments
        self._kept_s = kept_s
        self._lock = threading.Lock()
        self._copies: collections.OrderedDict[
            int, tuple[Version, float, list[tuple[Box, npt.NDArray[np.float32]]]]
        ] = collections.OrderedDict()
        """By fragment; the newest last."""

    def show(self, fragment: int, version: Version, held: Sequence[PieceState]) -> None:
        """Offer the anchors that are held now, at this version. It waits for nobody."""
        anchors = tuple(one.anchor for one in held)
        self._shown[fragment] = _Shown(version, tuple(held), anchors)
        if self._lock.acquire(blocking=False):
            self._drop_old()
            self._lock.release()

    def holdings(self, request: bulk.HoldingsRequest) -> bulk.Holdings:
        principal.require_run(request, self._run_id)
        shown = self._of(request.fragment)
        boxes = tuple(shard.box for shard in _shards(shown))
        return bulk.Holdings(version=shown.version, part=boxes)

    def fetch(self, request: bulk.FetchRequest) -> bulk.FetchSource:
        principal.require_run(request, self._run_id)
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
        return bulk.source_of(shown.version, cut, count=0)

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
            rows = held.programs.rows > 1
            found[number] = [
                shard
                for one in anchor.addressable_shards
                if one.replica_id == 0
                and (shard := _shard(held, one, number, row if rows else None))
            ]
    return [shard for _, shards in sorted(found.items()) for shard in shards]


def _shard(held: PieceState, one: Any, number: int, row: int | None) -> _Shard | None:
    """Return a shard's tiles; None if it ends inside one."""
    shape = held.programs.shape
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


def offer(
    config: Config,
    identity: bulk.Identity,
    host: int,
    exchange: Exchange,
    versions: Sequence[Version],
    deadlines: Deadlines,
    is_revoked: Callable[[int], bool],
) -> BulkServer | None:
    """Offer the anchors that the exchange holds, at these versions, and those that it
    adopts later; return what serves them. is_revoked: asks the coordinator.

    Returns None if the config has no address for this host, or if it cannot be bound:
    the island trains all the same.
    """
    name, placement = identity.island, config.placement
    offered_at = config.island(name).offered_at
    if not offered_at:
        return None
    address = offered_at[host]
    try:
        addresses.require_tls(
            address, tls=bool(placement.certificates), insecure=placement.insecure
        )
        listener = addresses.listen(addresses.resolve(address))
    except ConfigError as error:
        logger.error(
            "island %s offers no anchors: %s; islands that join fetch them elsewhere",
            name,
            error,
        )
        return None
    offers = Offers(identity.run_id, len(versions), deadlines.pin_s)
    for fragment, version in enumerate(versions):
        offers.show(fragment, version, exchange.held(fragment))
    exchange.adopted = offers.show
    server = BulkServer(
        offers,
        tls=TlsFiles.load_given(placement.certificates, principal.island(name)),
        deadlines=deadlines,
        max_hosts=sum(island.hosts for island in config.islands.values()),
        bulk_channels=placement.bulk_channels,
        is_revoked=is_revoked,
    )
    server.start(listener)
    logger.info("island %s offers its anchors at %s", name, address)
    return server


class PeerAnchors:
    """Fetches from the islands that offer their anchors. Any thread may call it."""

    def __init__(
        self,
        config: Config,
        own: str,
        identity: bulk.Identity,
        coordinator: Transfers | Lanes,
        deadlines: Deadlines,
    ) -> None:
        """own: name of this island. coordinator: gives the digests."""
        self._own, self._identity, self._coordinator = own, identity, coordinator
        self._deadlines, placement = deadlines, config.placement
        tls = TlsFiles.load_given(placement.certificates, principal.island(own))
        self._watch = IdleWatch("diloco-peers-watch")
        channels = placement.bulk_channels

        def transfers(name: str, address: str) -> Transfers:
            connections = Connections(
                address,
                tls,
                deadlines,
                2 * channels,
                principal.island(name),
                field=f"islands.{name}.offers",
            )
            return Transfers(connections, channels, deadlines, self._watch)

        self._hosts = {
            name: [transfers(name, address) for address in island.offered_at]
            for name, island in config.islands.items()
            if island.offered_at and name != own
        }
        self._lock = threading.Lock()
        self._failed: set[str] = set()
        self.count = 0
        """Fragments that came from other islands."""

    def fetch(self, fetch: Fetch, part: Part, layout: PayloadLayout) -> Fetched | None:
        """Return the checked part of an anchor in full; None if no island gives it.

        layout: the fragment's. Raises what the coordinator answers when it is asked for
        the digests: VersionGone, Refused, or another WireError.
        """
        with self._lock:
            usable = [name for name in self._hosts if name not in self._failed]
        for name in order_of_peers(usable, self._own, fetch.fragment):
            try:
                wanted = self._holdings(name, fetch, part, layout)
            except (WireError, ValueError) as error:
                self._give_up(name, error)
                continue
            if wanted is None:
                continue
            digests = self._digests(fetch, part, layout)
            try:
                fetched = self._from(name, wanted, fetch, part, layout, digests)
            except VersionGone:
                continue  # It has adopted a newer one meanwhile.
            except (WireError, ValueError) as error:
                self._give_up(name, error)
                continue
            with self._lock:
                self.count += 1
            return fetched
        return None

    def close(self) -> None:
        """End all connections."""
        for transfers in itertools.chain.from_iterable(self._hosts.values()):
            transfers.cancel()
            transfers.close(0.0)
        self._watch.close(0.0)

    def _give_up(self, name: str, error: Exception) -> None:
        with self._lock:
            self._failed.add(name)
        logger.warning(
            "island %s gives no anchors (%s); others and the coordinator are asked",
            name,
            error,
        )

    def _holdings(
        self, name: str, fetch: Fetch, part: Part, layout: PayloadLayout
    ) -> list[list[Box]] | None:
        """Return the boxes to ask each host of an island for; None if the island is at
        another version, or has not all of the part."""
        request = bulk.HoldingsRequest(
            run_id=self._identity.run_id, island=self._own, fragment=fetch.fragment
        )
        hosts, boxes, wanted = self._hosts[name], layout.boxes(part), []
        with ThreadPoolExecutor(min(len(hosts), ASKED_AT_ONCE)) as pool:
            holdings = list(
                pool.map(lambda host: host.ask(request, bulk.Holdings), hosts)
            )
        for found in holdings:
            if found.version != fetch.want:
                return None
            pairs = itertools.product(boxes, found.part)
            wanted.append([box for pair in pairs if (box := overlap(*pair))])
        complete = _tiles(itertools.chain.from_iterable(wanted)) == _tiles(boxes)
        return wanted if complete else None

    def _digests(
        self, fetch: Fetch, part: Part, layout: PayloadLayout
    ) -> list[npt.NDArray[np.uint8]]:
        """Return the coordinator's digests, box by box of the part."""
        boxes = layout.boxes(part)
        total = DIGEST_BYTES * _tiles(boxes)
        request = self._request(fetch, part, digests=True)
        fetched = self._coordinator.fetch(request, max_bytes=total)
        flat = np.frombuffer(fetched.payload, np.uint8)
        if flat.size != total:
            raise RemoteProtocolError(
                f"{flat.size} bytes of digests of fragment {fetch.fragment}, expected "
                f"{total}; both ends must run the same version of diloco"
            )
        sizes = [DIGEST_BYTES * _tiles([box]) for box in boxes]
        parts = np.split(flat.copy(), np.cumsum(sizes)[:-1])
        return [p.reshape(-1, DIGEST_BYTES) for p in parts]

    def _from(
        self,
        name: str,
        wanted: list[list[Box]],
        fetch: Fetch,
        part: Part,
        layout: PayloadLayout,
        digests: list[npt.NDArray[np.uint8]],
    ) -> Fetched:
        """Return the part from one island. Raises RemoteProtocolError if it is not what
        the coordinator has."""
        payload = bytearray(layout.values_bytes(part))
        places = layout.split_values(payload, part)
        nbytes = 0
        for host, boxes in zip(self._hosts[name], wanted, strict=True):
            if not boxes:
                continue
            asked = tuple(boxes)
            fetched = host.fetch(
                self._request(fetch, asked),
                max_bytes=layout.values_bytes(asked),
                within_s=self._deadlines.budget_s,
            )
            nbytes += fetched.wire_bytes
            for box, tiles in layout.split_values(fetched.payload, asked):
                outer, place = next(p for p in places if overlap(p[0], box) == box)
                place[tiles_of(within(box, outer))] = tiles
        for (box, tiles), expected in zip(places, digests, strict=True):
            found = tile_digests(tiles).reshape(expected.shape)
            wrong = int((found != expected).any(axis=1).sum())
            if wrong:
                raise RemoteProtocolError(
                    f"{wrong} of {len(expected)} tiles of fragment {fetch.fragment}, "
                    f"piece {box.piece}, are not those of the coordinator; look at "
                    f"the machines of island {name}"
                )
        return Fetched(
            version=fetch.want,
            full=True,
            count=0,
            payload=memoryview(payload),
            wire_bytes=nbytes,
        )

    def _request(
        self, fetch: Fetch, part: Part, *, digests: bool = False
    ) -> bulk.FetchRequest:
        return bulk.FetchRequest(
            **self._identity.fields(),
            fragment=fetch.fragment,
            want=fetch.want,
            have=None,
            part=part,
            digests=digests,
        )


def _tiles(boxes: Iterable[Box]) -> int:
    return sum(math.prod(map(operator.sub, box.stop, box.start)) for box in boxes)
