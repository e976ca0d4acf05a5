"""The threads that send deltas and fetch published fragments.

Device -> host -> wire: a sender sends deltas, and anchors if it must. A delta is kept
until its verdict is final, so that it can be sent again when the coordinator lost it.
There is at most one per fragment, so a model's worth of encoded bytes is the bound.

Wire -> host -> device: a receiver fetches in the order of
`protocol/island/fetching.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_jax.core.payload import Buffer, Part, PayloadLayout
from diloco_jax.core.tiles import ballot_of
from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.mesh import held
from diloco_jax.island.hosts.following import Orders
from diloco_jax.island.mailbox import Arrival, Mailbox
from diloco_jax.island.network.link import Lanes
from diloco_jax.protocol.island.conversation import MAX_CHAIN
from diloco_jax.protocol.island.fetching import JOIN_FETCHES, Fetch, Fetching
from diloco_jax.protocol.messages import ResendRequest
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import FetchRequest, Identity, UploadStart
from diloco_jax.wire.errors import Refused, VersionGone, WireError
from diloco_jax.wire.transfers import Transfers

logger = logging.getLogger(__name__)

LONGEST_PAUSE_FROM = 10
"""Failures in a row after which pauses grow no longer."""
TOLD_FROM = 4
"""Failures in a row to send one delta from which on a warning is logged."""


@dataclasses.dataclass
class _Parcel:
    fragment: int
    tick: int
    version: Version | None
    """None: a delta; otherwise an anchor of that version."""
    arrays: tuple[Any, ...]
    """Encoded pieces on the device, until they are packed."""
    part: Part = ()
    payload: Buffer | None = None
    due: bool = True
    not_before: float = 0.0
    """Monotonic time of the next attempt, while it is due."""
    attempts: int = 0
    """Attempts that failed since it was put, or asked for again."""
    sample: int = 0
    """Not 0: a ballot of the anchor is sent."""

    def __str__(self) -> str:
        if self.version is None:
            return f"delta of fragment {self.fragment}, tick {self.tick}"
        what = "ballot of the anchor" if self.sample else "anchor"
        return f"{what} of fragment {self.fragment}, version {tuple(self.version)}"


class Sender:
    """Threads that send deltas, one for each lane. `put`, `resend` and `forget` never
    wait for them.
    """

    def __init__(
        self,
        transfers: Transfers | Lanes,
        identity: Identity,
        layouts: Sequence[PayloadLayout],
        layouts_whole: Sequence[PayloadLayout],
        mailbox: Mailbox,
        deadlines: Deadlines,
        lanes: Sequence[int] = (),
    ) -> None:
        """lanes: the worker of each fragment; each worker has a thread, so that none
        waits for another. Empty: there are no workers."""
        self._transfers = transfers
        self._identity = identity
        self._layouts = {False: layouts, True: layouts_whole}
        """Layouts of deltas, and of anchors."""
        self._mailbox = mailbox
        self._deadlines = deadlines
        self._parcels: dict[tuple[int, bool], _Parcel] = {}
        """Parcels by fragment, and by whether they are anchors."""
        self._changed = threading.Condition()
        self._closing = False
        self._lanes = lanes
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name="sender", daemon=True)
            for lane in range(max(lanes, default=0) + 1)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def put(self, fragment: int, tick: int, encoded: tuple[Any, ...]) -> None:
        """Send a delta: its encoded pieces, uint8[*grid, tile_bytes] each."""
        self._put(_Parcel(fragment, tick, None, encoded))

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
        self._put(_Parcel(fragment, -1, version, encoded, sample=sample))

    def resend(self, request: ResendRequest) -> None:
        """Send the delta of this take again, if the sender still has it."""
        with self._changed:
            parcel = self._parcels.get((request.fragment, False))
            if parcel is not None and parcel.tick == request.tick:
                parcel.due, parcel.not_before, parcel.attempts = True, 0.0, 0
                self._changed.notify_all()

    def forget(self, fragment: int, tick: int) -> None:
        """Forget a take whose verdict is final."""
        with self._changed:
            parcel = self._parcels.get((fragment, False))
            if parcel is not None and parcel.tick == tick:
                del self._parcels[fragment, False]

    def close(self, timeout_s: float) -> None:
        """End the threads; a transfer may go on until the process ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _put(self, parcel: _Parcel) -> None:
        with self._changed:
            self._parcels[_key(parcel)] = parcel
            self._changed.notify_all()

    def _run(self, lane: int) -> None:
        try:
            while (parcel := self._next(lane)) is not None:
                self._send(parcel)
                with self._changed:
                    is_newest = self._parcels.get(_key(parcel)) is parcel
                    if parcel.version is not None and not parcel.due and is_newest:
                        del self._parcels[_key(parcel)]
        except Exception as error:
            logger.exception("the sender failed")
            self._mailbox.end(EXIT_FAILED, f"the sender failed: {error!r}")

    def _next(self, lane: int) -> _Parcel | None:
        """Return the oldest delta of a lane that may be sent now; None when closing.
        One that failed waits apart, so that the others of its worker go on."""
        lanes = self._lanes

        def due() -> list[_Parcel]:
            due = [p for p in self._parcels.values() if p.due]
            return [p for p in due if not lanes or lanes[p.fragment] == lane]

        with self._changed:
            while not self._closing:
                parcels, now = due(), time.monotonic()
                if ready := [p for p in parcels if p.not_before <= now]:
                    parcel = min(ready, key=lambda p: p.tick)
                    parcel.due = False
                    return parcel
                soonest = min((p.not_before for p in parcels), default=math.inf)
                self._changed.wait(min(self._deadlines.budget_s, soonest - now))
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
        try:
            nbytes = self._transfers.upload(start, parcel.payload)
        except Refused as refused:
            # The verdict, or a request to send again, comes as a message.
            logger.warning(
                "%s refused (%s): %s",
                parcel,
                refused.code,
                refused.message,
            )
        except WireError as error:
            self._put_off(parcel, error)
        else:
            self._mailbox.count(bytes_up=nbytes)

    def _put_off(self, parcel: _Parcel, error: WireError) -> None:
        """Send a parcel again after a pause, unless it is not wanted any more."""
        with self._changed:
            parcel.attempts += 1
            attempt = parcel.attempts
            failures = min(attempt - 1, LONGEST_PAUSE_FROM)
            pause_s = Backoff(self._deadlines, failures).next_s()
            parcel.not_before = time.monotonic() + pause_s
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


