"""Points of curves on their way to a sink, by a thread that no caller waits for."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

from diloco_jax.observability.sinks import Point, Sink

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""Seconds until a point is handed on; flushing waits for the disk or the network."""
CLOSE_S = 10.0
"""Seconds for the last points; a thread that still hangs then is left behind."""
RETRY_S = 60.0
"""Seconds between two sinks; otherwise a full disk would lead to endless new files."""
MOST_WAITING = 100_000
"""Points that may wait for a slow sink; later ones are left out."""


class Curves:
    """The curves of a run for one sink. `add` never waits and never raises."""

    def __init__(self, name: str, begin: Callable[[int], Sink]) -> None:
        """name: of the sink, for people. begin: makes a sink; given the number of those
        it has made before."""
        self._name, self._begin = name, begin
        self._points: queue.Queue[Point | None] = queue.Queue(MOST_WAITING)
        self._attempts = itertools.count()
        self._left_out = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="curves", daemon=True)
        self._thread.start()

    def add(self, point: Point) -> None:
        """Queue a point, or leave it out if too many wait."""
        try:
            self._points.put_nowait(point)
        except queue.Full:
            if not self._left_out:
                self._left_out = True
                logger.warning(
                    "%d points wait for %s; curves leave out what comes now, "
                    "metrics.jsonl has it",
                    MOST_WAITING,
                    self._name,
                )

    def close(self) -> None:
        """Hand on the queued points, if the sink allows it."""
        self._closing.set()
        try:
            self._points.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    # ---- the thread -------------------------------------------------------------

    def _run(self) -> None:
        """Feed one sink, and another one after each error."""
        told = False
        while True:
            last = self._closing.is_set()
            try:
                self._feed()
                return
            except Exception as error:
                # A sink is somebody else's code: whatever it raises ends no run.
                if not told:
                    told = True
                    logger.warning(
                        "curves in %s are not complete (%s: %s); metrics.jsonl has all",
                        self._name,
                        type(error).__name__,
                        error,
                    )
            if last or (self._closing.wait(RETRY_S) and self._points.empty()):
                return

    def _feed(self) -> None:
        """Feed one sink until `close` is called."""
        point = self._points.get()
        if point is None:
            return
        sink = self._begin(next(self._attempts))
        try:
            self._feed_points(sink, point)
        except Exception:
            with contextlib.suppress(Exception):
                sink.close()
            raise
        sink.close()

    def _feed_points(self, sink: Sink, first: Point) -> None:
        """Hand points on until `close` is called."""
        point: Point | None = first
        flush_at = time.monotonic() + FLUSH_S
        while point is not None:
            sink.write(point)
            try:
                point = self._points.get(timeout=max(0.0, flush_at - time.monotonic()))
            except queue.Empty:
                sink.flush()
                point = self._points.get()
                flush_at = time.monotonic() + FLUSH_S
