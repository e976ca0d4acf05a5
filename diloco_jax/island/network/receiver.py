"""The thread that fetches published fragments: wire -> host -> device, in the order of
`protocol/island/fetching.py`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.hosts.following import Orders
from diloco_jax.island.mailbox import Arrival, Mailbox
from diloco_jax.island.network.lanes import Lanes
from diloco_jax.island.network.peer_anchors import PeerAnchors
from diloco_jax.protocol.island.conversation import MAX_CHAIN
from diloco_jax.protocol.island.fetching import JOIN_FETCHES, Fetch, Fetching
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import FetchRequest, Identity
from diloco_jax.wire.errors import NO_TICKET, Refused, VersionGone, WireError
from diloco_jax.wire.transfers import Transfers

logger = logging.getLogger(__name__)


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

    def want(self, fragment: int, version: Version, ticket: bytes = b"") -> None:
        """Note a published version. Versions older than known ones are ignored."""
        with self._changed:
            self._fetching.want(fragment, version, ticket)
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
                if self._mailbox.ending is not None or (
                    isinstance(error, Refused) and error.code != NO_TICKET
                ):
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
        peers: PeerAnchors | None = None,
    ) -> None:
        """peers: other islands, which are asked first for an anchor in full."""
        self._transfers, self._identity = transfers, identity
        self._exchange, self._mailbox, self.peers = exchange, mailbox, peers

    def fetch(self, fetch: Fetch) -> Arrival:
        """Fetch everything that leads from `have` to `want`; A in full if `have` is
        None, or too old.

        Raises VersionGone if the version is not kept any more, or another WireError.
        """
        exchange, fragment = self._exchange, fetch.fragment
        part = exchange.part_down(fragment)
        layout = exchange.layouts_down[fragment]
        size, fetched = layout.part_bytes(part), None
        if fetch.have is None and self.peers is not None:
            fetched = self.peers.fetch(fetch, part, layout)
        fetched = fetched or self._transfers.fetch(
            FetchRequest(
                **self._identity.fields(),
                fragment=fragment,
                want=fetch.want,
                have=fetch.have,
                part=part,
                ticket=fetch.ticket,
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
