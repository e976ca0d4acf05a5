"""Encoded publishes on disk: one file for each version of a fragment.

A merge is *prepared* once its publish is whole on disk, and *committed* by its small
record in the log. A file without a record belongs to a merge that never was, and the
next start deletes it. A record without its file is damage. The files of a fragment go
back to its oldest snapshot, so that each snapshot can be advanced to the present.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_jax import files, storage
from diloco_jax.coordinator.log import DurableError
from diloco_jax.core.payload import Buffer
from diloco_jax.protocol.values import Prepared, Version

logger = logging.getLogger(__name__)

SPARED_BYTES = 64 << 20
"""Bytes that publishes and snapshots leave free on their disk, so that the small
records of log and tape can still be written."""


class Publishes:
    """The publishes of one run. Each file is written once, by any thread."""

    def __init__(self, folder: Path, fragments: Iterable[int] | None = None) -> None:
        """Open the folder, and make it if it is missing. fragments: those that are
        written here, if not all are; others' files are left alone."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        files.sync_path(folder.parent)
        torn, own = f"*{files.TEMPORARY}", [folder]
        if fragments is not None:
            own = [self.path(f, Version()).parent for f in fragments]
        for path in [path for below in own for path in below.rglob(torn)]:
            path.unlink()

    def write(
        self, fragment: int, version: Version, payload: Buffer, *, final: bool
    ) -> Prepared:
        """Write a publish; it is on disk when this returns. final: it belongs to the
        flush. Raises OSError if the disk is full."""
        path = self.path(fragment, version)
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)
            files.sync_path(self._folder)
        require_space(self._folder, len(payload))
        header = {
            "fragment": fragment,
            "version": list(version),
            "final": final,
            "bytes": len(payload),
        }
        digest = storage.write_sealed(path, header, [payload])
        return Prepared(digest=digest, payload_bytes=len(payload))

    def read(
        self, fragment: int, version: Version, wanted: str | None
    ) -> tuple[Buffer, bool]:
        """Return a publish, and True if it belongs to the flush. wanted: its
        digest, if the log still has the record. Raises DurableError if the file is
        missing or is not what the record says."""
        path = self.path(fragment, version)
        made = []

        def make(header: dict[str, Any]) -> npt.NDArray[Any]:
            made.append(np.empty(header["bytes"], np.uint8))
            return made[0]

        try:
            header, found = storage.read_sealed(path, make)
        except storage.SealedError as error:
            raise _damaged(fragment, version, str(error)) from error
        if wanted is not None and found != wanted:
            what = f"{path} has digest {found}, its record says {wanted}"
            raise _damaged(fragment, version, what)
        return made[0].data, bool(header["final"])

    def mapped(self, fragment: int, version: Version) -> Buffer | None:
        """Return a publish as mapped from the disk; None if it was deleted since it was
        read or written, or was cut off.
        """
        path = self.path(fragment, version)
        try:
            header, found = storage.map_sealed(path)
        except storage.SealedError:
            return None
        if len(found) != header["bytes"]:
            logger.error(
                "%s has %d bytes of %d: it is not served, and islands fetch the whole "
                "fragment; look at that disk",
                path,
                len(found),
                header["bytes"],
            )
            return None
        return found

    def versions(self, fragment: int) -> list[Version]:
        """Return the versions that are on disk, oldest first."""
        found = self.path(fragment, Version()).parent.glob("*.publish")
        return sorted(version_of(path.stem) for path in found)

    def forget(self, fragment: int, through: Version) -> None:
        """Delete the publishes up to a version: that of the oldest kept snapshot."""
        for version in self.versions(fragment):
            if version <= through:
                self.path(fragment, version).unlink()

    def discard(self, committed: Mapping[int, Version]) -> int:
        """Delete publishes above the committed versions, by fragment: their merges
        were prepared and never committed. Return their number."""
        count = 0
        for fragment, newest in committed.items():
            for version in self.versions(fragment):
                if version > newest:
                    self.path(fragment, version).unlink()
                    count += 1
        return count

    def path(self, fragment: int, version: Version) -> Path:
        """Return the path of a publish."""
        return path_of(self._folder, fragment, version)


def path_of(folder: Path, fragment: int, version: Version) -> Path:
    """Return the path of a publish, in the folder of all of them."""
    return folder / f"{fragment:05d}" / f"{name_of(version)}.publish"


def require_space(folder: Path, nbytes: int) -> None:
    """Raise OSError unless the disk of a folder has room for `nbytes` beside
    `SPARED_BYTES`.

    The error names the folder, the bytes that are needed and the free ones.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARED_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"{nbytes + SPARED_BYTES:,} bytes are needed and {free:,} are free",
            str(folder),
        )


def name_of(version: Version) -> str:
    """Return the name of a version in a file's name."""
    return f"{version.term}-{version.number}"


def version_of(name: str) -> Version:
    """Return the version that `name_of` named."""
    term, number = name.split("-")
    return Version(int(term), int(number))


def _damaged(fragment: int, version: Version, what: str) -> DurableError:
    return DurableError(
        f"the publish of fragment {fragment}, version {tuple(version)}, was committed "
        f"and cannot be read: {what}; restore the workdir from a copy"
    )
