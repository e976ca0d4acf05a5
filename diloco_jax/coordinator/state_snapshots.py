"""Snapshots of the protocol's state: those of the lead, beside its record log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from etils.epath import Path as Folder

from diloco_jax import checkpoint, storage
from diloco_jax.config import Placement
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.snapshots import (
    Snapshots,
    SnapshotWriter,
    state_path,
    states,
)
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, restored

logger = logging.getLogger(__name__)


class StateSnapshots(Snapshots):
    """Snapshots of the state of one run."""

    def __init__(
        self,
        folder: Folder,
        placement: Placement,
        config: PolicyConfig,
        whose: dict[str, Any],
    ) -> None:
        """See `Snapshots`."""
        super().__init__(folder, placement, whose)
        self._remove_torn(folder)
        self._config, self._states = config, states(folder)
        self.writer = SnapshotWriter(
            folder, placement.snapshot_every_s, 1, "record log"
        )

    def newest(self) -> int | None:
        """Return the number of the newest snapshot, if there is any."""
        return self._states[-1] if self._states else None

    def oldest(self) -> int:
        """Return the number of the oldest snapshot to be kept."""
        # Older ones may exist: not every bucket permits removal.
        return self._states[-self._keep :][0]

    def require_own(self, number: int) -> None:
        """Raise ConfigError if that snapshot is of another run."""
        self._refuse_other(number, self._read(state_path(self._folder, number), []))

    def load(self, goes_on_from: Callable[[int], bool]) -> tuple[int, State]:
        """Load the newest snapshot that can be read; return its number too.

        goes_on_from: tells if the log has everything that came after a snapshot.

        Raises:
          ConfigError: the snapshot is of another run; or it cannot be read, and the log
            does not go on from an older one.
        """
        torn: list[int] = []
        while True:
            number = self._states[-1]
            try:
                header = self._read(state_path(self._folder, number), [])
                break
            except storage.SealedError as error:
                if len(self._states) == 1 or not goes_on_from(self._states[-2]):
                    raise storage.SealedError(
                        f"{error}; restore it from a copy, the record log does not go "
                        f"back to an older one that reads"
                    ) from error
                torn.append(self._states.pop())
                logger.warning(
                    "%s; going on from snapshot %d, after which the log is complete",
                    error,
                    self._states[-1],
                )
        self._refuse_other(number, header)
        for unreadable in torn:
            self._remove(state_path(self._folder, unreadable))
        return number, restored(header["state"])

    def save(self, number: int, state: State) -> None:
        """Write snapshot `number`; it is durable when this returns."""
        trained = checkpoint.trained(
            sum(fragment.merges for fragment in state.fragments),
            ledger.trained_tokens(self._config, state),
        )
        facts = {**self._whose, **trained, "state": msgspec.to_builtins(state)}
        storage.write_sealed(state_path(self._folder, number), facts, [])
        path = functools.partial(state_path, self._folder)
        self._states = self._without_old([*self._states, number], path)

    def write_due(self, now: float, state: State, log: RecordLog) -> None:
        """Begin to write the state as it is now, if it is time for it."""
        if self.writer.due(now):
            self.writer.write(now, self._writes(state, log))

    def write_last(self, state: State, log: RecordLog) -> None:
        """Write the state; it is durable when this returns."""
        self._writes(state, log)()

    def _writes(self, state: State, log: RecordLog) -> Callable[[], None]:
        """Return a function that writes the state as it is now, then deletes the
        segments of the log that are superfluous."""
        number = log.rotate()

        def save() -> None:
            self.save(number, state)
            log.forget(self.oldest())

        return save
