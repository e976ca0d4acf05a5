"""Virtual time: calls that are due, in order."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable


class Due:
    """A call that is due; `cancel` keeps it from happening."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], None] | None) -> None:
        self.at, self.call = at, call

    def cancel(self) -> None:
        """Keep the call from happening."""
        self.call = None


class Clock:
    """Virtual time, which runs calls when they are due.

    Calls of one time run in the order in which they were scheduled, `last` ones after
    all others. So a run depends on nothing but its inputs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds of virtual time."""
        self._queue: list[tuple[float, bool, int, Due]] = []
        self.scheduled = 0
        """Calls that were scheduled so far."""

    def at(self, time: float, call: Callable[[], None]) -> Due:
        """Schedule a call at `time`, which must not have passed."""
        assert time >= self.now, f"{time} has passed: it is {self.now}"
        due = Due(time, call)
        self.scheduled = number = self.scheduled + 1
        heapq.heappush(self._queue, (time, False, number, due))
        return due

    def after(self, seconds: float, call: Callable[[], None]) -> Due:
        """Schedule a call in `seconds` seconds."""
        return self.at(self.now + seconds, call)

    def last(self, call: Callable[[], None]) -> Due:
        """Schedule a call for now, after everything else that is or becomes due now."""
        due = Due(self.now, call)
        self.scheduled = number = self.scheduled + 1
        heapq.heappush(self._queue, (self.now, True, number, due))
        return due

    def run(
        self,
        until: float = float("inf"),
        done: Callable[[], bool] | None = None,
        most: int = sys.maxsize,
    ) -> None:
        """Run until nothing is due by `until`, `done` is True after a call, or `most`
        calls were due."""
        queue, pop = self._queue, heapq.heappop
        for _ in range(most):
            if not queue or queue[0][0] > until:
                break
            time, _, _, due = pop(queue)
            if (call := due.call) is None:
                continue
            self.now = time
            call()
            if done is not None and done():
                return
        else:
            return
        if until != float("inf"):
            self.now = max(self.now, until)
