"""Batches of rows in the form that a model takes: of leased positions, or to validate.

A batch is read into contiguous arrays: `B` rows, of each of which `T` tokens are
predicted. `LeasedStream` prepares batches ahead of the train loop. The network's thread
grants ranges of positions, and the loop's thread takes batches. Readers prepare the
next batches meanwhile, of which a host needs its own rows alone. Positions are used in
the order granted. `ValidationBatches` have every prediction of the validation source
exactly once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from diloco_jax import machine
from diloco_jax.config import ConfigError
from diloco_jax.data.pictures import COUNT, PICTURES, PictureError, decodes, fill
from diloco_jax.data.source import DERIVED, WEIGHTS, Fields, Rows, Source, require_row
from diloco_jax.protocol.messages import Span

Arrays = dict[str, np.ndarray]
"""Arrays of a batch by name, [B, ...]."""


class BatchReader:
    """Rows by number, with the arrays that a model's batch has. Several threads may
    read at a time."""

    def __init__(self, rows: Rows, fields: Fields, sequence_length: int) -> None:
        """fields: of a batch (`source.fields_of_batch`). sequence_length: T. Raises
        ConfigError if the rows have other arrays of these names, or lack one."""
        self._decodes = decodes(rows.fields, fields)
        for name, field in fields.items():
            found = rows.fields.get(name)
            if name == PICTURES and self._decodes:
                continue
            if found is None and name in DERIVED and field.is_like(DERIVED[name]):
                continue
            if found is None or not found.is_like(field):
                raise ConfigError(
                    f"rows have {found or 'nothing'} as {name!r}, and the model takes "
                    f"{field}; change Model.batch or the data (docs/models.md)"
                )
        self.fields, self._rows = fields, rows
        self._derived = set(fields) - set(rows.fields)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: field.shape_of(sequence_length) for name, field in fields.items()
        }
        """Shapes of a row's arrays by name."""
        self.row_bytes = sum(
            np.dtype(field.dtype).itemsize * int(np.prod(self.shapes[name]))
            for name, field in fields.items()
        )

    def empty(self, count: int) -> Arrays:
        """Return arrays for that many rows, whose values are to be `read`."""
        return {
            name: np.empty((count, *self.shapes[name]), field.dtype)
            for name, field in self.fields.items()
        }

    def read(self, number: int, into: Arrays, place: int) -> None:
        """Write a row to its place in a batch.

        Raises ConfigError if an array has not the shape that its source says.
        """
        row = require_row(self._rows[number], number)
        for name, array in into.items():
            value = row.get(name)
            if name in self._derived:
                array[place] = 1
            elif name == PICTURES and self._decodes:
                try:
                    fill(array[place], list(row[PICTURES][: int(row[COUNT])]))
                except PictureError as error:
                    raise ConfigError(
                        f"row {number} has a picture that is none: {error}; copy the "
                        f"data again"
                    ) from error
            elif value is None or value.shape != array.shape[1:]:
                found = "no" if value is None else f"{value.shape} as shape of"
                raise ConfigError(
                    f"row {number} has {found} {name!r}, and its source says "
                    f"{array.shape[1:]}"
                )
            else:
                array[place] = value

    def batch(self, numbers: np.ndarray) -> Arrays:
        """Return the rows of int64 [B] numbers."""
        arrays = self.empty(len(numbers))
        for place, number in enumerate(numbers):
            self.read(int(number), arrays, place)
        return arrays


AHEAD_BYTES = 1 << 26
"""Bytes of batches that are read ahead, within these bounds."""
FEWEST_AHEAD, MOST_AHEAD = 2, 16
MOST_READERS = 16
"""Threads; two read 512 windows of 16 KB in 13 ms (docs/data.md)."""
ROWS_AT_ONCE = 8
"""Fewest rows that are worth a reader of their own; with pictures each one is."""

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


_Reading = tuple[list[concurrent.futures.Future[None]], Arrays]
"""A batch that is being read, and its arrays."""
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
        self._ready = collections.deque[_Reading]()
        self._readers = concurrent.futures.ThreadPoolExecutor(
            min(machine.cores(), MOST_READERS), "data"
        )
        self._closed = False
        self._own: tuple[Range, ...] = ()
        self._ahead = self._affordable(sequences_per_step)
        self._at_once = 1 if PICTURES in reader.fields else ROWS_AT_ONCE

    def read_only(self, own: Sequence[Range]) -> None:
        """Read only these rows of every batch from now on; all rows if `own` is empty.

        Call it before the first grant.
        """
        self._own = tuple(dict.fromkeys(own))
        if own:
            self._ahead = self._affordable(sum(b - a for a, b in self._own))

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
            parts, arrays = self._ready.popleft()
            self._prepare()
        _, late = concurrent.futures.wait(parts, timeout_s)
        if late:
            raise TimeoutError(
                f"a batch of {self._per_step} sequences was not read within "
                f"{timeout_s:g} s; is the corpus on a slow disk?"
            )
        for part in parts:
            part.result()
        return by_range(arrays, self._own, self._per_step)

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
            arrays = self._reader.empty(len(positions))
            starts = range(0, len(positions), self._at_once)
            read = functools.partial(self._read, positions, arrays)
            parts = [self._readers.submit(read, start) for start in starts]
            self._ready.append((parts, arrays))

    def _read(self, positions: np.ndarray, arrays: Arrays, start: int) -> None:
        """Read a part of a batch."""
        for place in range(start, min(start + self._at_once, len(positions))):
            self._reader.read(int(positions[place]), arrays, place)


class ValidationBatches:
    """A sequence of equally shaped batches in the order of the source. They always have
    "weights", which are 0 in rows that fill up the last batch."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        fields: Fields,
        sequence_length: int,
        *,
        bytes_per_token: float | None = 1.0,
    ):
        """fields: of a training batch. bytes_per_token: of the text, for each token
        predicted; None where that is unknown."""
        fields = {**fields, "weights": WEIGHTS}
        self.batch_size = batch_size
        self.bytes_per_token = bytes_per_token
        self._reader = BatchReader(source, fields, sequence_length)
        self._count = len(source)
        self._own: tuple[Range, ...] = ()

    def read_only(self, own: Sequence[Range]) -> None:
        """Read only these rows of every batch from now on; all rows if `own` is
        empty.
        """
        self._own = tuple(dict.fromkeys(own))

    def __len__(self) -> int:
        return -(-self._count // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        return self._batch(lambda rows: rows + index * self.batch_size)

    def repeated(self, rows: int) -> Batch:
        """Return a batch of the first `rows` rows, which repeat to its end."""
        return self._batch(lambda places: places % min(rows, self._count))

    def _batch(self, numbers_of: Callable[[np.ndarray], np.ndarray]) -> Batch:
        """Return a batch. numbers_of: of the rows in these places."""
        own = self._own or ((0, self.batch_size),)
        numbers = numbers_of(np.concatenate([np.arange(a, b) for a, b in own]))
        arrays = self._reader.empty(len(numbers))
        for place, number in enumerate(numbers):
            if number < self._count:
                self._reader.read(int(number), arrays, place)
            else:
                for array in arrays.values():
                    array[place] = 0
        return by_range(arrays, self._own, self.batch_size)

    def spread(self, count: int) -> list[int]:
        """Return the indices of at most `count` batches, evenly over the source."""
        count = min(count, len(self))
        return [i * len(self) // count for i in range(count)]
