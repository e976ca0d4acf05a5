"""Files of fragments, on one machine and on their way to another.

A worker on another machine has its fragments' files on its own disk. The lead sends it
those that it has itself, at a beginning of a run, and gets the last snapshots and the
fragments of kept cycles, so that its workdir alone has all that is left of a run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from diloco_jax import checkpoint, run_files, storage
from diloco_jax.config import ConfigError, Placement
from diloco_jax.coordinator import kept, snapshots
from diloco_jax.coordinator.holding.publishes import Publishes, require_space
from diloco_jax.coordinator.workers.line import write_frame
from diloco_jax.coordinator.workers.outpost.relay import cut
from diloco_jax.deadlines import Deadlines
from diloco_jax.files import is_bucket
from diloco_jax.protocol.holding import AtWork, Kind
from diloco_jax.protocol.values import Version
from diloco_jax.wire.duplex import End

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20

Moved = Callable[[], None]
"""Called now and then while bytes are moving."""


class FragmentFiles:
    """The files of fragments on this machine."""

    def __init__(self, placement: Placement, workdir: Path) -> None:
        self._snapshots = checkpoint.snapshots_folder(placement, workdir)
        self._kept = workdir / run_files.KEPT
        self.in_bucket = is_bucket(str(self._snapshots))
        """Snapshots are where every machine finds them."""
        self._publishes = Publishes(workdir / run_files.PUBLISHES, ())

    def newest(self, fragment: int, through: Version | None = None) -> Version | None:
        """Return the version of the newest snapshot of a fragment, up to `through`."""
        found = snapshots.versions(self._snapshots, fragment)
        fitting = [v for v in found if through is None or v <= through]
        return fitting[-1] if fitting else None

    def newest_whole(self, fragment: int, through: Version) -> Version | None:
        """Return what `newest` does, but pass over local files that are damaged."""
        known = snapshots.versions(self._snapshots, fragment)
        for version in sorted((v for v in known if v <= through), reverse=True):
            try:
                if not self.in_bucket:
                    storage.check_sealed(self.path("snapshot", fragment, version))
            except storage.SealedError as error:
                logger.error("%s; an older snapshot takes its place", error)
            else:
                return version
        return None

    def checked_bytes(self, fragment: int, through: Version) -> int:
        """Return the most bytes that `newest_whole` reads."""
        if self.in_bucket:
            return 0
        known = snapshots.versions(self._snapshots, fragment)
        paths = [self.path("snapshot", fragment, v) for v in known if v <= through]
        return sum(path.stat().st_size for path in paths)

    def seal(self, fragment: int, version: Version) -> str:
        """Return what tells the content of a snapshot from another of its version; ""
        if that is in a bucket, which has one of each."""
        if self.in_bucket:
            return ""
        with self.path("snapshot", fragment, version).open("rb") as file:
            return storage.seal_of(file)

    def publishes(self, fragment: int, through: Version) -> list[Version]:
        """Return the versions of the publishes of a fragment, up to `through`."""
        found = self._publishes.versions(fragment)
        return [version for version in found if version <= through]

    def path(self, kind: Kind, fragment: int, version: Version) -> Path:
        """Return the path of a file of a fragment. Raises ConfigError for a snapshot in
        a bucket, which is no file."""
        if kind == "publish":
            return self._publishes.path(fragment, version)
        if self.in_bucket:
            raise ConfigError(
                f"snapshots of this machine are in {self._snapshots}, and another "
                f"machine moves one as a file; give both the same "
                f"placement.checkpoints"
            )
        return Path(snapshots.fragment_path(self._snapshots, fragment, version))

    def kept_path(self, cycle: int, fragment: int) -> Path:
        """Return the path of a fragment of a cycle that is not whole yet."""
        scratch = kept.path_of(self._kept, cycle, kept.TEMPORARY)
        return scratch / kept.fragment_name(fragment)

    def drop_kept(self, cycle: int, fragment: int) -> None:
        """Delete a fragment of a kept cycle, and what there is of earlier cycles."""
        own = self.kept_path(cycle, fragment)
        own.unlink(missing_ok=True)
        for scratch in self._kept.glob(f"*{kept.TEMPORARY}"):
            if scratch < own.parent:
                shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):  # Others are still there.
            own.parent.rmdir()

    def remove(self, fragment: int) -> None:
        """Delete the snapshots, unless they are in a bucket, and the publishes of a
        fragment: another machine has it."""
        for version in self._publishes.versions(fragment):
            self.path("publish", fragment, version).unlink()
        if self.in_bucket:
            return
        for version in snapshots.versions(self._snapshots, fragment):
            self.path("snapshot", fragment, version).unlink()

    def leave_only(self, fragment: int, version: Version) -> None:
        """Delete all snapshots of a fragment but one."""
        for other in snapshots.versions(self._snapshots, fragment):
            if other != version:
                self.path("snapshot", fragment, other).unlink()


def send_file(end: End, path: Path, size: int, moved: Moved) -> None:
    """Send the bytes of a file that has this size. Raises OSError."""
    with path.open("rb") as file:
        left = size
        while left:
            block = file.read(min(left, BLOCK_BYTES))
            if not block:
                raise OSError(f"{path} has {left} bytes less than before")
            end.sendall(block)
            left -= len(block)
            moved()


def receive_file(
    end: End, path: Path, size: int, deadlines: Deadlines, moved: Moved
) -> None:
    """Receive a sealed file of this size; it is whole, and on disk under its name, when
    this returns. Raises OSError, and leaves nothing of it then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    require_space(path.parent, size)
    # A name of its own: an earlier connection may still be writing.
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}{storage.TEMPORARY}")
    try:
        with scratch.open("wb") as file:
            left = size
            while left:
                block = end.recv(min(left, BLOCK_BYTES))
                if not block:
                    raise ConnectionError(f"{left} bytes of {path.name} did not come")
                file.write(block)
                left -= len(block)
                moved()
            with at_work(end, deadlines, size, moved):
                file.flush()
                os.fsync(file.fileno())
                _require_whole(scratch, path.name)
                scratch.replace(path)
                for folder in (path.parent, path.parent.parent):
                    storage.sync_path(folder)
    finally:
        scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def at_work(
    end: End, deadlines: Deadlines, octets: int, moved: Moved
) -> Iterator[None]:
    """Tell the other end, in the block, that a disk is at work for it: it breaks the
    connection off after `idle_s` without a word. It is told so for as long as a disk
    may take for so many bytes. Nothing else may be sent in the block."""
    done, until = threading.Event(), time.monotonic() + deadlines.disk_s(octets)

    def say() -> None:
        while not done.wait(deadlines.report_s) and time.monotonic() < until:
            try:
                write_frame(end, AtWork())
            except OSError:
                cut(end)  # A part of it may have gone: no other word may follow.
                return
            moved()

    saying = threading.Thread(target=say, name="diloco-at-work", daemon=True)
    saying.start()
    try:
        yield
    finally:
        done.set()
        saying.join()


def _require_whole(scratch: Path, name: str) -> None:
    try:
        storage.check_sealed(scratch)
    except storage.SealedError as error:
        raise OSError(f"{name} came damaged: {error}") from error


def hang_up(end: End) -> None:
    """Shut a connection down and close it."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
