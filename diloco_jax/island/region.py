"""A host's end of its island's region: publishes that islands of one region give each
other, so that the coordinator's link carries each once for all of them.

The announcement of a publish names its donors and has SHA-256 of each host's part
(`protocol/island/conversation.py` says who is asked, and when). Nobody trusts a donor:
what is not that part is dropped, and comes from the next one, or the coordinator. A
host asks the host of the same index, which has the same part if both islands are alike;
if not, it asks the coordinator.

What is given stays in memory until all others of the region have it, for `pin_s` at
most, and at most `KEPT` publishes: the oldest goes. It is served as the coordinator
serves it, at an address of the host's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from diloco_jax.config import Config, ConfigError
from diloco_jax.core.fragments import Buffer, Part
from diloco_jax.core.tiles import sha256_arrays
from diloco_jax.protocol.island.conversation import gave_up_late
from diloco_jax.protocol.messages import (
    DONOR_RESTS,
    NOTHING,
    Donor,
    Sources,
    Version,
)
from diloco_jax.wire import addresses, bulk, peers
from diloco_jax.wire.bulk_server import BulkServer
from diloco_jax.wire.errors import (
    Busy,
    Refused,
    RemoteProtocolError,
    VersionGone,
    WireError,
)
from diloco_jax.wire.peers import IdleWatch
from diloco_jax.wire.session import Handlers
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.wire.transfers import (
    Connections,
    Fetched,
    ReceiveBuffers,
    Transfers,
)

logger = logging.getLogger(__name__)

KEPT = 4
"""Publishes of a host's part that it keeps for others at most."""


def _source_of(coordinator: str) -> str:
    """Return the address from which this host reaches the coordinator; empty if nothing
    leads there: its name may not be known yet, which is no reason to end."""
    try:
        return addresses.source_of(coordinator)
    except ConfigError as error:
        logger.warning("this host gives nothing to others of its region: %s", error)
        return ""


@dataclasses.dataclass(frozen=True)
class _Given:
    """This host's part of a publish, for the others of the region."""

    part: Part
    payload: memoryview
    until: float
    sent: Counter[str]
    """Bytes that each island has had of it."""


@dataclasses.dataclass(eq=False)
class _Lane:
    """What leads to a donor."""

    island: str
    address: str
    budget_s: float
    """A connection is made in a part of it."""
    transfers: Transfers
    users: int = 0

    def leads(self, island: str, address: str, budget_s: float) -> bool:
        """Tell if it leads there, in about that time."""
        alike = budget_s / 2 <= self.budget_s <= 2 * budget_s
        return alike and (self.island, self.address) == (island, address)

    def end(self) -> None:
        """End what is under way; its idle threads would stay."""
        self.transfers.cancel()
        self.transfers.close(0.0)


