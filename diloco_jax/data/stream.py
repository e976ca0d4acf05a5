"""Batches from leased positions, prepared ahead of the train loop.

The network's thread grants ranges of positions, and the loop's thread takes batches. A
worker reads the next batches meanwhile. Positions are used in the order granted.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading

import numpy as np

from diloco_jax.data.positions import LeasedPositions
from diloco_jax.data.windows import Windows
from diloco_jax.protocol.values import Span

BATCHES_AHEAD = 2


class LeasedStream:
    """The batches of one incarnation of an island.

    Any thread may grant, look and close; one thread takes batches.
    """

    def __init__(self, windows: Windows, sequences_per_step: int):
        self._windows = windows
        self._per_step = sequences_per_step
        self._lock = threading.Lock()
        self._positions = LeasedPositions()
        self._ready: collections.deque[concurrent.futures.Future[np.ndarray]] = (
            collections.deque()
        )
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "data")
        self._closed = False
        self._consumed = 0

    @property
    def granted(self) -> int:
        """Number of sequences leased to this incarnation so far."""
        with self._lock:
            return self._positions.granted

    @property
    def consumed(self) -> int:
        """Number of sequences handed out by `next_batch` so far."""
        with self._lock:
            return self._consumed

    def grant(self, span: Span) -> None:
        """Add positions [start, stop) after those granted before."""
        with self._lock:
            self._positions.grant(span)
            self._prepare()

    @property
    def ready(self) -> bool:
        """Return True if the leases fill another batch."""
        with self._lock:
            return bool(self._ready)

    def next_batch(self, timeout_s: float) -> np.ndarray:
        """Return the next batch, int32 [B, T + 1]; wait until it is read.

        Raises:
          ValueError: the leases do not fill it (see `ready`).
          TimeoutError: it cannot be read within the timeout.
        """
        with self._lock:
            if not self._ready:
                raise ValueError(
                    f"{self._positions.granted - self._positions.drawn} sequences are "
                    f"leased, a step takes {self._per_step}; wait for a grant"
                )
            first = self._ready.popleft()
            self._consumed += self._per_step
            self._prepare()
        try:
            return first.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(
                f"a batch of {self._per_step} sequences was not read within "
                f"{timeout_s:g} s; is the corpus on a slow disk?"
            ) from None

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._closed = True
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _prepare(self) -> None:
        """Start reading as many batches as the leases and the lead allow."""
        while not self._closed and len(self._ready) < BATCHES_AHEAD:
            positions = self._positions.draw(self._per_step)
            if positions is None:
                return
            self._ready.append(self._worker.submit(self._windows.batch, positions))
