"""An island's lanes to the workers, and the threads that send deltas and fetch
published fragments over them.

Device -> host -> wire: a sender sends deltas, and anchors if it must. A delta is kept
until its verdict is final, so that it can be sent again when the coordinator lost it.
There is at most one per fragment, so a model's worth of encoded bytes is the bound.

Wire -> host -> device: a receiver fetches in the order of
`protocol/island/conversation.py`.

A lane goes to the worker of a fragment, or to the coordinator itself. Each has a thread
of either, so that none waits for another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_jax.config.placement import Deadlines
from diloco_jax.core.fragments import Buffer, Part, PayloadLayout
from diloco_jax.core.tiles import ballot_of
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.mesh import held
from diloco_jax.island.hosts import Orders
from diloco_jax.island.mailbox import Arrival, Mailbox, NetworkThreads
from diloco_jax.island.region import Region
from diloco_jax.protocol.holding import deal
from diloco_jax.protocol.island.conversation import (
    JOIN_FETCHES,
    MAX_CHAIN,
    Fetch,
    Fetching,
    Wanted,
)
from diloco_jax.protocol.messages import (
    DONOR_RESTS,
    Hello,
    ResendRequest,
    Version,
)
from diloco_jax.wire.bulk import FetchRequest, Identity, UploadStart
from diloco_jax.wire.client import Client, ControlStream
from diloco_jax.wire.errors import ConnectionLost, Refused, VersionGone, WireError
from diloco_jax.wire.peers import Backoff
from diloco_jax.wire.transfers import Transfers

logger = logging.getLogger(__name__)

ROUND_TRIPS = 5
"""Questions of which the shortest counts: the first one may have to connect."""
TOLD_FROM = 4
"""Failures in a row to send one delta from which on a warning is logged."""


class Lanes:
    """Control messages to the coordinator, and bulk to and from the worker of each
    fragment, over connections of its own. Thread-safe.
    """

    def __init__(
        self,
        coordinator: Client,
        sizes: tuple[int, ...],
        moved: Callable[[tuple[str, ...]], object] = lambda _: None,
    ) -> None:
        """Begin with the coordinator alone, which `close` closes too.

        sizes: parameters by fragment. moved: called with new addresses of workers, once
        they are in use.
        """
        self._coordinator, self._sizes, self._moved = coordinator, sizes, moved
        self.addresses: tuple[str, ...] = ()
        """The addresses of the workers, as the coordinator last gave them."""
        self.dealt = (0,) * len(sizes)
        """The number of each fragment's worker; 0 for all if there are no workers."""
        self._by_fragment = (coordinator.transfers,) * len(sizes)

    def use(self, addresses: tuple[str, ...]) -> None:
        """Exchange bulk with workers at these addresses from now on; empty: with the
        coordinator. Raises ConfigError for one that must not go without TLS."""
        coordinator, before = self._coordinator, self.addresses
        dealt = deal(self._sizes, max(len(addresses), 1))
        workers = [coordinator.transfers_at(a, n) for n, a in enumerate(addresses)]
        found = workers or [coordinator.transfers]
        self._by_fragment = tuple(found[number] for number in dealt)
        self.addresses, self.dealt = addresses, dealt
        # Those of a lead that was started again, whose workers may serve elsewhere now.
        coordinator.leave_others(addresses)
        if addresses != before:
            self._moved(addresses)

    def of(self, fragment: int) -> Transfers:
        """Return the connections to the fragment's worker."""
        return self._by_fragment[fragment]

    def open_control(self, hello: Hello) -> ControlStream:
        """Say hello to the coordinator; see `Client.open_control`. Its Welcome has the
        addresses of the workers."""
        stream = self._coordinator.open_control(hello)
        self.use(stream.welcome.workers)
        return stream

    def round_trip_s(self, timeout_s: float) -> float:
        """Return the seconds of a question to the coordinator and its answer, the
        shortest of several; NaN if there is none within the timeout."""
        found, deadline = [math.nan], time.monotonic() + timeout_s
        for _ in range(ROUND_TRIPS):
            began = time.monotonic()
            with contextlib.suppress(WireError):
                self._coordinator.status(max(0.0, deadline - began))
                found.insert(0, time.monotonic() - began)
        return min(found)

    def close(self) -> None:
        """Close all connections."""
        self._coordinator.close()


