"""Limit the rate of one peer's control messages: a peer that is too fast waits.

A message may cost lines on the tape and the log, and time of the one thread that
decides. The coordinator stops reading meanwhile, and gRPC's flow control makes the peer
wait.
"""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)

BYTES_PER_SECOND = 64 << 10
"""Rate of one island in the long run: hundreds of records, or one hello, a second."""
BURST_BYTES = 4 << 20
HELLO_BYTES = 64 << 10
"""Bytes that a hello counts for: it may end one incarnation and begin another, and each
is made durable."""
TOLD_EVERY_S = 60.0


class Quota:
    """The quota of one peer, over all of its streams. Any thread may call it."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._lock = threading.Lock()
        self._left, self._at = float(BURST_BYTES), time.monotonic()
        self._told = -TOLD_EVERY_S

    def wait_s(self, nbytes: int) -> float:
        """Count a message of `nbytes`; return the seconds to wait before it is
        handled.
        """
        with self._lock:
            now = time.monotonic()
            earned = (now - self._at) * BYTES_PER_SECOND
            self._left = min(self._left + earned, BURST_BYTES) - nbytes
            self._at = now
            if self._left >= 0:
                return 0.0
            if now - self._told >= TOLD_EVERY_S:
                self._told = now
                logger.warning(
                    "%s sends more than %d bytes of control messages a second; what it "
                    "sends waits",
                    self._who,
                    BYTES_PER_SECOND,
                )
            return -self._left / BYTES_PER_SECOND
