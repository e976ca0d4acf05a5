"""The one time budget, and every deadline that follows from it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds. `budget_s` is the silence after which a peer counts as gone."""

    budget_s: float

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ValueError(
                f"placement.time_budget_s = {self.budget_s}; it must be above 0"
            )

    @property
    def report_s(self) -> float:
        """An island says at least this often that it lives."""
        return self.budget_s / 10

    @property
    def lease_s(self) -> float:
        """Silence after which an island is not counted on."""
        return self.budget_s

    @property
    def connect_s(self) -> float:
        """One attempt to connect, hello and welcome included."""
        return self.budget_s / 2

    @property
    def idle_s(self) -> float:
        """A transfer without a single byte for this long is broken off."""
        return self.budget_s

    @property
    def retry_min_s(self) -> float:
        """First pause before an attempt is repeated (`Backoff`)."""
        return self.budget_s / 100

    @property
    def retry_max_s(self) -> float:
        """Longest pause between attempts."""
        return self.budget_s / 10

    @property
    def reunion_s(self) -> float:
        """Islands that were cut off together are back within this of each other: the
        longest pause, and as long again to get through."""
        return 2 * self.retry_max_s

    @property
    def stop_s(self) -> float:
        """A process that was asked to end is killed after this long."""
        return self.budget_s

    @property
    def flush_s(self) -> float:
        """The flush at the end of a run waits this long for deltas."""
        return 3 * self.budget_s

    @property
    def pin_s(self) -> float:
        """A join may go on fetching the versions it began with for this long."""
        return 6 * self.budget_s


class Backoff:
    """Pauses between attempts: `retry_min_s`, then each twice the one before, up to
    `retry_max_s`."""

    def __init__(self, deadlines: Deadlines, failures: int = 0) -> None:
        """failures: attempts that failed before these."""
        self._deadlines = deadlines
        self._pause_s = deadlines.retry_min_s
        for _ in range(failures):
            self.next_s()

    def next_s(self) -> float:
        """Seconds until the next attempt."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._deadlines.retry_max_s)
        return pause_s

    def reset(self) -> None:
        """An attempt brought something."""
        self._pause_s = self._deadlines.retry_min_s