@dataclasses.dataclass
class _Parcel:
    fragment: int
    tick: int
    arrays: tuple[Any, ...]
    """Encoded pieces on the device, until they are packed."""
    pauses: Backoff
    version: Version | None = None
    """None: a delta; otherwise an anchor of that version."""
    sample: int = 0
    """Not 0: a ballot of the anchor is sent."""
    part: Part = ()
    payload: Buffer | None = None
    due: bool = True
    not_before: float = 0.0
    """Monotonic time of the next attempt, while it is due."""
    attempts: int = 0
    """Attempts that failed since it was put, or asked for again."""

    @property
    def key(self) -> tuple[int, bool]:
        """The fragment, and True for an anchor: at most one of each is kept."""
        return self.fragment, self.version is not None

    def __str__(self) -> str:
        if self.version is None:
            return f"delta of fragment {self.fragment}, tick {self.tick}"
        what = "ballot of the anchor" if self.sample else "anchor"
        return f"{what} of fragment {self.fragment}, version {tuple(self.version)}"


class Sender(NetworkThreads):
    """Threads that send deltas. `put`, `resend` and `forget` never wait for them."""

    def __init__(
        self,
        lanes: Lanes,
        identity: Identity,
        layouts: Sequence[PayloadLayout],
        layouts_whole: Sequence[PayloadLayout],
        mailbox: Mailbox,
        deadlines: Deadlines,
    ) -> None:
        """layouts, layouts_whole: of deltas, and of anchors, by fragment."""
        self._lanes, self._dealt, self._identity = lanes, lanes.dealt, identity
        self._layouts = {False: layouts, True: layouts_whole}
        self._budget_s, self._retries_s = deadlines.budget_s, deadlines.retries_s
        self._parcels: dict[tuple[int, bool], _Parcel] = {}
        workers = range(max(lanes.dealt) + 1)
        runs = (functools.partial(self._run, worker) for worker in workers)
        super().__init__(mailbox, "sender", *runs)

    def put(self, fragment: int, tick: int, encoded: tuple[Any, ...]) -> None:
        """Send a delta: its encoded pieces, uint8[*grid, tile_bytes] each."""
        self._put(_Parcel(fragment, tick, encoded, Backoff(*self._retries_s)))

    def put_anchor(
        self,
        fragment: int,
        version: Version,
        encoded: tuple[Any, ...],
        sample: int = 0,
    ) -> None:
        """Send an anchor once, before any delta, or a ballot of it. It is encoded as a
        delta is, in f32.
        """
        pauses = Backoff(*self._retries_s)
        self._put(_Parcel(fragment, -1, encoded, pauses, version, sample))

    def resend(self, request: ResendRequest) -> None:
        """Send the delta of this take again, if the sender still has it."""
        with self._changed:
            parcel = self._parcels.get((request.fragment, False))
            if parcel is not None and parcel.tick == request.tick:
                parcel.due, parcel.not_before, parcel.attempts = True, 0.0, 0
                parcel.pauses.reset()
                self._changed.notify_all()

    def forget(self, fragment: int, tick: int) -> None:
        """Forget a take whose verdict is final."""
        with self._changed:
            parcel = self._parcels.get((fragment, False))
            if parcel is not None and parcel.tick == tick:
                del self._parcels[fragment, False]

    def _put(self, parcel: _Parcel) -> None:
        with self._changed:
            self._parcels[parcel.key] = parcel
            self._changed.notify_all()

    def _run(self, worker: int) -> None:
        while (parcel := self._next(worker)) is not None:
            self._send(parcel)
            with self._changed:
                is_newest = self._parcels.get(parcel.key) is parcel
                if parcel.version is not None and not parcel.due and is_newest:
                    del self._parcels[parcel.key]

    def _next(self, worker: int) -> _Parcel | None:
        """Return the oldest delta for a worker that may be sent now; None when closing.
        One that failed waits apart, so that the others of its worker go on."""
        with self._changed:
            while not self._closing.is_set():
                now = time.monotonic()
                due = [
                    parcel
                    for parcel in self._parcels.values()
                    if parcel.due and self._dealt[parcel.fragment] == worker
                ]
                if ready := [p for p in due if p.not_before <= now]:
                    parcel = min(ready, key=lambda p: p.tick)
                    parcel.due = False
                    return parcel
                soonest = min((p.not_before for p in due), default=math.inf)
                self._changed.wait(min(self._budget_s, soonest - now))
            return None

    def _send(self, parcel: _Parcel) -> None:
        if parcel.payload is None:
            # Waits for the device, which is why it is done here and not in the loop.
            self._pack(parcel)
        assert parcel.payload is not None
        if not parcel.payload:
            return  # Other hosts of the island hold all of it.
        start = UploadStart(
            **self._identity.fields(),
            fragment=parcel.fragment,
            tick=parcel.tick,
            offset=0,
            length=len(parcel.payload),
            total=len(parcel.payload),
            part=parcel.part,
            version=parcel.version,
            sample=parcel.sample,
        )
        began = time.monotonic()
        try:
            nbytes = self._lanes.of(parcel.fragment).upload(start, parcel.payload)
        except Refused as refused:
            # The verdict, or a request to send again, comes as a message.
            logger.warning("%s refused (%s): %s", parcel, refused.code, refused.message)
        except WireError as error:
            self._mailbox.count(transfers_failed=1)
            self._put_off(parcel, error)
        else:
            took_s = time.monotonic() - began
            self._mailbox.count(bytes_up=nbytes, microseconds_up=round(took_s * 1e6))

    def _put_off(self, parcel: _Parcel, error: WireError) -> None:
        """Send a parcel again after a pause, unless it is not wanted any more."""
        with self._changed:
            parcel.attempts += 1
            attempt = parcel.attempts
            parcel.not_before = time.monotonic() + parcel.pauses.next_s()
            parcel.due = True
        # Told in ever longer intervals, once it is more than an outage.
        tell = attempt >= TOLD_FROM and attempt.bit_count() == 1
        logger.log(
            logging.WARNING if tell else logging.DEBUG,
            "%s not sent in %d attempts (%s); where the link is very slow, "
            "raise placement.time_budget_s or lower bulk_channels",
            parcel,
            attempt,
            error,
        )

    def _pack(self, parcel: _Parcel) -> None:
        for array in parcel.arrays:  # All copies begin before one is waited for.
            array.copy_to_host_async()
        if all(array.is_fully_addressable for array in parcel.arrays):
            arrays = [_sent(parcel, array) for array in parcel.arrays]
            layout = self._layouts[parcel.version is not None][parcel.fragment]
            if parcel.sample:
                layout = PayloadLayout.of_ballots([p.piece for p in layout.placed])
            parcel.payload = layout.pack(arrays)
        else:
            shards = held(parcel.arrays)
            parcel.part = tuple(box for box, _ in shards)
            parcel.payload = b"".join(_sent(parcel, d).tobytes() for _, d in shards)
        parcel.arrays = ()


