"""How long an outpost waits for a lead: a machine that nobody uses costs."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

FIRST_S = 86400.0
"""Longest wait for the first lead, in seconds: the coordinator may queue for a
machine."""


class Patience:
    """Measures the time without a lead. Thread-safe."""

    def __init__(self) -> None:
        self.within_s = FIRST_S
        """Longest wait for a lead; later as the last one said."""
        self._lock = threading.Lock()
        self._leads, self._since = 0, time.monotonic()

    @contextlib.contextmanager
    def led(self, within_s: float) -> Iterator[None]:
        """Count a lead as here, in the block. within_s: longest wait for the next."""
        with self._lock:
            self._leads += 1
            self.within_s = within_s
        try:
            yield
        finally:
            with self._lock:
                self._leads -= 1
                self._since = time.monotonic()

    def left_s(self) -> float:
        """Return the seconds that are left to wait for a lead."""
        with self._lock:
            if self._leads:
                return math.inf
            return self._since + self.within_s - time.monotonic()
