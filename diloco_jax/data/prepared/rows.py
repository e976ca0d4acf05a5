"""The rows of a prepared folder by number. Nothing else of its files is read."""

from __future__ import annotations

import collections
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax.data.prepared.contents import Contents, Split
from diloco_jax.data.prepared.folder import folder_at
from diloco_jax.data.source import SEGMENTS, TOKENS, WEIGHTS, Fields, Row

MOST_OPEN = 256
"""Files that are open at a time."""
FIELDS: Fields = {
    "tokens": TOKENS,
    "segments": SEGMENTS,
    "weights": WEIGHTS,
}
READER = "readahead_buffer_size:0"
"""A row is read alone: what lies behind it belongs to other steps."""


class PreparedRows:
    """The rows of one split; a `source.Source`. Several threads may read at once."""

    fields = FIELDS

    def __init__(self, folder: str | Path, prepared: Contents, split: Split) -> None:
        self._folder, self._records = folder_at(folder), prepared.records
        self._shards = split.shards
        self._ends = np.array(
            list(itertools.accumulate(shard.rows for shard in split.shards)), np.int64
        )
        self._open: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Row:
        """Return a row; raise OSError, naming the file, if it cannot be read."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._ends, row, side="right"))
        shard = self._shards[number]
        within = row - int(self._ends[number]) + shard.rows
        try:
            (record,) = self._reader(number).read([within])
            return self._records.decode(record)
        except (RuntimeError, ValueError, IndexError) as error:
            raise OSError(
                f"row {within} of {self._folder.path(shard.name)} cannot be read "
                f"({error}); copy the folder again"
            ) from error

    def _reader(self, number: int) -> Any:
        """Return the open file of a shard; open it if need be.

        Beyond `MOST_OPEN` files the one unused for longest is dropped; it closes once
        its last read ends.
        """
        with self._lock:
            found = self._open.get(number)
        if found is None:
            from array_record.python.array_record_module import ArrayRecordReader

            # Not under the lock: a bucket takes its time.
            path = self._folder.path(self._shards[number].name)
            found = ArrayRecordReader(path, READER)
        with self._lock:
            found = self._open.setdefault(number, found)
            self._open.move_to_end(number)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            return found
