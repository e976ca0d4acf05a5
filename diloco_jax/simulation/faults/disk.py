"""The coordinator's disk: log, publishes and snapshots in memory, which may fail.

The bytes of the log are those of `coordinator.journal`. The work with files is done
here with dictionaries: segments rotate with every snapshot of the state; segments and
publishes are deleted once the oldest snapshot does not need them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from diloco_jax.coordinator import journal as durable
from diloco_jax.protocol.coordinator.state import State, from_builtins
from diloco_jax.protocol.messages import Version
from diloco_jax.simulation.faults.arrays import Anchor, Anchors, first_anchors

SNAPSHOTS_KEPT = 2


class DiskError(Exception):
    """An append did not return: the process must end.

    complete: True if the record is on the disk all the same.
    """

    def __init__(self, *, complete: bool) -> None:
        super().__init__("the disk failed")
        self.complete = complete


class EmptyDiskError(Exception):
    """The disk holds no run: without --init, nothing may begin."""


class Found(NamedTuple):
    """Snapshot of the state, and the records after it."""

    state: State
    records: list[durable.Line]


class Disk:
    """Log, publishes and snapshots of one run."""

    def __init__(self) -> None:
        self.empty = False
        """True for an empty disk, such as a mount that did not come up."""
        self.full = False
        """True while there is no room for publishes and snapshots."""
        self.brimful = False
        """True while there is no room for small records either."""
        self._format(0)

    @property
    def has_run(self) -> bool:
        """True if a run has begun on it."""
        return bool(self._states)

    def has_space(self) -> bool:
        """Tell if there is room for a small record."""
        return not self.brimful

    def append(
        self, record: Mapping[str, Any], written_share: float | None = None
    ) -> None:
        """Append like `RecordLog.append`: nothing without `has_space`. Raises DiskError
        after a share of the record, unless that is None.
        """
        if self.brimful:
            return
        data = durable.frame(record)
        newest = self._segments[max(self._segments)]
        if written_share is None:
            newest.write(data)
            return
        written = int(written_share * len(data))
        newest.write(data[:written])
        raise DiskError(complete=written == len(data))

    def prepare(self, fragment: int, version: Version, publish: bytes) -> bool:
        """Write like `Publishes.write`; False if the disk is full."""
        if not self.full:
            self._publishes[fragment][version] = publish
        return not self.full

    def begin(self, state: State, anchors: tuple[Anchor, ...]) -> None:
        """Begin a run or a term on an empty disk; the old contents never come back."""
        self.empty = self.full = self.brimful = False
        self._format(len(anchors))
        for fragment, anchor in enumerate(anchors):
            self._anchors[fragment][anchor.version] = anchor
        self.save_state(self.rotate(), state)

    def rotate(self) -> int:
        """Rotate like `RecordLog.rotate`; return the number of the ended segment."""
        ended = max(self._segments)
        self._segments[ended + 1] = io.BytesIO()
        return ended

    # ---- snapshots ------------------------------------------------------------------

    def save_state(self, number: int, state: State) -> bool:
        """Save a complete snapshot of the state; delete log segments that the oldest
        one does not need. Return False if the disk is full.
        """
        if not self.full:
            oldest = _keep(self._states, number, state)
            for segment in [n for n in self._segments if n <= oldest]:
                del self._segments[segment]
        return not self.full

    def save_fragment(self, fragment: int, anchor: Anchor) -> bool:
        """Save a complete snapshot of a fragment; delete publishes that the oldest one
        does not need. Return False if the disk is full.
        """
        if not self.full:
            oldest = _keep(self._anchors[fragment], anchor.version, anchor)
            self.forget(fragment, oldest)
        return not self.full

    def begin_fragment(self, fragment: int, anchor: Anchor) -> bool:
        """Write the first snapshot of a fragment in a term like
        `Saver.begin_fragment`; False if the disk is full.
        """
        if not self.full:
            self._anchors[fragment] = {anchor.version: anchor}
            self._publishes[fragment] = {}
        return not self.full

    def forget(self, fragment: int, through: Version) -> None:
        """Delete publishes up to a version."""
        _delete(self._publishes[fragment], lambda version: version <= through)

    def saved(self, fragment: int) -> list[Version]:
        """Return the versions of the snapshots of a fragment, oldest first; torn ones
        count."""
        return sorted(self._anchors[fragment])

    def published(self, fragment: int) -> dict[Version, bytes]:
        """Return the publishes of a fragment, by version."""
        return self._publishes[fragment]

    def tear_snapshots(self) -> int:
        """Tear the newest snapshots of the state and of every fragment, as far as an
        older one reads; return their number.
        """
        torn = 0
        for kept in self._snapshots():
            readable = sorted(n for n, snapshot in kept.items() if snapshot)
            if len(readable) > 1:
                kept[readable[-1]] = None
                torn += 1
        return torn

    # ---- a start --------------------------------------------------------------------

    def load(self) -> Found:
        """Return the newest readable snapshot of the state and the records after it.

        Raises EmptyDiskError; DurableError if the log is damaged.
        """
        if self.empty:
            raise EmptyDiskError
        for kept in self._snapshots():
            # What does not read does not count as kept.
            for torn in [n for n, snapshot in kept.items() if snapshot is None]:
                del kept[torn]
        number, state = max(self._states.items())
        assert state is not None
        later = [n for n in sorted(self._segments) if n > number]
        lines = [
            line
            for n in later
            for line in durable.read_frames(
                self._segments[n], f"segment {n}", last=n == later[-1]
            )
        ]
        self._segments[later[-1]].seek(0, io.SEEK_END)
        # A process that starts has nothing but the file.
        written = msgspec.json.encode(state)
        return Found(from_builtins(msgspec.json.decode(written)), lines)

    def restore(self, committed: list[Version]) -> tuple[Anchors, set[int]]:
        """Return the anchors at these versions, by fragment: each from its newest
        readable snapshot and the publishes after it; and the fragments that are lost.
        Publishes that were prepared and never committed are deleted.

        Raises DurableError if a committed publish is missing.
        """
        anchors = Anchors(first_anchors(len(committed)))
        lost = {
            fragment
            for fragment, through in enumerate(committed)
            if not self._restore_fragment(anchors, fragment, through)
        }
        return anchors, lost

    def _restore_fragment(
        self, anchors: Anchors, fragment: int, through: Version
    ) -> bool:
        """Bring one of the anchors to this version; return False if it is lost."""
        saved, publishes = self._anchors[fragment], self._publishes[fragment]
        _delete(publishes, lambda version: version > through)
        known = [a for a in saved.values() if a is not None and a.version <= through]
        if not known or max(known).version.term != through.term:
            return False
        begin = max(known)
        # See `FragmentSnapshots.load`.
        _delete(saved, lambda version: version > begin.version)
        anchors.load(fragment, begin)
        version = begin.version
        while version < through:
            version = version.next()
            if version not in publishes:
                raise durable.DurableError(
                    f"the publish of fragment {fragment}, {version}, is missing"
                )
            anchors.replay(fragment, version, publishes[version])
        return True

    # ---- a lost disk ----------------------------------------------------------------

    def lose(self, fragments: Iterable[int]) -> None:
        """Lose the snapshots and publishes of these fragments."""
        for fragment in fragments:
            snapshots, publishes = self._copies.setdefault(fragment, ({}, {}))
            snapshots.update(self._anchors[fragment])
            publishes.update(self._publishes[fragment])
            self._anchors[fragment], self._publishes[fragment] = {}, {}

    def bring_back(self, fragment: int, through: Version) -> None:
        """Bring back what was lost of a fragment up to a version of its term."""
        snapshots, publishes = (
            {v: x for v, x in copy.items() if v.term == through.term and v <= through}
            for copy in self._copies[fragment]
        )
        self._anchors[fragment], self._publishes[fragment] = snapshots, publishes

    def _format(self, fragments: int) -> None:
        self._segments: dict[int, io.BytesIO] = {0: io.BytesIO()}
        self._states: dict[int, State | None] = {}
        """Snapshots of the state by number; None for one that cannot be read."""
        self._anchors: list[dict[Version, Anchor | None]] = [
            {} for _ in range(fragments)
        ]
        """Snapshots by fragment and version; None for one that cannot be read."""
        self._publishes: list[dict[Version, bytes]] = [{} for _ in range(fragments)]
        self._copies: dict[int, tuple[Any, Any]] = {}
        """Contents of lost fragments, for runs in which no island has an anchor."""

    def _snapshots(self) -> list[dict[Any, Any]]:
        return [self._states, *self._anchors]


def _keep(kept: dict[Any, Any], key: Any, snapshot: Any) -> Any:
    """Keep one more snapshot, but not too many; return the key of the oldest."""
    kept[key] = snapshot
    for old in sorted(kept)[:-SNAPSHOTS_KEPT]:
        del kept[old]
    return min(kept)


def _delete(kept: dict[Any, Any], unneeded: Callable[[Any], bool]) -> None:
    for key in [key for key in kept if unneeded(key)]:
        del kept[key]
