"""Snapshots of fragments: those of a holder, beside its publishes.

Fragments are written in turns. A round of all takes `placement.snapshot_every_s`, or
longer, so that writing takes at most a part of the disk's time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils.epath import Path as Folder

from diloco_jax import storage
from diloco_jax.config import Placement
from diloco_jax.coordinator.holding.publishes import require_space
from diloco_jax.coordinator.snapshots import (
    Arrays,
    Snapshots,
    SnapshotWriter,
    empty,
    flat,
    fragment_path,
    versions,
)
from diloco_jax.files import is_bucket
from diloco_jax.protocol.values import Version

logger = logging.getLogger(__name__)


class FragmentSnapshots(Snapshots):
    """Snapshots of the fragments of one run."""

    def __init__(
        self,
        folder: Folder,
        placement: Placement,
        fragments: Sequence[int],
        whose: dict[str, Any],
    ) -> None:
        """fragments: those that are written here; others' files are left alone. See
        `Snapshots`."""
        super().__init__(folder, placement, whose)
        self.fragments = tuple(fragments)
        self._versions = {f: versions(folder, f) for f in fragments}
        for fragment in fragments:
            self._remove_torn(fragment_path(folder, fragment, Version()).parent)
        self._next = 0
        """Place in `fragments` of the next one."""
        turns = len(fragments)
        self.writer = SnapshotWriter(
            folder, placement.snapshot_every_s, turns, "folder of publishes"
        )

    def oldest_of(self, fragment: int) -> Version:
        """Return the version of the oldest snapshot of a fragment to be kept."""
        return self._versions[fragment][-self._keep :][0]

    def load(
        self, fragment: int, through: Version, like: Arrays
    ) -> tuple[Version, dict[str, list[Any]]]:
        """Load a fragment's newest snapshot that can be read; return its version too.
        Remove those after it: torn ones, and those beyond the committed version, whose
        numbers other merges will have.

        Its later publishes must be there: they are kept from the oldest snapshot on.

        through: the committed version. like: arrays of the same shapes and dtypes,
        without values.

        Raises ConfigError: no snapshot can be read, or it is of another run.
        """
        known = [v for v in self._versions[fragment] if v <= through]
        failure = f"there is none up to version {tuple(through)}"
        for version in reversed(known):
            path = fragment_path(self._folder, fragment, version)
            arrays = empty(like)
            try:
                header = self._read(path, flat(arrays))
            except storage.SealedError as error:
                failure = str(error)
                logger.warning("%s; the one before it is tried", error)
                continue
            self._refuse_other(version.number, header)
            own = self._versions[fragment]
            for unfit in own[own.index(version) + 1 :]:
                self._remove(fragment_path(self._folder, fragment, unfit))
            self._versions[fragment] = own[: own.index(version) + 1]
            return version, arrays
        raise storage.SealedError(
            f"fragment {fragment} cannot be loaded from the snapshots in "
            f"{self._folder}: {failure}; restore the folder from a copy"
        )

    def save(self, fragment: int, version: Version, arrays: Arrays) -> None:
        """Write a snapshot of a fragment; it is durable when this returns."""
        path = fragment_path(self._folder, fragment, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffers = flat(arrays)
        if not is_bucket(str(self._folder)):
            require_space(Path(self._folder), sum(buffer.nbytes for buffer in buffers))
        facts = {**self._whose, "fragment": fragment, "version": list(version)}
        storage.write_sealed(path, facts, buffers)
        of_version = functools.partial(fragment_path, self._folder, fragment)
        known = [*self._versions[fragment], version]
        self._versions[fragment] = self._without_old(known, of_version)

    def save_first(self, fragment: int, version: Version, arrays: Arrays) -> None:
        """Write the first snapshot of a fragment in a run or a term; remove all
        others."""
        for old in self._versions[fragment]:
            self._remove(fragment_path(self._folder, fragment, old))
        self._versions[fragment] = []
        self.save(fragment, version, arrays)

    def unsaved(self, current: Sequence[Version]) -> list[int]:
        """Return the fragments whose current version no snapshot has, in the order of
        turns.

        current: versions by fragment.
        """
        turns = self.fragments[self._next :] + self.fragments[: self._next]
        return [f for f in turns if self._versions[f][-1:] != [current[f]]]

    def took_turn(self, fragment: int) -> None:
        """Note that this fragment's snapshot has begun, so that the next turn is the
        next fragment's.
        """
        self._next = (self.fragments.index(fragment) + 1) % len(self.fragments)