def _key(parcel: _Parcel) -> tuple[int, bool]:
    return parcel.fragment, parcel.version is not None


class Receiver:
    """Threads that fetch published fragments, one for each lane, after `start`. `want`
    never waits for them.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        mailbox: Mailbox,
        deadlines: Deadlines,
        versions: Sequence[Version],
        orders: Orders | None,
        join_s: float,
        lanes: Sequence[int] = (),
    ) -> None:
        """orders: for the other hosts of the island, if there are any. join_s: time
        within which each fragment of a join must come. lanes: the worker of each
        fragment; each worker has a thread, so that none waits for another. Empty:
        there are no workers."""
        self._fetcher = fetcher
        self._orders, self._join_s = orders, join_s
        self._mailbox = mailbox
        self._deadlines = deadlines
        self._fragments = len(versions)
        self._fetching = Fetching(versions)
        """Guarded by `_changed`."""
        self._changed = threading.Condition()
        self._closing = False
        fragments = range(len(versions))
        others = [
            frozenset(f for f in fragments if lanes and lanes[f] != lane)
            for lane in range(max(lanes, default=0) + 1)
        ]
        self._threads = [
            threading.Thread(
                target=self._run, args=(of_others,), name="receiver", daemon=True
            )
            for of_others in others
        ]

    def want(self, fragment: int, version: Version) -> None:
        """Note a published version. Versions older than known ones are ignored."""
        with self._changed:
            self._fetching.want(fragment, version)
            self._changed.notify_all()

    def fetch_all(self) -> list[Version]:
        """Fetch every fragment in full, for a join, before `start`; return their
        versions.

        Raises TimeoutError if a fragment does not come within `join_s`, Refused, or any
        WireError once the mailbox says that the island must end.
        """
        with ThreadPoolExecutor(JOIN_FETCHES) as pool:
            fragments = range(self._fragments)
            arrivals = list(pool.map(lambda _: self._join_next(), fragments))
        for arrival in arrivals:
            self._mailbox.arrivals.put(arrival)
        return [a.version for a in sorted(arrivals, key=lambda a: a.fragment)]

    def have_all(self, versions: Sequence[Version]) -> None:
        """Note the versions that the island begins with, if it need not fetch them."""
        with self._changed:
            for fragment, version in enumerate(versions):
                self._fetching.got(fragment, version)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread; a fetch may go on until the process ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, others: frozenset[int]) -> None:
        """Fetch until `close`. others: the fragments of other lanes."""
        backoff = Backoff(self._deadlines)
        try:
            while (fetch := self._next(others)) is not None:
                try:
                    arrival = self._fetch(fetch)
                except VersionGone:
                    with self._changed:
                        self._fetching.gone(fetch.fragment)
                except WireError as error:
                    with self._changed:
                        self._fetching.failed(fetch.fragment)
                    self._log_failure(fetch.fragment, error)
                else:
                    self._hand_over(arrival)
                    backoff.reset()
                    continue
                self._pause(backoff.next_s())
        except Exception as error:
            logger.exception("the receiver failed")
            self._mailbox.end(EXIT_FAILED, f"the receiver failed: {error!r}")

    def _next(self, others: frozenset[int]) -> Fetch | None:
        """Wait for something to fetch; None when closing."""
        with self._changed:
            while not self._closing:
                if (fetch := self._fetching.next(others)) is not None:
                    return fetch
                self._changed.wait(self._deadlines.budget_s)
            return None

    def _join_next(self) -> Arrival:
        """Fetch the next fragment until it has arrived; several threads do this at a
        time."""
        with self._changed:
            fetch = self._fetching.next()
        assert fetch is not None, "more threads than fetches"
        deadline = time.monotonic() + self._join_s
        backoff = Backoff(self._deadlines)
        while True:
            if self._mailbox.finished:
                raise Refused("finished", "the run was over before this island's join")
            try:
                return self._fetch(fetch)
            except WireError as error:
                if self._mailbox.ending is not None or isinstance(error, Refused):
                    raise
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"fragment {fetch.fragment} did not come within "
                        f"{self._join_s:.0f} s ({error}); is the coordinator "
                        f"reachable on its advertised address?"
                    ) from error
                self._pause(backoff.next_s())
                with self._changed:
                    fetch = self._fetching.again(fetch.fragment)

    def _fetch(self, fetch: Fetch) -> Arrival:
        number = -1
        if self._orders is not None:
            number = self._orders.give(fetch)
        arrival = None
        try:
            arrival = self._fetcher.fetch(fetch)
        finally:
            # Whatever this host's outcome: the others' must be known before the next
            # order.
            if self._orders is not None:
                self._orders.await_answers(number, arrival)
        with self._changed:
            self._fetching.got(fetch.fragment, arrival.version)
        return arrival

    def _hand_over(self, arrival: Arrival) -> None:
        while not self._closing:
            if self._mailbox.deliver(arrival, self._deadlines.report_s):
                return

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, pause_s)

    def _log_failure(self, fragment: int, error: WireError) -> None:
        level = logging.WARNING if isinstance(error, Refused) else logging.DEBUG
        logger.log(level, "fragment %d not fetched: %s", fragment, error)


class Fetcher:
    """Fetch this host's part of versions. Any thread may call it."""

    def __init__(
        self,
        transfers: Transfers | Lanes,
        identity: Identity,
        exchange: Exchange,
        mailbox: Mailbox,
    ) -> None:
        self._transfers, self._identity = transfers, identity
        self._exchange, self._mailbox = exchange, mailbox

    def fetch(self, fetch: Fetch) -> Arrival:
        """Fetch everything that leads from `have` to `want`; A in full if `have` is
        None, or too old.

        Raises VersionGone if the version is not kept any more, or another WireError.
        """
        exchange, fragment = self._exchange, fetch.fragment
        part = exchange.part_down(fragment)
        size = exchange.layouts_down[fragment].part_bytes(part)
        fetched = self._transfers.fetch(
            FetchRequest(
                **self._identity.fields(),
                fragment=fragment,
                want=fetch.want,
                have=fetch.have,
                part=part,
            ),
            max_bytes=max(exchange.anchor_bytes(fragment), MAX_CHAIN * size),
        )
        payload = memoryview(fetched.payload)
        if fetched.full:
            self._mailbox.count(bytes_join=fetched.wire_bytes)
            return Arrival(
                fragment=fragment,
                version=fetched.version,
                anchor=exchange.put_anchor(fragment, payload),
            )
        self._mailbox.count(bytes_down=fetched.wire_bytes)
        parts = [payload[i * size : (i + 1) * size] for i in range(fetched.count)]
        return Arrival(
            fragment=fragment,
            version=fetched.version,
            publishes=tuple(exchange.put_publish(fragment, p) for p in parts),
        )
