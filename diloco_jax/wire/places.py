"""Bound the number of transfers at once.

A transfer holds a thread, so there are at most `MOST_PLACES`, however many hosts
connect. A transfer that finds no place waits here for a while. Then its peer is told
Busy, pauses and asks again: an upload until `budget_s`, a fetch until `pin_s`
(`transfers.py`).
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from collections import Counter
from collections.abc import Hashable, Iterator

from diloco_jax.wire.errors import Busy

logger = logging.getLogger(__name__)

MOST_PLACES = 4096
"""Transfers at once. With waiting ones and sessions of 64 islands, their threads are
fewer than the 4,915 that a service of Linux may have (systemd's TasksMax)."""
MOST_WAITING = 256
"""Transfers that wait for a place. Those beyond are told Busy at once."""
OTHER_FILES = 512
"""Files that the process opens besides its connections."""


class Places:
    """The places of one server, for transfers in both directions or for calls."""

    def __init__(
        self,
        wanted: int,
        wait_s: float,
        each: int | None = None,
        what: str = "transfers",
    ) -> None:
        """wanted: transfers that all peers may begin together. wait_s: longest wait for
        a place. each: most transfers of one known peer; None = any number. what: them,
        in words."""
        self._what = what
        self.count = min(wanted, MOST_PLACES)
        self.threads = self.count + MOST_WAITING
        """Threads that hold or await a place."""
        self._free = threading.Semaphore(self.count)
        self._waiting = threading.Semaphore(MOST_WAITING)
        self._wait_s, self._each = wait_s, each
        self._own: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, who: Hashable = None) -> Iterator[None]:
        """Hold a place for the length of the block.

        Raises Busy if no place becomes free in time, or if the peer `who` has its share
        already. who: None = the peer is not known, and has no share of its own.
        """
        with self._counted(who):
            if not self._free.acquire(blocking=False):
                self._wait()
            try:
                yield
            finally:
                self._free.release()

    @contextlib.contextmanager
    def _counted(self, who: Hashable) -> Iterator[None]:
        if who is None or self._each is None:
            yield
            return
        with self._lock:
            if self._own[who] >= self._each:
                raise Busy(
                    f"{who} has {self._own[who]} {self._what} under way, the limit is "
                    f"{self._each} each"
                )
            self._own[who] += 1
        try:
            yield
        finally:
            with self._lock:
                self._own[who] -= 1
                if not self._own[who]:
                    del self._own[who]

    def _wait(self) -> None:
        if not self._waiting.acquire(blocking=False):
            raise Busy(
                f"all {self.count} places for {self._what} are taken, and "
                f"{MOST_WAITING} {self._what} wait for one"
            )
        try:
            if not self._free.acquire(timeout=self._wait_s):
                raise Busy(
                    f"all {self.count} places for {self._what} were taken for "
                    f"{self._wait_s:g} s"
                )
        finally:
            self._waiting.release()


def allow_connections(connections: int) -> int:
    """Raise this process's limit on open files as far as `connections` need it. Warn if
    the system's limit is lower. Return how many of them leave room for other files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        logger.warning(
            "islands may open %d connections, and this process may open %d files: "
            "the oldest idle ones make room for those beyond; "
            "raise the limit (ulimit -Hn, LimitNOFILE=), or lower "
            "placement.bulk_channels",
            connections,
            limit,
        )
    return min(connections, max(limit - OTHER_FILES, limit // 2))
