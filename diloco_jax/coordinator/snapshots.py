"""Snapshots on disk: how they are named, kept, read, and written beside a run, and
those of the protocol's state, which the lead writes beside its record log.

A snapshot of a fragment (`holding/fragment_snapshots.py`) has its arrays at one
version; publishes up to the oldest one that is kept are superfluous. Snapshot n of the
state (`StateSnapshots`) stands for the segments of the record log up to n; segments up
to the oldest one are superfluous. The two need not be of one moment: the state and the
log after it say at which version a fragment is, and its publishes lead there from any
of its snapshots.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from etils.epath import Path as Folder

from diloco_jax import checkpoint, files
from diloco_jax.config import ConfigError, Placement
from diloco_jax.coordinator.journal import RecordLog
from diloco_jax.files import TEMPORARY, StorageAway, is_bucket
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, from_builtins
from diloco_jax.protocol.messages import Version

logger = logging.getLogger(__name__)

K = TypeVar("K", int, Version)

PATIENCE_ASKED_S = 0.2
"""Seconds between two looks at the patience that is left."""
LATE_AFTER = 10
"""Rounds of snapshots after which a snapshot under way is late."""
BUSY_SHARE = 4
"""Writing takes at most one part in so many of the time."""
SUFFIX = ".snapshot"

Arrays = Mapping[str, Sequence[Any]]
"""Arrays of a fragment: lists by name."""


class Snapshots:
    """Snapshots of one run and one kind, in a folder that all kinds share."""

    def __init__(
        self, folder: Folder, placement: Placement, whose: dict[str, Any]
    ) -> None:
        """Open the folder, and make it if it is missing. whose: see `checkpoint`."""
        self._folder, self._keep, self._whose = folder, placement.snapshots_kept, whose
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Write, in the block, the first snapshots of a run or a term.

        Raises ConfigError if the bucket refuses a snapshot, and StorageAway if it does
        not answer.
        """
        try:
            yield
        except (OSError, ConfigError, StorageAway):
            raise
        except Exception as error:
            # Backends of buckets raise many kinds of errors.
            files.raise_if_away(self._folder, error)
            raise ConfigError(files.cannot_write(self._folder, error)) from error

    def _remove_torn(self, folder: Folder) -> None:
        """Remove what a crash left of a snapshot in a folder."""
        if not is_bucket(str(folder)):
            for torn in Path(folder).glob(f"*{TEMPORARY}"):
                torn.unlink()

    def _without_old(self, known: list[K], path: Callable[[K], Folder]) -> list[K]:
        """Remove all but the newest snapshots of one kind, now that a newer one is
        durable; return those that are kept."""
        ordered = sorted(set(known))
        for old in ordered[: -self._keep]:
            self._remove(path(old))
        return ordered[-self._keep :]

    def _remove(self, path: Folder) -> None:
        try:
            path.unlink(missing_ok=True)
        except Exception as error:
            # Not every bucket permits removal, and each has its own errors.
            logger.warning("the old snapshot %s cannot be removed: %s", path, error)

    def _read(self, path: Folder, into: Iterable[Any] | None) -> dict[str, Any]:
        """Read a snapshot's bytes into these arrays; return its header. None: read that
        alone."""
        try:
            if into is None:
                return files.read_sealed_header(path)
            return files.read_sealed(path, into)[0]
        except (ConfigError, CancelledError):
            raise
        except Exception as error:
            # Backends of buckets raise many kinds of errors.
            files.raise_if_away(self._folder, error)
            raise files.SealedError(
                f"{self._folder} cannot be read: {error}"
            ) from error

    def _refuse_other(self, number: int, facts: Mapping[str, Any]) -> None:
        checkpoint.refuse_other(self._folder, number, facts, self._whose)


