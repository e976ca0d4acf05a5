"""The thread that has published fragments fetched.

Per fragment it remembers the newest version that it was told of and the newest that
it fetched; it asks for what lies between, or for the whole anchor where that is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.exit_codes import EXIT_FAILED
from diloco_jax.island.hosts.following import Order, Orders
from diloco_jax.island.mailbox import Arrival, Mailbox
from diloco_jax.island.network.fetcher import Fetcher
from diloco_jax.protocol.values import Version
from diloco_jax.wire.errors import Refused, VersionGone, WireError

logger = logging.getLogger(__name__)

JOIN_FETCHES = 4
"""Fragments fetched at a time by a join."""


class Receiver:
    """One thread after `start`. `want` never waits for it."""

    def __init__(
        self,
        fetcher: Fetcher,
        mailbox: Mailbox,
        deadlines: Deadlines,
        versions: Sequence[Version],
        orders: Orders | None = None,
    ) -> None:
        """orders: to the other hosts of the island, if there are any."""
        self._fetcher = fetcher
        self._orders = orders
        self._mailbox = mailbox
        self._deadlines = deadlines
        self._wanted = list(versions)
        self._have: list[Version | None] = [None] * len(versions)
        self._accepted: dict[int, Version] = {}
        """Versions that every host of the island has."""
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    def want(self, fragment: int, version: Version) -> None:
        """A version was published. Older ones than known are ignored."""
        with self._changed:
            self._wanted[fragment] = max(self._wanted[fragment], version)
            self._changed.notify_all()

    def fetch_all(self) -> list[Arrival]:
        """Every fragment in full, at the newest version; for a join, before `start`.

        Raises TimeoutError if a fragment does not come within the pins' lifetime,
        Refused, or any WireError once the mailbox says that the island must end.
        """
        with ThreadPoolExecutor(JOIN_FETCHES) as pool:
            return list(pool.map(self._join_fragment, range(len(self._wanted))))

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends the thread; a fetch may go on until the process ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        backoff = Backoff(self._deadlines)
        try:
            while (fragment := self._next()) is not None:
                try:
                    arrival = self._fetch(fragment, self._have[fragment])
                except VersionGone:
                    # The chain is gone, or the version was overtaken: all of it then.
                    self._have[fragment] = None
                except WireError as error:
                    self._log_failure(fragment, error)
                else:
                    self._hand_over(arrival)
                    backoff.reset()
                    continue
                self._pause(backoff.next_s())
        except Exception as error:
            logger.exception("the receiver failed")
            self._mailbox.end(EXIT_FAILED, f"the receiver failed: {error!r}")

    def _next(self) -> int | None:
        """The fragment that lags most; None when closing."""

        def lagging() -> list[int]:
            return [
                fragment
                for fragment, (wanted, have) in enumerate(
                    zip(self._wanted, self._have, strict=True)
                )
                if have is None or have < wanted
            ]

        with self._changed:
            while not self._closing:
                if fragments := lagging():
                    return min(fragments, key=lambda f: self._have[f] or Version(0, 0))
                self._changed.wait(self._deadlines.budget_s)
            return None

    def _join_fragment(self, fragment: int) -> Arrival:
        deadline = time.monotonic() + self._deadlines.pin_s
        backoff = Backoff(self._deadlines)
        while True:
            if self._mailbox.finished:
                raise Refused("finished", "the run was over before this island's join")
            try:
                return self._fetch(fragment, None)
            except WireError as error:
                if isinstance(error, Refused) or self._mailbox.ending is not None:
                    raise
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"fragment {fragment} did not come within "
                        f"{self._deadlines.pin_s:g} s ({error}); is the coordinator "
                        f"reachable on its advertised address?"
                    ) from error
                self._pause(backoff.next_s())

    def _fetch(self, fragment: int, have: Version | None) -> Arrival:
        want = self._wanted[fragment]
        number = -1
        if self._orders is not None:
            order = Order(
                fragment=fragment,
                want=want,
                have=have,
                accepted=self._accepted.get(fragment),
            )
            number = self._orders.give(order)
        try:
            arrival = self._fetcher.fetch(fragment, want, have)
        finally:
            # Whatever became of ours: theirs must be known before the next order.
            if self._orders is not None:
                self._orders.await_answers(number)
        self._have[fragment] = self._accepted[fragment] = arrival.version
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