def _sent(parcel: _Parcel, encoded: Any) -> npt.NDArray[np.uint8]:
    """Return the encoded tiles as they are sent: ballots of an anchor's, if asked."""
    tiles: npt.NDArray[np.uint8] = np.asarray(encoded)
    if not parcel.sample:
        return tiles
    return ballot_of(np.ascontiguousarray(tiles).view("<f4"), parcel.sample)


class Fetcher:
    """Fetch this host's part of versions. Any thread may call it."""

    def __init__(
        self,
        lanes: Lanes,
        identity: Identity,
        exchange: Exchange,
        mailbox: Mailbox,
        region: Region | None = None,
    ) -> None:
        """region: this host's end of the island's region, if others are in that."""
        self.lanes, self._identity = lanes, identity
        self._exchange, self._mailbox, self._region = exchange, mailbox, region
        self.lands = True
        """False while the host compiles: an anchor then keeps its `octets`."""

    def fetch(self, fetch: Fetch) -> Arrival:
        """Fetch everything that leads from `have` to `want`; A in full if `have` is
        None, or too old.

        Raises VersionGone if the version is not kept any more, or another WireError.
        """
        exchange, fragment, region = self._exchange, fetch.fragment, self._region
        part = exchange.part_down(fragment)
        size = exchange.layouts_down[fragment].part_bytes(part)
        request = FetchRequest(
            **self._identity.fields(),
            fragment=fragment,
            want=fetch.want,
            have=fetch.have,
            part=part,
        )
        fetched = None
        if region is not None and fetch.sources is not None:
            fetched, failed = region.fetch_from(request, fetch.sources, size)
            self._mailbox.donors_failed(failed)
        given = fetched is not None
        if fetched is None:
            most = max(exchange.anchor_bytes(fragment), MAX_CHAIN * size)
            fetched = self.lanes.of(fragment).fetch(request, max_bytes=most)
        payload = memoryview(fetched.payload)
        if not fetched.count:
            self._mailbox.count(bytes_join=fetched.wire_bytes)
            if region is not None:
                region.got(request, fetched.version, ())
            whole = Arrival(fragment=fragment, version=fetched.version, octets=payload)
            return self.landed(whole) if self.lands else whole
        if not given:  # What islands give each other costs the coordinator nothing.
            self._mailbox.count(bytes_down=fetched.wire_bytes)
        parts = [payload[i * size : (i + 1) * size] for i in range(fetched.count)]
        if region is not None:
            region.got(request, fetched.version, parts if fetch.gives else ())
        return Arrival(
            fragment=fragment,
            version=fetched.version,
            publishes=tuple(exchange.put_publish(fragment, p) for p in parts),
        )

    def landed(self, arrival: Arrival) -> Arrival:
        """Return an arrival of which all is on this host's devices."""
        if arrival.octets is None:
            return arrival
        anchor = self._exchange.put_anchor(arrival.fragment, arrival.octets)
        return dataclasses.replace(arrival, anchor=anchor, octets=None)


