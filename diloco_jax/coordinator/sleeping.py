"""Clocks on a machine that sleeps, or is stopped as a virtual machine.

The monotonic clock stands still meanwhile, on Linux. Silences and waits go by it:
nobody could be heard then, and nobody is late. A permission that others count as well
goes by `clock`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 1.0
"""Shortest sleep that is noticed. A clock that is merely corrected moves by less."""


def clock() -> float:
    """Return seconds that also pass while the machine sleeps, where it has them."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class Sleeps:
    """Notices how long the monotonic clock stood still, by the time of day. That is set
    as a machine wakes up, and a virtual one by the tools of its host."""

    def __init__(
        self,
        unix: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unix, self._monotonic = unix, monotonic
        self._ahead_s = unix() - monotonic()

    def since_last_s(self) -> float:
        """Return the seconds of sleep since the last call, 0 if there was none. A time
        of day that was wrong, and is put forward, looks the same."""
        ahead_s = self._unix() - self._monotonic()
        slept_s, self._ahead_s = ahead_s - self._ahead_s, ahead_s
        return slept_s if slept_s >= LEAST_S else 0.0
