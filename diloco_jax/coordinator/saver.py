"""Write the snapshots whose turn it is, and delete what they make superfluous.

Version and arrays of a fragment, number and state are taken on the thread of decisions,
all of one moment. They are written on another thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.publishes import Publishes
from diloco_jax.coordinator.snapshots import Snapshots
from diloco_jax.coordinator.store import Store
from diloco_jax.protocol.coordinator.state import State

logger = logging.getLogger(__name__)


class Saver:
    """Snapshots of one life of a coordinator, with its log and publishes."""

    def __init__(
        self,
        store: Store,
        snapshots: Snapshots,
        publishes: Publishes,
        log: RecordLog,
    ) -> None:
        self._store, self._snapshots = store, snapshots
        self._publishes, self._log = publishes, log

    def write_next(self, now: float, state: State) -> None:
        """Begin to write what is due: the fragment whose turn it is, and the state once
        in a round."""
        saves = []
        if self._snapshots.state_due(now):
            saves.append(self._state(state))
            self._snapshots.took_state(now)
        for fragment in self._unsaved(state)[:1]:
            saves.append(self._fragment(fragment, state))
            self._snapshots.took_turn(fragment)
        if saves:
            self._snapshots.write(now, saves)

    def save_all(self, state: State, within_s: float | None) -> None:
        """Write the state, then every fragment whose version is in no snapshot yet; all
        of it is durable when this returns. within_s: seconds after which no other
        fragment is begun: its publishes are on disk, and a restart goes on from them.
        """
        began = time.monotonic()
        self._state(state)()
        unsaved = self._unsaved(state)
        for written, fragment in enumerate(unsaved):
            if within_s is not None and time.monotonic() - began >= within_s:
                logger.info(
                    "%d of %d fragments are in no snapshot of their newest version: "
                    "they go on from what was published of them",
                    len(unsaved) - written,
                    len(state.fragments),
                )
                return
            self._fragment(fragment, state)()

    def _unsaved(self, state: State) -> list[int]:
        return self._snapshots.unsaved([f.version for f in state.fragments])

    def _fragment(self, fragment: int, state: State) -> Callable[[], None]:
        """Return a function that writes a fragment as it is now, then deletes the
        publishes that are superfluous."""
        version = state.fragments[fragment].version
        arrays = self._store.arrays(fragment)

        def save() -> None:
            self._snapshots.save_fragment(fragment, version, arrays)
            self._publishes.forget(fragment, self._snapshots.oldest_of(fragment))

        return save

    def _state(self, state: State) -> Callable[[], None]:
        """Return a function that writes the state as it is now, then deletes the
        segments of the log that are superfluous."""
        number = self._log.rotate()

        def save() -> None:
            self._snapshots.save_state(number, state)
            self._log.forget(self._snapshots.oldest())

        return save
