"""Goodput of the last hour, from one status after the other.

The mean over a run (`measures.goodput`) hides on its tenth day what happens on it. This
one is the same ratio over a window: what was merged in it over what the islands that
are in the run would have computed in it, each at its last known speed.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

WINDOW_S = 3600.0
"""Length of the window."""
SAMPLE_S = 60.0
"""Seconds between two samples that are kept."""


class _Sample(NamedTuple):
    time: float
    merged: int
    undisturbed: float


class RecentGoodput:
    """The goodput of a window that moves with time. Use it from one thread."""

    def __init__(self) -> None:
        self._samples: collections.deque[_Sample] = collections.deque()
        self._last: _Sample | None = None
        self._speeds: dict[str, float] = {}
        """Last known tokens per second of each island in the run."""

    def note(self, status: Mapping[str, Any], now: float) -> None:
        """Take in a status; see `summary.status`. Outside a running run, or as a new
        term begins its books, the window begins anew."""
        merged, last = status["tokens_merged"], self._last
        begins = last is None or merged < last.merged
        if begins or status["phase"] != "running" or last is None:
            self._samples.clear()
            self._last = _Sample(now, merged, 0.0)
        else:
            per_s = sum(self._speeds.values())
            undisturbed = last.undisturbed + per_s * (now - last.time)
            self._last = _Sample(now, merged, undisturbed)
        # An island that is absent is in the run; one that said goodbye is not.
        self._speeds = {
            name: island["tokens_per_second"] or self._speeds.get(name, 0.0)
            for name, island in status["islands"].items()
            if island["state"] != "gone"
        }
        samples = self._samples
        if not samples or now - samples[-1].time >= SAMPLE_S:
            samples.append(self._last)
        while len(samples) > 1 and samples[1].time <= now - WINDOW_S:
            samples.popleft()

    @property
    def seconds(self) -> float:
        """Seconds in the window so far."""
        if self._last is None:
            return 0.0
        return self._last.time - self._samples[0].time

    @property
    def goodput(self) -> float:
        """Goodput of the window; 1 if no island is known to have had a speed in it."""
        if self._last is None:
            return 1.0
        first, last = self._samples[0], self._last
        undisturbed = last.undisturbed - first.undisturbed
        return (last.merged - first.merged) / undisturbed if undisturbed > 0 else 1.0