class SnapshotWriter:
    """The thread beside a run that writes snapshots, one after the other."""

    def __init__(
        self, folder: Folder, round_s: float, turns: int, superfluous: str
    ) -> None:
        """round_s: seconds for the snapshots of a round, of which there are `turns`.
        superfluous: what snapshots make superfluous, for people."""
        self._folder, self._round_s, self._turn_s = folder, round_s, round_s / turns
        self._superfluous = superfluous
        self._due = time.monotonic() + self._turn_s
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._failure = ""

    def due(self, now: float) -> bool:
        """Tell if it is time for the next snapshot and none is being written."""
        return now >= self._due and not self._writing()

    def write(self, now: float, save: Callable[[], None]) -> None:
        """Write a snapshot by `save` on a thread, and return at once.

        After a failure the files that this snapshot would have made superfluous are
        kept.
        """

        def attempt() -> None:
            began = time.monotonic()
            try:
                save()
            except Exception as error:
                self._failure = files.cannot_write(self._folder, error)
                self._due = now + self._round_s
                logger.error(
                    "no snapshot was written, the %s keeps what it holds: %s",
                    self._superfluous,
                    self._failure,
                )
            else:
                self._failure = ""
                took_s = time.monotonic() - began
                self._due = max(self._due, now + BUSY_SHARE * took_s)

        self._due, self._began = now + self._turn_s, now
        # A coordinator that has ended must not stay for a disk that hangs.
        thread = threading.Thread(target=attempt, name="diloco-snapshot", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # There is no thread to be had just now.
            self._failure = str(error)
        else:
            self._thread = thread

    def alerts(self, now: float) -> list[str]:
        """Return alerts for people: without snapshots, log and publishes grow."""
        grows = f"until one is, the {self._superfluous} grows"
        if self._writing() and now - self._began > LATE_AFTER * self._round_s:
            return [
                f"a snapshot in {self._folder} is not written after "
                f"{now - self._began:.0f} s; {grows}"
            ]
        return [f"no snapshot was written: {self._failure}; {grows}"] * bool(
            self._failure
        )

    def wait(self, patience_s: Callable[[], float]) -> bool:
        """Wait for a snapshot that is being written; return False if it takes too long.

        patience_s: returns the seconds to wait, counted from this call. It is asked
        again and again, as its answer may change.
        """
        began = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            left_s = began + patience_s() - time.monotonic()
            if left_s <= 0:
                return False
            self._thread.join(min(left_s, PATIENCE_ASKED_S))
        return True

    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def states(folder: Folder) -> list[int]:
    """Return the numbers of the snapshots of the state in a folder, oldest first."""
    names = (path.name for path in folder.glob(f"state-*{SUFFIX}"))
    return sorted(int(name.removesuffix(SUFFIX).split("-")[1]) for name in names)


def versions(folder: Folder, fragment: int) -> list[Version]:
    """Return the versions of the snapshots of a fragment in a folder, oldest first."""
    own = fragment_path(folder, fragment, Version()).parent
    if not own.exists():
        return []
    names = (path.name for path in own.glob(f"*{SUFFIX}"))
    return sorted(Version.named(name.removesuffix(SUFFIX)) for name in names)


def state_path(folder: Folder, number: int) -> Folder:
    """Return the path of a snapshot of the state."""
    return folder / f"state-{number:06d}{SUFFIX}"


def fragment_path(folder: Folder, fragment: int, version: Version) -> Folder:
    """Return the path of a snapshot of a fragment."""
    return folder / f"{fragment:05d}" / f"{version.name}{SUFFIX}"


def flat(arrays: Arrays) -> list[Any]:
    """Return the arrays in a snapshot's order: by name, then as they are listed."""
    return [np.asarray(array) for name in sorted(arrays) for array in arrays[name]]


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
            except files.SealedError as error:
                if len(self._states) == 1 or not goes_on_from(self._states[-2]):
                    raise files.SealedError(
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
        return number, from_builtins(header["state"])

    def save(self, number: int, state: State) -> None:
        """Write snapshot `number`; it is durable when this returns."""
        trained = checkpoint.trained(
            sum(fragment.merges for fragment in state.fragments),
            ledger.trained_tokens(self._config, state),
        )
        facts = {**self._whose, **trained, "state": msgspec.to_builtins(state)}
        files.write_sealed(state_path(self._folder, number), facts, [])
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
