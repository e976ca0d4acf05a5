"""Leased positions of the global shuffled index, in the order granted."""

from __future__ import annotations

import collections

import numpy as np

from diloco_jax.protocol.values import Span


class LeasedPositions:
    """The positions granted to one incarnation of an island, and the number used."""

    def __init__(self) -> None:
        self.granted = 0
        """Sequences granted so far."""
        self.drawn = 0
        """Sequences drawn so far."""
        self._spans: collections.deque[Span] = collections.deque()

    def grant(self, span: Span) -> None:
        """Add positions [start, stop) after those granted before."""
        self._spans.append(span)
        self.granted += span.stop - span.start

    def draw(self, count: int) -> np.ndarray | None:
        """Return the next int64 [count] positions, or None if fewer are leased."""
        if self.granted - self.drawn < count:
            return None
        self.drawn += count
        parts, missing = [], count
        while missing:
            span = self._spans.popleft()
            part = min(missing, span.stop - span.start)
            parts.append(np.arange(span.start, span.start + part, dtype=np.int64))
            missing -= part
            if span.start + part < span.stop:
                self._spans.appendleft(Span(span.start + part, span.stop))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
