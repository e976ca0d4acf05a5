"""The disk of a coordinator that another one may follow."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

from diloco_jax.coordinator import log as durable
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.faults.disk import Disk, DiskError

Change = Callable[["FollowedDisk"], object]
"""Does to a standby's disk what was done to the primary's."""


class FollowedDisk(Disk):
    """A disk whose changes are sent to a standby.

    send, send_later: take a change; the second one for snapshots, which go last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.empty = True
        self.last = -1
        """Number of the run's record up to which it has all, in log and tape."""
        self.terms = 0
        """Terms that were opened up to its log."""
        self.lost = False
        """True from a loss to the next copy or term."""
        self.damaged = False
        """True for one that is not as it was written: no coordinator loads it."""
        self.send: Callable[[Change], None] | None = None
        self.send_later: Callable[[Change], None] | None = None
        self._removed: Change | None = None
        """Brings back what was removed last."""

    def copy(self) -> Change:
        """Return what makes another disk the same as this one is now."""
        kept = copy.deepcopy((self._segments, self._anchors))
        states = dict(self._states)  # None of them ever changes.
        publishes, last = copy.deepcopy(self._publishes), self.last
        copies, terms = copy.deepcopy(self._copies), self.terms

        def put(other: FollowedDisk) -> None:
            other._segments, other._anchors = kept
            other._states = states
            other._publishes, other.last, other._copies = publishes, last, copies
            other.terms = terms
            other.empty = other.lost = other.damaged = False

        return put

    def clear(self) -> None:
        """Remove all that a run has left."""
        if not self.empty:
            self._removed = self.copy()
        self.empty, self.damaged, self.last = True, False, -1

    def lose_all(self) -> None:
        """Lose everything."""
        self.clear()
        self.lost = True

    def find_again(self) -> None:
        """Have what was removed last, as where a person finds the old disk."""
        if self.empty and self._removed is not None:
            self._removed(self)

    def begin(self, state: State, anchors: tuple[Anchor, ...]) -> None:
        """See Disk."""
        super().begin(state, anchors)
        self.lost = self.damaged = False

    def append(self, record: Mapping[str, Any]) -> None:
        """See Disk."""
        if self.brimful:
            return
        try:
            super().append(record)
        except DiskError as failure:
            self.last += failure.complete
            raise
        self.last += 1
        data = durable.frame(record)

        def append(other: FollowedDisk) -> None:
            newest = other._segments[max(other._segments)]
            newest.seek(0, io.SEEK_END)
            newest.write(data)
            other.last += 1

        self._tell(append)

    def files(self) -> dict[int, Anchor]:
        """Return the anchors that are here, by fragment; the newest of each."""
        return {
            fragment: anchor
            for fragment, saved in enumerate(self._anchors)
            if saved and (anchor := saved[max(saved)]) is not None
        }

    def hand_over(self) -> None:
        """Delete all files of fragments, which are with workers elsewhere."""
        for saved in self._anchors:
            saved.clear()

    def note(self) -> None:
        """Append a record to the tape, which nobody reads here."""
        self.last += 1
        self._tell(_noted)

    def prepare(self, fragment: int, version: Version, publish: bytes) -> bool:
        """See Disk."""
        written = super().prepare(fragment, version, publish)
        if written:
            self._tell(lambda other: other._put(fragment, version, publish))
        return written

    def rotate(self) -> int:
        """See Disk."""
        ended = super().rotate()
        self._tell(lambda other: other._segments.setdefault(ended + 1, io.BytesIO()))
        return ended

    def save_state(self, number: int, state: State) -> bool:
        """See Disk."""
        saved = super().save_state(number, state)
        if saved:
            self._tell_later(lambda other: Disk.save_state(other, number, state))
        return saved

    def save_fragment(self, fragment: int, anchor: Anchor) -> bool:
        """See Disk."""
        saved = super().save_fragment(fragment, anchor)
        if saved:
            self._tell_later(lambda other: Disk.save_fragment(other, fragment, anchor))
        return saved

    def begin_fragment(self, fragment: int, anchor: Anchor) -> bool:
        """See Disk. At the standby it replaces nothing: until the record of that term
        is there, the term before counts."""
        begun = super().begin_fragment(fragment, anchor)
        if begun:
            self._tell(lambda other: other._add(fragment, anchor))
        return begun

    def _add(self, fragment: int, anchor: Anchor) -> None:
        self._anchors[fragment][anchor.version] = anchor

    def _put(self, fragment: int, version: Version, publish: bytes) -> None:
        self._publishes[fragment][version] = publish

    def _tell(self, change: Change) -> None:
        if self.send is not None:
            self.send(change)

    def _tell_later(self, change: Change) -> None:
        if self.send_later is not None:
            self.send_later(change)


def _noted(other: FollowedDisk) -> None:
    other.last += 1
