"""The coordinator's snapshots: all of its state, now and then, beside the run.

Snapshot n stands for the segments of the record log up to n; those up to the oldest one
that is kept are superfluous.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from etils.epath import Path as Folder

from diloco_jax import checkpoint, storage
from diloco_jax.config import ConfigError, Placement
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.state import PolicyConfig, State

logger = logging.getLogger(__name__)

PATIENCE_ASKED_S = 0.2
"""How often it is asked how long to wait still."""
LATE_AFTER = 10
"""Times the interval of snapshots."""


class Snapshots:
    """Those of one run, in one folder."""

    def __init__(
        self,
        folder: Folder,
        placement: Placement,
        config: PolicyConfig,
        whose: dict[str, Any],
    ) -> None:
        """Open the folder, and makes it if it is missing. whose: see `checkpoint`."""
        self._manager = checkpoint.open_folder(folder, placement.snapshots_kept)
        self._keep, self._every_s = placement.snapshots_kept, placement.snapshot_every_s
        self._folder = folder
        self._config, self._whose = config, whose
        self._due = time.monotonic() + self._every_s
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._failure = ""

    def newest(self) -> int | None:
        """The number of the newest one, if there is any."""
        return checkpoint.newest(self._manager)

    def oldest(self) -> int:
        """The number of the oldest one that is to be kept; there must be one."""
        # Older ones may be there: not every bucket lets what it has be removed.
        return checkpoint.kept(self._manager)[-self._keep :][0]

    def require_own(self, number: int) -> None:
        """ConfigError if that snapshot is of another run."""
        facts = checkpoint.read_facts(self._manager, number)
        checkpoint.refuse_other(self._folder, number, facts, self._whose)

    def load_newest(
        self, like: dict[str, Any], goes_on_from: Callable[[int], bool]
    ) -> tuple[int, dict[str, Any], State]:
        """The newest snapshot that reads: its number, arrays and state. There must be
        one; a power cut may leave the very newest torn.

        goes_on_from: whether the log has all that came after a snapshot.

        Raises:
          ConfigError: it is of another run; or it does not read, and the log does not
            go on from an older one.
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
                    "%s; going on from snapshot %d, after which the log has all",
                    error.what,
                    number,
                )

    def load(self, number: int, like: dict[str, Any]) -> tuple[dict[str, Any], State]:
        """Arrays and state of a snapshot; ConfigError if it is of another run."""
        facts = checkpoint.read_facts(self._manager, number)
        checkpoint.refuse_other(self._folder, number, facts, self._whose)
        arrays = {
            name: checkpoint.restore(self._manager, number, name, tree)
            for name, tree in like.items()
        }
        return arrays, msgspec.convert(facts["state"], State)

    def save(self, number: int, state: State, arrays: dict[str, Any]) -> None:
        """Write snapshot `number`; durable when this returns. One at a time."""
        trained = checkpoint.trained(
            sum(fragment.merges for fragment in state.fragments),
            ledger.trained_tokens(self._config, state),
        )
        facts = {**self._whose, **trained, "state": msgspec.to_builtins(state)}
        checkpoint.save(self._manager, number, arrays, facts)

    def save_first(self, number: int, state: State, arrays: dict[str, Any]) -> None:
        """The same, for a run that does not begin without it. Raises OSError where the
        disk is full, ConfigError or StorageAway of a bucket that takes none."""
        try:
            self.save(number, state, arrays)
        except OSError:
            raise
        except Exception as error:
            # Of orbax, of tensorstore: of many kinds.
            storage.raise_if_away(self._folder, error)
            raise ConfigError(storage.cannot_write(self._folder, error)) from error

    def due(self, now: float) -> bool:
        """Whether it is time for the next one, and none is being written."""
        return now >= self._due and not self._writing()

    def write(self, now: float, save: Callable[[], None]) -> None:
        """Calls `save` on a thread. A failure costs nothing: the log stays."""

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
        """What people should know: without snapshots, the record log grows."""
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
        """For the one that is being written, so long since the call, which may change
        meanwhile; whether it came to its end."""
        began = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            left_s = began + patience_s() - time.monotonic()
            if left_s <= 0:
                return False
            self._thread.join(min(left_s, PATIENCE_ASKED_S))
        return True

    def close(self) -> None:
        """Free the folder, unless a snapshot hangs: nobody waits for that one."""
        if not self._writing():
            self._manager.close()

    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