class Region(Handlers):
    """What this host gives others of its region, and what it has from them. Any thread
    may call it."""

    def __init__(
        self, config: Config, name: str, index: int, coordinator: str, serve: str
    ) -> None:
        """Listen; nothing is answered before `begin`.

        index: of this host on its island. coordinator: HOST:PORT. serve: HOST:PORT to
        listen at; empty: at any free port of the host from which this one reaches the
        coordinator. While nothing leads there, it does not listen, and only asks
        others. Raises ConfigError or SecurityError.
        """
        placement, regions = config.placement, config.regions()
        self._others = frozenset(
            other
            for other, region in regions.items()
            if region == regions[name] and other != name
        )
        self._index, self._deadlines = index, placement.deadlines
        self._channels = placement.bulk_channels
        self._tls = TlsFiles.load_given(placement.certificates, peers.island(name))
        self._listener: socket.socket | None = None
        self.address = ""
        """HOST:PORT at which others reach this host; empty: they do not."""
        host = addresses.parse_address(serve)[0] if serve else ""
        known = host and not addresses.is_unspecified(host)
        source = "" if known else _source_of(coordinator)
        if known or source:
            serve = serve or addresses.format_address(source, 0)
            secured = self._tls is not None
            addresses.require_tls(serve, tls=secured, insecure=placement.insecure)
            self._listener = addresses.listen(addresses.resolve(serve))
            host, port = self._listener.getsockname()[:2]
            self.address = addresses.format_address(source or host, port)
        self._server = BulkServer(
            self,
            tls=self._tls,
            deadlines=self._deadlines,
            max_hosts=len(self._others),
            max_hosts_each=1,
            bulk_channels=self._channels,
        )
        self._run_id = ""
        """Empty until it serves."""
        self._changed = threading.Condition()
        self._newest: dict[int, Version] = {}
        """The version that this host has of each fragment."""
        self._kept: dict[tuple[int, Version], _Given] = {}
        """The oldest first."""
        self._memory, self._watch = ReceiveBuffers(), IdleWatch("diloco-region-watch")
        self._lanes: list[_Lane] = []
        """To each donor that was asked: the newest lane, and older ones in use."""

    def begin(self, run_id: str) -> None:
        """Answer the islands of this run."""
        if self._listener is not None:
            self._run_id = run_id
            self._server.start(self._listener)

    def close(self) -> None:
        """Serve nobody, and end what is under way."""
        self._server.stop(0.0)
        if self._listener is not None:
            self._listener.close()
        with self._changed:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.end()
        self._watch.close(1.0)

    # ---- what others have from here ---------------------------------------------

    def got(
        self, request: bulk.FetchRequest, version: Version, publishes: Sequence[Buffer]
    ) -> None:
        """Note that this host has a version. publishes: those that lead to it, oldest
        first, if others are to have them from here."""
        until = time.monotonic() + self._deadlines.pin_s
        first = version.number + 1 - len(publishes)
        with self._changed:
            self._newest[request.fragment] = version
            for number, payload in enumerate(publishes, first):
                given = _Given(request.part, memoryview(payload), until, Counter())
                self._kept[request.fragment, version._replace(number=number)] = given
            self._expire()
            self._changed.notify_all()

    def fetch(self, request: bulk.FetchRequest) -> bulk.FetchSource:
        """Return this host's part of a publish. An island that asks for one that is on
        its way here waits for it a little."""
        peers.require_run(request, self._run_id)
        if request.island not in self._others:
            raise Refused(
                "region",
                f"this island gives publishes to {', '.join(sorted(self._others))}, "
                f"and not to {request.island!r}; ask the coordinator, and check "
                f"islands.{request.island}.region",
            )
        fragment, want = key = request.fragment, request.want
        with self._changed:
            here = self._changed.wait_for(
                lambda: self._newest.get(fragment, NOTHING) >= want,
                self._deadlines.retry_max_s,
            )
            self._expire()
            given = self._kept.get(key)
        if not here:
            raise Busy(f"version {tuple(want)} of fragment {fragment} is on its way")
        follows = request.have is not None and request.have.next() == want
        if given is None or not follows or given.part != request.part:
            raise VersionGone(
                f"version {tuple(want)} of fragment {fragment} is not given here any "
                f"more, or not this part of it; ask the coordinator"
            )
        return bulk.FetchSource(
            version=want,
            count=1,
            buffers=[given.payload],
            sent=functools.partial(self._sent, key, given, request.island),
        )

    def _sent(
        self, key: tuple[int, Version], given: _Given, island: str, length: int
    ) -> None:
        """Note that an island has so many bytes more."""
        with self._changed:
            given.sent[island] += length
            have_all = all(given.sent[o] >= len(given.payload) for o in self._others)
            if have_all and self._kept.get(key) is given:
                del self._kept[key]

    def _expire(self) -> None:
        """Drop what is kept for too long, or too much; with the lock."""
        now = time.monotonic()
        for key in [k for k, given in self._kept.items() if given.until <= now]:
            del self._kept[key]
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]

    # ---- what this host has from others -----------------------------------------

    def fetch_from(
        self, request: bulk.FetchRequest, sources: Sources, size: int
    ) -> tuple[Fetched | None, list[str]]:
        """Ask one donor after the other for a publish of this size. Return it, None if
        nobody gave it, and the donors that failed."""
        failed = list[str]()
        right = sources.stripes.get(bulk.part_name(request.part))
        for donor in sources.donors if right is not None else ():
            began = time.monotonic()
            try:
                found = self._asked(donor, request, sources.within_s, size, right)
                return found, failed
            except (ValueError, WireError) as error:  # ValueError: of its address.
                late = gave_up_late(sources, time.monotonic() - began)
                if isinstance(error, VersionGone) and not late:
                    logger.debug("island %s: %s", donor.island, error)
                    continue
                failed.append(donor.island)
                logger.warning(
                    "island %s did not give version %s of fragment %d within %.3g s "
                    "(%s); it is asked for nothing more for %g s",
                    donor.island,
                    tuple(request.want),
                    request.fragment,
                    sources.within_s,
                    error,
                    DONOR_RESTS * self._deadlines.lease_s,
                )
        return None, failed

    def _asked(
        self,
        donor: Donor,
        request: bulk.FetchRequest,
        within_s: float,
        size: int,
        right: str | None,
    ) -> Fetched:
        """Return what a donor gives, if it is right."""
        if self._index >= len(donor.addresses):
            raise VersionGone(
                f"it has {len(donor.addresses)} hosts, and this is host {self._index}"
            )
        address = donor.addresses[self._index]
        with self._lane_to(donor.island, address, within_s) as lane:
            fetched = lane.fetch(request, max_bytes=size, within_s=within_s)
        found = sha256_arrays([np.frombuffer(fetched.payload, np.uint8)])
        as_asked = (fetched.version, fetched.count) == (request.want, 1)
        if not as_asked or len(fetched.payload) != size or found != right:
            raise RemoteProtocolError(
                f"it gave {len(fetched.payload)} bytes with SHA-256 {found}, version "
                f"{tuple(fetched.version)}, and {size} bytes with {right} were "
                f"announced; what it gave is dropped"
            )
        return fetched

    @contextlib.contextmanager
    def _lane_to(
        self, island: str, address: str, within_s: float
    ) -> Iterator[Transfers]:
        """Lend the transfers from a donor. It may have another address now, or much
        more or less time; what others have under way there goes on."""
        # A donor that does not answer is left in time.
        budget_s = min(self._deadlines.budget_s, 2 * within_s)
        with self._changed:
            known = [one for one in self._lanes if one.leads(island, address, budget_s)]
            lane = known[-1] if known else self._new_lane(island, address, budget_s)
            lane.users += 1
        try:
            self._end_unused(island)
            yield lane.transfers
        finally:
            with self._changed:
                lane.users -= 1
            self._end_unused(island)

    def _new_lane(self, island: str, address: str, budget_s: float) -> _Lane:
        """Add a lane; with the lock."""
        deadlines = dataclasses.replace(self._deadlines, budget_s=budget_s)
        connections = Connections(
            address,
            self._tls,
            deadlines,
            self._channels,
            peers.island(island),
            field=f"islands.{island}",
        )
        transfers = Transfers(connections, self._channels, deadlines, self._watch)
        transfers.memory = self._memory  # One for all of them.
        lane = _Lane(island, address, budget_s, transfers)
        self._lanes.append(lane)
        return lane

    def _end_unused(self, island: str) -> None:
        """End the lanes to a donor that nobody uses, but for the newest."""
        with self._changed:
            older = [lane for lane in self._lanes if lane.island == island][:-1]
            unused = [lane for lane in older if not lane.users]
            self._lanes = [lane for lane in self._lanes if lane not in unused]
        for lane in unused:
            lane.end()
