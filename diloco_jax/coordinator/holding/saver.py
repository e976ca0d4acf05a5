"""Write the fragments whose turn it is, and delete the publishes that a snapshot makes
superfluous.

Only versions that the lead has committed are in the store, so each snapshot is of one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.snapshots import Arrays
from diloco_jax.protocol.values import FIRST_VERSION, Version

logger = logging.getLogger(__name__)


class Saver:
    """Snapshots of one life of a holder, with its publishes."""

    def __init__(
        self,
        store: Store,
        snapshots: FragmentSnapshots,
        publishes: Publishes,
    ) -> None:
        self._store, self._snapshots, self._publishes = store, snapshots, publishes
        self.lost: set[int] = set()
        """Fragments without arrays, which are not written."""

    def begin(self) -> None:
        """Write the first snapshots of a run or a term, one per fragment held here; see
        `begin_fragment`."""
        for fragment in self._snapshots.fragments:
            self.begin_fragment(fragment, *self._store.current(fragment))

    def begin_fragment(self, fragment: int, version: Version, arrays: Arrays) -> None:
        """Write the first snapshot of a fragment in a run or a term; delete all its
        older ones, and its publishes.

        Raises OSError if the disk is full, ConfigError if a bucket refuses a snapshot,
        and StorageAway if it does not answer.
        """
        with self._snapshots.beginning():
            self._snapshots.save_first(fragment, version, arrays)
        self._publishes.discard({fragment: FIRST_VERSION})

    def write_due(self, now: float) -> None:
        """Begin to write the fragment whose turn it is, if it is time for one."""
        if not self._snapshots.writer.due(now):
            return
        for fragment in self._unsaved()[:1]:
            save = self._writes(fragment)
            self._snapshots.took_turn(fragment)
            self._snapshots.writer.write(now, save)

    def write_last(self, within_s: float | None) -> None:
        """Write every fragment whose version is in no snapshot yet; it is durable when
        this returns. within_s: seconds after which no other fragment is begun: its
        publishes are on disk, and a restart goes on from them."""
        began, unsaved = time.monotonic(), self._unsaved()
        for written, fragment in enumerate(unsaved):
            if within_s is not None and time.monotonic() - began >= within_s:
                logger.info(
                    "%d of %d fragments are in no snapshot of their newest version: "
                    "they go on from what was published of them",
                    len(unsaved) - written,
                    len(self._snapshots.fragments),
                )
                return
            self._writes(fragment)()

    def _unsaved(self) -> list[int]:
        unsaved = self._snapshots.unsaved(self._store.versions())
        return [fragment for fragment in unsaved if fragment not in self.lost]

    def _writes(self, fragment: int) -> Callable[[], None]:
        """Return a function that writes a fragment as it is now, then deletes the
        publishes that are superfluous."""
        version, arrays = self._store.current(fragment)

        def save() -> None:
            self._snapshots.save(fragment, version, arrays)
            self._publishes.forget(fragment, self._snapshots.oldest_of(fragment))

        return save
