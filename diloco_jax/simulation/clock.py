"""Virtual time: calls that are due, in order; lines and steps that take time."""

from __future__ import annotations

import dataclasses
import heapq
import math
import sys
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from diloco_jax.config.fields import SECONDS, explained, setting

DRAWN_AT_ONCE = 1024


class Due:
    """A call that is due; `cancel` keeps it from happening."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], object] | None) -> None:
        self.at, self.call = at, call

    def cancel(self) -> None:
        """Keep the call from happening."""
        self.call = None


class Clock:
    """Virtual time, which runs calls when they are due.

    Calls of one time run in the order in which they were scheduled, `last` ones after
    all others. So a run depends on nothing but its inputs.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        """Seconds of virtual time."""
        self._queue: list[tuple[float, bool, int, Due]] = []
        self.scheduled = 0
        """Calls that were scheduled so far."""

    def at(self, time: float, call: Callable[[], object]) -> Due:
        """Schedule a call at `time`, which must not have passed."""
        assert time >= self.now, f"{time} has passed: it is {self.now}"
        due = Due(time, call)
        self.scheduled = number = self.scheduled + 1
        heapq.heappush(self._queue, (time, False, number, due))
        return due

    def after(self, seconds: float, call: Callable[[], object]) -> Due:
        """Schedule a call in `seconds` seconds."""
        return self.at(self.now + seconds, call)

    def last(self, call: Callable[[], object]) -> Due:
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


class WakeUp:
    """A call at the earliest time that was asked for since it was last made.

    Deadlines move with every report. An alarm that rings too early is harmless, and
    cheaper than one that is set anew each time.
    """

    def __init__(self, clock: Clock, ring: Callable[[], object]) -> None:
        self._clock, self._call = clock, ring
        self._due: Due | None = None

    def by(self, time: float) -> None:
        """Ring at `time`, or earlier."""
        if self._due is not None:
            if self._due.at <= time:
                return
            self._due.cancel()
        self._due = self._clock.at(time, self._ring)

    def cancel(self) -> None:
        """Do not ring."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _ring(self) -> None:
        self._due = None
        self._call()


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class LineSpeed:
    """Latency and bandwidth of a line.

    Example:
      >>> from diloco_jax import EmulationOptions, LineSpeed
      >>> slow = LineSpeed(latency_s=0.03, up_bytes_per_s=1e9 / 8)  # 1 Gbit/s
      >>> EmulationOptions(line=slow).line.down_bytes_per_s
      inf
    """

    latency_s: float = setting(
        0.0, SECONDS, help="Seconds that a message is under way."
    )
    up_bytes_per_s: float = setting(
        float("inf"), help="Bytes per second to the coordinator; inf = no limit."
    )
    down_bytes_per_s: float = setting(
        float("inf"), help="Bytes per second from the coordinator; inf = no limit."
    )


Way = Literal["up", "down"]
Ways = frozenset[Way]
UP, DOWN = Ways({"up"}), Ways({"down"})
"""To the coordinator, and from it."""
BOTH = UP | DOWN


class Line:
    """Control messages in order, and bulk transfers that queue for each direction's
    bandwidth. Nothing arrives after `cut`.
    """

    def __init__(self, clock: Clock, speed: LineSpeed) -> None:
        self.open = True
        self._clock, self._speed = clock, speed
        self._free_at = {UP: 0.0, BOTH: 0.0}

    def cut(self) -> None:
        """Break the line: everything under way is lost."""
        self.open = False

    def send_up(self, arrive: Callable[[], None]) -> None:
        """Send a control message from the island."""
        self._control(UP, arrive)

    def send_down(self, arrive: Callable[[], None]) -> None:
        """Send a control message to the island."""
        self._control(DOWN, arrive)

    def upload(self, nbytes: int, arrive: Callable[[], None]) -> None:
        """Send bulk bytes from the island."""
        self._bulk(UP, nbytes, arrive)

    def download(self, nbytes: int, arrive: Callable[[], None]) -> None:
        """Send bulk bytes to the island, the request included."""
        self._bulk(BOTH, nbytes, arrive)

    def _control(self, ways: Ways, arrive: Callable[[], None]) -> None:
        self._arrive(self._clock.now + self._speed.latency_s, arrive)

    def _bulk(self, ways: Ways, nbytes: int, arrive: Callable[[], None]) -> None:
        speed = self._speed
        per_s = speed.up_bytes_per_s if ways == UP else speed.down_bytes_per_s
        began = max(self._clock.now, self._free_at[ways])
        self._free_at[ways] = free_at = began + nbytes / per_s
        self._arrive(free_at + len(ways) * speed.latency_s, arrive)

    def _arrive(self, at: float, arrive: Callable[[], None]) -> None:
        self._clock.at(at, lambda: arrive() if self.open else None)


def durations(
    mean_seconds: float, spread: float, rng: np.random.Generator
) -> Iterator[float]:
    """Yield the seconds of one step after the other, drawn independently: log-normal,
    so that none is negative.

    spread: standard deviation over mean.
    """
    sigma = math.sqrt(math.log1p(spread**2))
    while True:
        factors = rng.lognormal(-(sigma**2) / 2, sigma, DRAWN_AT_ONCE)
        yield from (mean_seconds * factors).tolist()
