"""Threads that keep a timeline and a status up to date while the page is served."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from diloco_jax.dashboard.run_readers import Telling, status_or_why
from diloco_jax.dashboard.timeline import Timeline
from diloco_jax.dashboard.view import Window, find_events, view
from diloco_jax.observability.measures import health_of

logger = logging.getLogger(__name__)

LINES_EVERY_S = 1.0
STATUS_EVERY_S = 2.0
AT_ONCE = 5_000
"""Lines taken under one hold of the lock: the page is served between them."""
STOP_S = 5.0
SHORTEST_S = 0.01
EVENTS_SHOWN = 200


class Onlooker:
    """A run as it is told by a source, for any number of readers.

    A context manager: its threads run inside the block. However many pages are open,
    the coordinator is asked once every `STATUS_EVERY_S`.
    """

    def __init__(self, source: Telling, link_bytes_per_s: float = 0.0) -> None:
        """link_bytes_per_s: of each island's link, each way; 0 = not known."""
        self._source, self._link_bytes_per_s = source, link_bytes_per_s
        self._timeline = Timeline()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._status: dict[str, Any] = {}
        self._threads = [
            threading.Thread(target=self._every, args=pair, daemon=True)
            for pair in (
                (STATUS_EVERY_S, self.ask),
                (LINES_EVERY_S, self.read),
            )
        ]

    def __enter__(self) -> Onlooker:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(STOP_S)
        self.close()

    def close(self) -> None:
        """Close the source's files."""
        self._source.close()

    def ask(self) -> None:
        """Read the status once."""
        self._status = status_or_why(self._source)

    def read(self) -> None:
        """Take all lines that are new."""
        lines = iter(self._source.new(self._timeline))
        while not self._over.is_set():
            if not (batch := list(itertools.islice(lines, AT_ONCE))):
                return
            with self._lock:
                for _, take, line in batch:
                    take(line)

    def view(
        self, start: float | None, stop: float | None, columns: int
    ) -> dict[str, Any]:
        """Return what the page shows; None: from the beginning, or to the newest."""
        status, facts = self._status, self._source.facts()
        with self._lock:
            window = self._window(start, stop, columns)
            shown = view(self._timeline, window, facts["flops_per_token"])
        return {
            **shown,
            "now": time.time(),
            "run": {**facts, "link_bytes_per_s": self._link_bytes_per_s},
            "health": health_of(status),
            "read": round(self._source.read_share(), 3),
            "status": status,
        }

    def events(
        self, wanted: str, start: float | None, stop: float | None
    ) -> dict[str, Any]:
        """Return events of a window that have all the words, the newest first."""
        with self._lock:
            window = self._window(start, stop, 1)
            return find_events(
                self._timeline, wanted, window.start, window.stop, EVENTS_SHOWN
            )

    def _window(self, start: float | None, stop: float | None, columns: int) -> Window:
        newest = self._timeline.newest
        stop = newest + SHORTEST_S if stop is None else stop
        start = (self._timeline.grid.begin or 0.0) if start is None else start
        return Window(start=start, stop=max(stop, start + SHORTEST_S), columns=columns)

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while not self._over.is_set():
            try:
                work()
            except Exception:
                # A run that is written just now may be in any state; the next look
                # finds another one.
                logger.exception("the dashboard could not read")
            self._over.wait(seconds)
