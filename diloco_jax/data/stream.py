"""Batches from leased positions, prepared ahead of the train loop.

The network's thread grants ranges of positions, and the loop's thread takes batches.
Readers prepare the next batches meanwhile, of which a host needs its own rows alone.
Positions are used in the order granted.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from diloco_jax import machine
from diloco_jax.data.reader import Arrays, BatchReader
from diloco_jax.protocol.values import Span

AHEAD_BYTES = 1 << 26
"""Bytes of batches that are read ahead, within these bounds."""
FEWEST_AHEAD, MOST_AHEAD = 2, 16
MOST_READERS = 16
"""Threads; two read 512 windows of 16 KB in 13 ms (docs/data.md)."""
ROWS_AT_ONCE = 8
"""Fewest rows that are worth a reader of their own."""

Range = tuple[int, int]
"""First row and the one after the last."""


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """The rows of one array of a batch that the devices of one host need.

    shape: shape of the whole array.
    """

    shape: tuple[int, ...]
    parts: Mapping[Range, np.ndarray]
    """Values by rows, [rows, *shape[1:]]."""

    def part(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """Return the rows of one device, as `jax.make_array_from_callback` asks."""
        assert index is not None
        start, stop, _ = index[0].indices(self.shape[0])
        return self.parts[start, stop]


Batch = Mapping[str, np.ndarray | OwnRows]
"""Arrays of a batch by name, [B, ...], or the host's own rows of them."""


def by_range(arrays: Arrays, own: Sequence[Range], batch_size: int) -> Batch:
    """Return arrays of a host's own rows, one range after the other, as a batch.

    own: the ranges; empty: the rows are all of the batch.
    """
    if not own:
        return arrays
    ends = np.cumsum([stop - start for start, stop in own])[:-1]
    return {
        name: OwnRows(
            (batch_size, *array.shape[1:]),
            dict(zip(own, np.split(array, ends), strict=True)),
        )
        for name, array in arrays.items()
    }


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


class LeasedStream:
    """The batches of one incarnation of an island.

    Any thread may grant, look and close; one thread takes batches.
    """

    def __init__(self, reader: BatchReader, sequences_per_step: int):
        """reader: rows by position."""
        self._reader = reader
        self._per_step = sequences_per_step
        self._lock = threading.Lock()
        self._positions = LeasedPositions()
        self._ready: collections.deque[_Reading] = collections.deque()
        self._readers = concurrent.futures.ThreadPoolExecutor(
            min(machine.cores(), MOST_READERS), "data"
        )
        self._closed = False
        self._consumed = 0
        self._own: tuple[Range, ...] = ()
        self._ahead = self._affordable(sequences_per_step)

    def read_only(self, own: Sequence[Range]) -> None:
        """Read only these rows of every batch from now on; all rows if `own` is empty.

        Call it before the first grant.
        """
        self._own = tuple(dict.fromkeys(own))
        if own:
            self._ahead = self._affordable(sum(b - a for a, b in self._own))

    @property
    def granted(self) -> int:
        """Number of sequences leased to this incarnation so far."""
        with self._lock:
            return self._positions.granted

    @property
    def consumed(self) -> int:
        """Number of sequences handed out by `next_batch` so far."""
        with self._lock:
            return self._consumed

    def grant(self, span: Span) -> None:
        """Add positions [start, stop) after those granted before."""
        with self._lock:
            self._positions.grant(span)
            self._prepare()

    @property
    def ready(self) -> bool:
        """Return True if the leases fill another batch."""
        with self._lock:
            return bool(self._ready)

    def next_batch(self, timeout_s: float) -> Batch:
        """Return the next batch; wait until it is read.

        Raises:
          ValueError: the leases do not fill it (see `ready`).
          TimeoutError: it cannot be read within the timeout.
        """
        with self._lock:
            if not self._ready:
                raise ValueError(
                    f"{self._positions.granted - self._positions.drawn} sequences are "
                    f"leased, a step takes {self._per_step}; wait for a grant"
                )
            first = self._ready.popleft()
            self._consumed += self._per_step
            self._prepare()
        _, late = concurrent.futures.wait(first.parts, timeout_s)
        if late:
            raise TimeoutError(
                f"a batch of {self._per_step} sequences was not read within "
                f"{timeout_s:g} s; is the corpus on a slow disk?"
            )
        for part in first.parts:
            part.result()
        return by_range(first.arrays, self._own, self._per_step)

    def close(self) -> None:
        """End the readers."""
        with self._lock:
            self._closed = True
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _affordable(self, rows: int) -> int:
        """Return the batches that are read ahead, each of so many rows here."""
        nbytes = rows * self._reader.row_bytes
        return min(max(AHEAD_BYTES // nbytes, FEWEST_AHEAD), MOST_AHEAD)

    def _prepare(self) -> None:
        """Start reading as many batches as the leases and the lead allow."""
        while not self._closed and len(self._ready) < self._ahead:
            positions = self._positions.draw(self._per_step)
            if positions is None:
                return
            if self._own:
                positions = np.concatenate([positions[a:b] for a, b in self._own])
            self._ready.append(_Reading(self._readers, self._reader, positions))


class _Reading:
    """One batch that is being read, in parts side by side."""

    def __init__(
        self,
        readers: concurrent.futures.Executor,
        reader: BatchReader,
        positions: np.ndarray,
    ) -> None:
        self.arrays = reader.empty(len(positions))

        def read(start: int) -> None:
            for place in range(start, min(start + ROWS_AT_ONCE, len(positions))):
                reader.read(int(positions[place]), self.arrays, place)

        starts = range(0, len(positions), ROWS_AT_ONCE)
        self.parts = [readers.submit(read, start) for start in starts]
