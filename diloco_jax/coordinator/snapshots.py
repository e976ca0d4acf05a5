"""The coordinator's snapshots: its fragments, one at a time, and the protocol's state.

A snapshot of a fragment has its arrays at one version; publishes up to the oldest one
that is kept are superfluous. Snapshot n of the state stands for the segments of the
record log up to n; segments up to the oldest one are superfluous. The two need not be
of one moment: the state and the log after it say at which version a fragment is, and
its publishes lead there from any of its snapshots.

Fragments are written in turns. A round of all takes `placement.snapshot_every_s`, or
longer, so that writing takes at most a part of the disk's time.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from etils.epath import Path as Folder

from diloco_jax import checkpoint, sealed, storage
from diloco_jax.config import ConfigError, Placement
from diloco_jax.coordinator.publishes import name_of, require_space, version_of
from diloco_jax.paths import StorageAway, is_bucket
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.values import Version

logger = logging.getLogger(__name__)

K = TypeVar("K", int, Version)

PATIENCE_ASKED_S = 0.2
"""Seconds between two looks at the patience that is left."""
LATE_AFTER = 10
"""Intervals of snapshots after which a snapshot under way is late."""
BUSY_SHARE = 4
"""Writing takes at most one part in so many of the time."""
SUFFIX = ".snapshot"

Arrays = Mapping[str, Sequence[Any]]
"""Arrays of a fragment: lists by name."""


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
        self._folder = folder
        self._keep, self._every_s = placement.snapshots_kept, placement.snapshot_every_s
        self._config, self._whose = config, whose
        folder.mkdir(parents=True, exist_ok=True)
        if not is_bucket(str(folder)):
            for torn in Path(folder).rglob(f"*{sealed.TEMPORARY}"):
                torn.unlink()
        self._states = states(folder)
        self._versions = [versions(folder, f) for f in range(config.fragments)]
        self._next = 0
        self._due = time.monotonic() + self._every_s / config.fragments
        self._state_due = time.monotonic() + self._every_s
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._failure = ""

    def newest(self) -> int | None:
        """Return the number of the newest snapshot of the state, if there is any."""
        return self._states[-1] if self._states else None

    def oldest(self) -> int:
        """Return the number of the oldest snapshot of the state to be kept."""
        # Older ones may exist: not every bucket permits removal.
        return self._states[-self._keep :][0]

    def oldest_of(self, fragment: int) -> Version:
        """Return the version of the oldest snapshot of a fragment to be kept."""
        return self._versions[fragment][-self._keep :][0]

    def require_own(self, number: int) -> None:
        """Raise ConfigError if that snapshot of the state is of another run."""
        self._refuse_other(number, self._read(state_path(self._folder, number), []))

    def load_state(self, goes_on_from: Callable[[int], bool]) -> tuple[int, State]:
        """Load the newest snapshot of the state that reads; return its number too.

        goes_on_from: tells if the log has everything that came after a snapshot.

        Raises:
          ConfigError: the snapshot is of another run; or it does not read, and the log
            does not go on from an older one.
        """
        torn: list[int] = []
        while True:
            number = self._states[-1]
            try:
                header = self._read(state_path(self._folder, number), [])
                break
            except sealed.SealedError as error:
                if len(self._states) == 1 or not goes_on_from(self._states[-2]):
                    raise sealed.SealedError(
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
        return number, msgspec.convert(header["state"], State)

    def load_fragment(
        self, fragment: int, through: Version, like: Arrays
    ) -> tuple[Version, dict[str, list[Any]]]:
        """Load the newest snapshot of a fragment that reads; return its version too.
        Its later publishes must be there: they are kept from the oldest snapshot on.

        through: the committed version, beyond which no snapshot counts. like: arrays
        of the same shapes and dtypes, without values.

        Raises ConfigError: no snapshot reads, or it is of another run.
        """
        known = [v for v in self._versions[fragment] if v <= through]
        failure = f"there is none up to version {tuple(through)}"
        torn: list[Version] = []
        for version in reversed(known):
            path = fragment_path(self._folder, fragment, version)
            arrays = empty(like)
            try:
                header = self._read(path, flat(arrays))
            except sealed.SealedError as error:
                failure = str(error)
                logger.warning("%s; the one before it is tried", error)
                torn.append(version)
                continue
            self._refuse_other(version.number, header)
            for unreadable in torn:  # It must not count as kept.
                self._versions[fragment].remove(unreadable)
                self._remove(fragment_path(self._folder, fragment, unreadable))
            return version, arrays
        raise sealed.SealedError(
            f"fragment {fragment} cannot be loaded from the snapshots in "
            f"{self._folder}: {failure}; restore the folder from a copy"
        )

    def save_state(self, number: int, state: State) -> None:
        """Write snapshot `number` of the state; it is durable when this returns."""
        trained = checkpoint.trained(
            sum(fragment.merges for fragment in state.fragments),
            ledger.trained_tokens(self._config, state),
        )
        facts = {**self._whose, **trained, "state": msgspec.to_builtins(state)}
        sealed.write(state_path(self._folder, number), facts, [])
        path = functools.partial(state_path, self._folder)
        self._states = self._without_old([*self._states, number], path)

    def save_fragment(self, fragment: int, version: Version, arrays: Arrays) -> None:
        """Write a snapshot of a fragment; it is durable when this returns."""
        path = fragment_path(self._folder, fragment, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffers = flat(arrays)
        if not is_bucket(str(self._folder)):
            require_space(Path(self._folder), sum(buffer.nbytes for buffer in buffers))
        facts = {**self._whose, "fragment": fragment, "version": list(version)}
        sealed.write(path, facts, buffers)
        of_version = functools.partial(fragment_path, self._folder, fragment)
        known = [*self._versions[fragment], version]
        self._versions[fragment] = self._without_old(known, of_version)

    def save_first(
        self,
        number: int,
        state: State,
        arrays: Callable[[int], Arrays],
    ) -> None:
        """Write the snapshots without which a run or a term does not begin; remove all
        others. arrays: returns those of a fragment. Raises OSError if the disk is full,
        ConfigError or StorageAway if a bucket takes no snapshot."""
        try:
            for fragment, of_run in enumerate(state.fragments):
                for version in self._versions[fragment]:
                    self._remove(fragment_path(self._folder, fragment, version))
                self._versions[fragment] = []
                self.save_fragment(fragment, of_run.version, arrays(fragment))
            self.save_state(number, state)
        except (OSError, ConfigError, StorageAway):
            raise
        except Exception as error:
            # Backends of buckets raise many kinds of errors.
            storage.raise_if_away(self._folder, error)
            raise ConfigError(storage.cannot_write(self._folder, error)) from error

    def unsaved(self, current: Sequence[Version]) -> list[int]:
        """Return the fragments whose current version, by fragment, is in no snapshot,
        beginning with the one whose turn it is."""
        count = len(current)
        turns = ((self._next + ahead) % count for ahead in range(count))
        return [f for f in turns if self._versions[f][-1:] != [current[f]]]

    def due(self, now: float) -> bool:
        """Tell if it is time for the next snapshot and none is being written."""
        return now >= self._due and not self._writing()

    def state_due(self, now: float) -> bool:
        """Tell if it is time for a snapshot of the state."""
        return now >= self._state_due

    def write(self, now: float, saves: Sequence[Callable[[], None]]) -> None:
        """Call these in order on a thread. A failure costs nothing: log and publishes
        stay."""

        def attempt() -> None:
            began = time.monotonic()
            try:
                for save in saves:
                    save()
            except Exception as error:
                self._failure = storage.cannot_write(self._folder, error)
                self._due = now + self._every_s
                logger.error(
                    "no snapshot was written, the log keeps what it holds: %s",
                    self._failure,
                )
            else:
                self._failure = ""
                took_s = time.monotonic() - began
                self._due = max(self._due, now + BUSY_SHARE * took_s)

        self._due, self._began = now + self._every_s / self._config.fragments, now
        # A coordinator that has ended must not stay for a disk that hangs.
        self._thread = threading.Thread(
            target=attempt, name="diloco-snapshot", daemon=True
        )
        self._thread.start()

    def took_turn(self, fragment: int) -> None:
        """Note that a fragment is being written: the next one has its turn."""
        self._next = (fragment + 1) % len(self._versions)

    def took_state(self, now: float) -> None:
        """Note that the state is being written."""
        self._state_due = now + self._every_s

    def alerts(self, now: float) -> list[str]:
        """Return alerts for people: without snapshots, log and publishes grow."""
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

    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

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

    def _read(self, path: Folder, into: list[Any]) -> dict[str, Any]:
        """Read a snapshot's bytes into these arrays; return its header."""
        try:
            return sealed.read(path, into)[0]
        except ConfigError:
            raise
        except Exception as error:
            # Backends of buckets raise many kinds of errors.
            storage.raise_if_away(self._folder, error)
            raise sealed.SealedError(
                f"{self._folder} cannot be read: {error}"
            ) from error

    def _refuse_other(self, number: int, facts: Mapping[str, Any]) -> None:
        checkpoint.refuse_other(self._folder, number, facts, self._whose)


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
    return sorted(version_of(name.removesuffix(SUFFIX)) for name in names)


def state_path(folder: Folder, number: int) -> Folder:
    """Return the path of a snapshot of the state."""
    return folder / f"state-{number:06d}{SUFFIX}"


def fragment_path(folder: Folder, fragment: int, version: Version) -> Folder:
    """Return the path of a snapshot of a fragment."""
    return folder / f"{fragment:05d}" / f"{name_of(version)}{SUFFIX}"


def flat(arrays: Arrays) -> list[Any]:
    """Return the arrays in a snapshot's order: by name, then as they are listed."""
    return [np.asarray(array) for name in sorted(arrays) for array in arrays[name]]


def empty(like: Arrays) -> dict[str, list[Any]]:
    """Return new arrays of these shapes and dtypes."""
    return {
        name: [np.empty(array.shape, array.dtype) for array in own]
        for name, own in like.items()
    }
