"""Batches from leased positions, prepared ahead of the train loop.

The network's thread grants ranges of positions, the loop's thread takes batches; a
worker reads the next ones meanwhile. Positions are used in the order granted.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time

import numpy as np

from diloco_jax.data.positions import LeasedPositions
from diloco_jax.data.windows import Windows
from diloco_jax.policy.events import Span

BATCHES_AHEAD = 2


class LeasedStream:
    """The batches of one incarnation of an island.

    Any thread may grant, look and close; one thread takes batches.
    """

    def __init__(self, windows: Windows, sequences_per_step: int):
        self._windows = windows
        self._per_step = sequences_per_step
        self._changed = threading.Condition()
        self._positions = LeasedPositions()
        self._ready: collections.deque[concurrent.futures.Future[np.ndarray]] = (
            collections.deque()
        )
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "data")
        self._closed = False
        self._consumed = 0

    @property
    def granted(self) -> int:
        """Sequences leased to this incarnation so far."""
        with self._changed:
            return self._positions.granted

    @property
    def consumed(self) -> int:
        """Sequences handed out by `next_batch` so far."""
        with self._changed:
            return self._consumed

    def grant(self, offset: int, span: Span) -> None:
        """See `LeasedPositions.grant`."""
        with self._changed:
            self._positions.grant(offset, span)
            self._prepare()
            self._changed.notify_all()

    def next_batch(self, timeout_s: float) -> np.ndarray | None:
        """int32 [B, T + 1]; None if the leases do not fill one within the timeout, or
        the stream is closed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed, timeout_s)
            if self._closed or not self._ready:
                return None
            first = self._ready[0]
        remaining = max(0.0, deadline - time.monotonic())
        try:
            batch = first.result(remaining)
        except concurrent.futures.TimeoutError:
            return None
        with self._changed:
            if self._closed:
                return None
            self._ready.popleft()
            self._consumed += self._per_step
            self._prepare()
        return batch

    def close(self) -> None:
        """Ends the worker; whoever waits in `next_batch` gets None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _prepare(self) -> None:
        """Starts reading as many batches as are leased and may be ahead."""
        while not self._closed and len(self._ready) < BATCHES_AHEAD:
            positions = self._positions.draw(self._per_step)
            if positions is None:
                return
            self._ready.append(self._worker.submit(self._windows.batch, positions))