class Receiver(NetworkThreads):
    """Threads that fetch published fragments, after `start`. `want` never waits for
    them."""

    def __init__(
        self,
        fetcher: Fetcher,
        mailbox: Mailbox,
        deadlines: Deadlines,
        versions: Sequence[Version],
        orders: Orders | None,
        join_s: float,
        left: Callable[[int], object] = lambda _: None,
        name: str = "",
    ) -> None:
        """orders: for the other hosts of the island, if there are any. join_s: time
        within which each fragment of a join must come. left: called with the number of
        those that are still to come. name: of the island."""
        self._fetcher, self._retries_s = fetcher, deadlines.retries_s
        self._budget_s, self._report_s = deadlines.budget_s, deadlines.report_s
        self._orders, self._join_s, self._left = orders, join_s, left
        self.join_seconds = 0.0
        """Seconds in which all that came of the join has come."""
        self._fetching, self._count = Fetching(versions, name), len(versions)
        """Guarded by `_changed`."""
        self._rests_s = DONOR_RESTS * deadlines.lease_s
        dealt = fetcher.lanes.dealt
        others = (
            frozenset(f for f, other in enumerate(dealt) if other != worker)
            for worker in range(max(dealt) + 1)
        )
        runs = (functools.partial(self._run, away) for away in others)
        super().__init__(mailbox, "receiver", *runs)

    def want(self, wanted: Wanted) -> None:
        """Note a published version. Versions older than known ones are ignored."""
        with self._changed:
            self._fetching.want(*wanted)
            self._changed.notify_all()

    def rest(self, donor: str) -> None:
        """Ask an island that failed this one for nothing, for a while."""
        until = time.monotonic() + self._rests_s
        with self._changed:
            self._fetching.rest(donor, until)

    def begin_join(self) -> Callable[[], list[Version]]:
        """Begin to fetch every fragment in full, for a join, before `start`; return a
        function that waits for all, and returns their versions.

        It raises TimeoutError if a fragment does not come within `join_s`, Refused, or
        any WireError once the mailbox says that the island must end. A host without
        others that is asked to end begins no fetch.
        """
        began, pool = time.monotonic(), ThreadPoolExecutor(JOIN_FETCHES, "join")
        landed = self._fetcher.landed
        self._left(self._count)
        coming = [pool.submit(self._join_next, began) for _ in range(self._count)]
        pool.shutdown(wait=False)

        def joined() -> list[Version]:
            arrivals = []
            while coming:  # What has landed is in the host's memory no longer.
                # Those that came while it compiled land while the last ones come.
                arrivals.append(landed(coming.pop(0).result()))
            for arrival in arrivals:
                self._mailbox.arrivals.put(arrival)
            return [a.version for a in sorted(arrivals, key=lambda a: a.fragment)]

        return joined

    def have_all(self, versions: Sequence[Version]) -> None:
        """Note the versions that the island begins with, if it need not fetch them."""
        with self._changed:
            for fragment, version in enumerate(versions):
                self._fetching.got(fragment, version)

    def _run(self, away: frozenset[int]) -> None:
        """Fetch until `close`. away: the fragments of other workers."""
        pauses = Backoff(*self._retries_s)
        while (fetch := self._next(away)) is not None:
            try:
                arrival = self._fetch(fetch)
            except VersionGone:
                with self._changed:
                    self._fetching.gone(fetch.fragment)
            except WireError as error:
                self._mailbox.count(transfers_failed=1)
                with self._changed:
                    self._fetching.failed(fetch.fragment)
                level = logging.WARNING if isinstance(error, Refused) else logging.DEBUG
                logger.log(level, "fragment %d not fetched: %s", fetch.fragment, error)
            else:
                while not self._closing.is_set():
                    if self._mailbox.deliver(arrival, self._report_s):
                        break
                pauses.reset()
                continue
            self._closing.wait(pauses.next_s())

    def _next(self, away: frozenset[int]) -> Fetch | None:
        """Wait for something to fetch; None when closing."""
        with self._changed:
            while not self._closing.is_set():
                now = time.monotonic()
                if (fetch := self._fetching.next(away, now)) is not None:
                    return fetch
                self._changed.wait(self._budget_s)
            return None

    @property
    def _asked_to_end(self) -> bool:
        """True if this host is to end now. Hosts that are several end together, by a
        decision of their loops."""
        ending = self._mailbox.ending
        asked = ending is not None and ending.reason in ("stopped", "preempted")
        return asked and self._orders is None

    def _join_next(self, began: float) -> Arrival:
        """Fetch the next fragment until it has arrived; several threads do this at a
        time. began: the join, by the monotonic clock."""
        with self._changed:
            fetch = self._fetching.next()
        assert fetch is not None, "more threads than fetches"
        deadline = time.monotonic() + self._join_s
        pauses = Backoff(*self._retries_s)
        while True:
            if self._mailbox.finished:
                raise Refused("finished", "the run was over before this island's join")
            if self._closing.is_set() or self._asked_to_end:
                raise ConnectionLost("the island ends before it has joined")
            try:
                arrival = self._fetch(fetch)
                with self._changed:  # In order: the last one says 0.
                    self._left(self._fetching.lacking)
                    self.join_seconds = time.monotonic() - began
                return arrival
            except WireError as error:
                if self._mailbox.ending is not None or isinstance(error, Refused):
                    raise
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"fragment {fetch.fragment} did not come within "
                        f"{self._join_s:.0f} s ({error}); is the coordinator "
                        f"reachable on its advertised address?"
                    ) from error
                self._closing.wait(pauses.next_s())
                with self._changed:
                    fetch = self._fetching.again(fetch.fragment)

    def _fetch(self, fetch: Fetch) -> Arrival:
        orders, arrival = self._orders, None
        number = orders.give(fetch) if orders is not None else -1
        try:
            arrival = self._fetcher.fetch(fetch)
        finally:
            # Whatever this host's outcome: the others' must be known before the next
            # order.
            if orders is not None:
                orders.await_answers(number, arrival)
        with self._changed:
            self._fetching.got(fetch.fragment, arrival.version)
        return arrival
