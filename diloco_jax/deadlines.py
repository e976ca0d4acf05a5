"""The one time budget, and every deadline that follows from it."""

from __future__ import annotations

import dataclasses

SLOWEST_LINK_BITS_PER_S = 1e8
"""Rate below which a link counts as broken."""
FIRST_RETRY_S = 0.5
"""Longest first pause: an island that starts beside its coordinator is often the first
of the two, whatever the budget is."""


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds. A peer counts as gone after a silence of `budget_s`."""

    budget_s: float

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ValueError(
                f"placement.time_budget_s = {self.budget_s}; it must be above 0"
            )

    @property
    def report_s(self) -> float:
        """Longest time between two signs of life of an island."""
        return self.budget_s / 10

    @property
    def lease_s(self) -> float:
        """Silence after which an island's lease is over."""
        return self.budget_s

    @property
    def connect_s(self) -> float:
        """Time for one attempt to connect, hello and welcome included."""
        return self.budget_s / 2

    @property
    def idle_s(self) -> float:
        """Time without a single byte after which a transfer is broken off."""
        return self.budget_s

    @property
    def rest_s(self) -> float:
        """Time after which a connection that no transfer needed is closed."""
        return 3 * self.budget_s

    @property
    def retry_min_s(self) -> float:
        """First pause before an attempt is repeated (`Backoff`)."""
        return min(FIRST_RETRY_S, self.budget_s / 100)

    @property
    def retry_max_s(self) -> float:
        """Longest pause between attempts."""
        return self.budget_s / 10

    @property
    def reunion_s(self) -> float:
        """Time within which islands that were cut off together are all back: the
        longest pause, and as long again to get through. Anchors that were being fetched
        are kept for as long."""
        return 2 * self.retry_max_s

    @property
    def another_key_s(self) -> float:
        """Time for which an island whose key was revoked waits for another one."""
        return 3 * self.budget_s

    @property
    def stop_s(self) -> float:
        """Time after which a process that was asked to end is killed."""
        return self.budget_s

    @property
    def flush_s(self) -> float:
        """Time for which the flush at the end of a run waits for deltas."""
        return 3 * self.budget_s

    @property
    def pin_s(self) -> float:
        """Time within which one fetch must end."""
        return 6 * self.budget_s

    def join_s(self, octets: int) -> float:
        """Time within which a join that fetches so many bytes is done."""
        return self.pin_s + 8 * octets / SLOWEST_LINK_BITS_PER_S


class Backoff:
    """Pauses between attempts: first `retry_min_s`, then doubled each time up to
    `retry_max_s`."""

    def __init__(self, deadlines: Deadlines, failures: int = 0) -> None:
        """failures: attempts that failed before these."""
        self._deadlines = deadlines
        self._pause_s = deadlines.retry_min_s
        for _ in range(failures):
            self.next_s()

    def next_s(self) -> float:
        """Return the seconds until the next attempt."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._deadlines.retry_max_s)
        return pause_s

    def reset(self) -> None:
        """Begin again with the shortest pause, since an attempt got through."""
        self._pause_s = self._deadlines.retry_min_s
