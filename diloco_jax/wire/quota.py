"""Limit the rate of what one peer says: a peer that is too fast waits.

A control message may cost lines on the tape and the log, and time of the one thread
that decides. The coordinator stops reading meanwhile, and gRPC's flow control makes the
peer wait. A request for bulk costs a thread's time, whatever its length.
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
REQUESTS_PER_SECOND = 16
"""Rate of requests for bulk, for each place of the peer: stripes have 1 MiB or more
unless the payload is smaller, so it holds up no link."""
LEAST_REQUESTS = 64
BURST_S = 8
"""Seconds of requests at that rate which may come at once, as in a join."""
TOLD_EVERY_S = 60.0


class Quota:
    """The quota of one peer, over all of its streams or connections. Any thread may
    call it."""

    def __init__(
        self,
        who: str,
        rate: float = BYTES_PER_SECOND,
        burst: float = BURST_BYTES,
        what: str = "bytes of control messages",
    ) -> None:
        """rate, burst: of `what`, a second and at once."""
        self._who, self._rate, self._burst, self._what = who, rate, burst, what
        self._lock = threading.Lock()
        self._left, self._at = float(burst), time.monotonic()
        self._told = -TOLD_EVERY_S

    def wait_s(self, amount: int) -> float:
        """Count so much; return the seconds to wait before it is handled."""
        with self._lock:
            now = time.monotonic()
            earned = (now - self._at) * self._rate
            self._left = min(self._left + earned, self._burst) - amount
            self._at = now
            if self._left >= 0:
                return 0.0
            if now - self._told >= TOLD_EVERY_S:
                self._told = now
                logger.warning(
                    "%s sends more than %d %s a second; what it sends waits",
                    self._who,
                    self._rate,
                    self._what,
                )
            return -self._left / self._rate
