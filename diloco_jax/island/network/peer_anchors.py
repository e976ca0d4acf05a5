"""Anchors from other islands, for a join: many joins at once do not fill the link of
the coordinator.

The coordinator gives the digests of all tiles, and another island their values. What
does not come, or is not what the coordinator has, is fetched from the coordinator.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from diloco_jax.config import Config
from diloco_jax.core.payload import Box, Part, PayloadLayout, overlap, tiles_of, within
from diloco_jax.core.tiles import DIGEST_BYTES, tile_digests
from diloco_jax.deadlines import Deadlines
from diloco_jax.island.network.lanes import Lanes
from diloco_jax.protocol.island.fetching import Fetch, order_of_peers
from diloco_jax.wire import principal
from diloco_jax.wire.bulk import FetchRequest, Holdings, HoldingsRequest, Identity
from diloco_jax.wire.errors import RemoteProtocolError, VersionGone, WireError
from diloco_jax.wire.threads import IdleWatch
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.wire.transfers import Connections, Fetched, Transfers

logger = logging.getLogger(__name__)

ASKED_AT_ONCE = 16
"""Hosts of an island that are asked at once what they have."""


class PeerAnchors:
    """Fetches from the islands that offer their anchors. Any thread may call it."""

    def __init__(
        self,
        config: Config,
        own: str,
        identity: Identity,
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
                address, tls, deadlines, 2 * channels, island=name
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
        request = HoldingsRequest(
            run_id=self._identity.run_id, island=self._own, fragment=fetch.fragment
        )
        hosts, boxes, wanted = self._hosts[name], layout.boxes(part), []
        with ThreadPoolExecutor(min(len(hosts), ASKED_AT_ONCE)) as pool:
            holdings = list(pool.map(lambda host: host.ask(request, Holdings), hosts))
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
    ) -> FetchRequest:
        return FetchRequest(
            **self._identity.fields(),
            fragment=fetch.fragment,
            want=fetch.want,
            have=None,
            part=part,
            digests=digests,
            ticket=fetch.ticket if digests else b"",
        )


def _tiles(boxes: Iterable[Box]) -> int:
    return sum(math.prod(map(operator.sub, box.stop, box.start)) for box in boxes)
