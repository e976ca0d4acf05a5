"""Leased positions of the global shuffled index, in the order granted."""

from __future__ import annotations

import collections

import numpy as np

from diloco_jax.policy.events import Span


class LeasedPositions:
    """What one incarnation of an island was granted, and how much of it is used."""

    def __init__(self) -> None:
        self.granted = 0
        """Sequences granted so far."""
        self.drawn = 0
        """Sequences drawn so far."""
        self._spans: collections.deque[Span] = collections.deque()

    def grant(self, offset: int, span: Span) -> None:
        """Adds positions [start, stop) after the first `offset` granted ones.

        What is known already is skipped, so a grant may be repeated.

        Raises:
          ValueError: a gap: grants before this one are missing.
        """
        if offset > self.granted:
            raise ValueError(
                f"data was granted from sequence {offset} on, but only "
                f"{self.granted} are here; a grant is missing, ask again from "
                f"{self.granted}"
            )
        start = span.start + self.granted - offset
        if start < span.stop:
            self._spans.append(Span(start, span.stop))
            self.granted += span.stop - start

    def draw(self, count: int) -> np.ndarray | None:
        """The next int64 [count] positions, or None if fewer are leased."""
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
        return np.concatenate(parts)
