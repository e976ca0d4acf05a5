"""The coordinator's snapshots: its whole state, written now and then beside the run.

Snapshot n stands for the segments of the record log up to n. Segments up to the oldest
snapshot that is kept are superfluous.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from etils.epath import Path as Folder

from diloco_jax import checkpoint, storage
from diloco_jax.config import ConfigError, Placement
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.state import PolicyConfig, State

logger = logging.getLogger(__name__)

PATIENCE_ASKED_S = 0.2
"""Seconds between two looks at the patience that is left."""
LATE_AFTER = 10
"""Intervals of snapshots after which a snapshot under way is late."""


class Snapshots:
    """Snapshots of one run, in one folder."""

    def __init__(
        self,
        folder: Folder,
        placement: Placement,
        config: PolicyConfig,
        whose: dict[str, Any],
    ) -> None:
        """Open the folder, and make it if it is missing. whose: see `checkpoint`."""
        self._manager = checkpoint.open_folder(folder, placement.snapshots_kept)
        self._keep, self._every_s = placement.snapshots_kept, placement.snapshot_every_s
        self._folder = folder
        self._config, self._whose = config, whose
        self._due = time.monotonic() + self._every_s
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._failure = ""

    def newest(self) -> int | None:
        """Return the number of the newest snapshot, if there is any."""
        return checkpoint.newest(self._manager)

    def oldest(self) -> int:
        """Return the number of the oldest snapshot to be kept; there must be one."""
        # Older snapshots may exist: not every bucket permits removal.
        return checkpoint.kept(self._manager)[-self._keep :][0]

    def require_own(self, number: int) -> None:
        """Raise ConfigError if that snapshot is of another run."""
        facts = checkpoint.read_facts(self._manager, number)
        checkpoint.refuse_other(self._folder, number, facts, self._whose)

    def load_newest(
        self, like: Sequence[Mapping[str, Any]], goes_on_from: Callable[[int], bool]
    ) -> tuple[int, list[dict[str, Any]], State]:
        """Load the newest snapshot that reads; return its number, arrays and state.
        There must be one; a power cut may leave the very newest torn.

        goes_on_from: tells if the log has everything that came after a snapshot.

        Raises:
          ConfigError: the snapshot is of another run; or it does not read, and the log
            does not go on from an older one.
        """
        *older, number = checkpoint.kept(self._manager)
        while True:
            try:
                return number, *self.load(number, like)
            except checkpoint.UnreadableError as error:
                if not older or not goes_on_from(older[-1]):
                    raise
                number = older.pop()
                logger.warning(
                    "%s; going on from snapshot %d, after which the log is complete",
                    error.what,
                    number,
                )

    def load(
        self, number: int, like: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], State]:
        """Load arrays and state of a snapshot; raise ConfigError if it is of another
        run."""
        facts = checkpoint.read_facts(self._manager, number)
        checkpoint.refuse_other(self._folder, number, facts, self._whose)
        arrays = {
            name: checkpoint.restore(self._manager, number, name, tree)
            for name, tree in by_name(like).items()
        }
        return by_fragment(arrays), msgspec.convert(facts["state"], State)

    def save(
        self, number: int, state: State, arrays: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write snapshot `number`; it is durable when this returns. One call at a
        time. arrays: by fragment."""
        trained = checkpoint.trained(
            sum(fragment.merges for fragment in state.fragments),
            ledger.trained_tokens(self._config, state),
        )
        facts = {**self._whose, **trained, "state": msgspec.to_builtins(state)}
        checkpoint.save(self._manager, number, by_name(arrays), facts)

    def save_first(
        self, number: int, state: State, arrays: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the snapshot without which a run does not begin. Raises OSError if the
        disk is full, ConfigError or StorageAway if a bucket takes no snapshot."""
        try:
            self.save(number, state, arrays)
        except OSError:
            raise
        except Exception as error:
            # orbax and tensorstore raise many kinds of errors.
            storage.raise_if_away(self._folder, error)
            raise ConfigError(storage.cannot_write(self._folder, error)) from error

    def due(self, now: float) -> bool:
        """Tell if it is time for the next snapshot and none is being written."""
        return now >= self._due and not self._writing()

    def write(self, now: float, save: Callable[[], None]) -> None:
        """Call `save` on a thread. A failure costs nothing: the log stays."""

        def attempt() -> None:
            try:
                save()
            except Exception as error:
                self._failure = storage.cannot_write(self._folder, error)
                logger.error(
                    "no snapshot was written, the log keeps what it holds: %s",
                    self._failure,
                )
            else:
                self._failure = ""

        self._due, self._began = now + self._every_s, now
        # A coordinator that has ended must not stay for a disk that hangs.
        self._thread = threading.Thread(
            target=attempt, name="diloco-snapshot", daemon=True
        )
        self._thread.start()

    def alerts(self, now: float) -> list[str]:
        """Return alerts for people: without snapshots, the record log grows."""
        grows = "until one is, the record log grows"
        if self._writing() and now - self._began > LATE_AFTER * self._every_s:
            return [
                f"a snapshot in {self._folder} is not written after "
                f"{now - self._began:.0f} s; {grows}"
            ]
        return [f"no snapshot was written: {self._failure}; {grows}"] * bool(
            self._failure
        )

    def wait(self, patience_s: Callable[[], float]) -> bool:
        """Wait for the snapshot being written; return True once none is. `patience_s`
        gives the seconds to wait since the call, and may change meanwhile."""
        began = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            left_s = began + patience_s() - time.monotonic()
            if left_s <= 0:
                return False
            self._thread.join(min(left_s, PATIENCE_ASKED_S))
        return True

    def close(self) -> None:
        """Free the folder, unless a snapshot hangs, which is not waited for."""
        if not self._writing():
            self._manager.close()

    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def by_name(arrays: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return arrays by name, each a list by fragment, of those by fragment and name."""
    names = {name for own in arrays for name in own}
    return {name: [own.get(name, []) for own in arrays] for name in sorted(names)}


def by_fragment(arrays: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Invert `by_name`."""
    return [
        dict(zip(arrays, own, strict=True))
        for own in zip(*arrays.values(), strict=True)
    ]
