"""The standby's disk: the primary's files, as they come.

At any moment after the copy is whole, the workdir is what the primary's would be had it
crashed a moment ago. So a take-over is the start of a coordinator after a crash.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from etils.epath import Path as Folder

from diloco_jax import checkpoint, run_files
from diloco_jax.config import Placement
from diloco_jax.coordinator import log, snapshots
from diloco_jax.coordinator.holding.publishes import Publishes, name_of
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.errors import ConfigError
from diloco_jax.files import Appended, naming
from diloco_jax.observability.tape import put_aside, remove_tape
from diloco_jax.protocol.values import Version
from diloco_jax.storage import TEMPORARY, seal_of, sync_path
from diloco_jax.wire.errors import RemoteProtocolError
from diloco_jax.workdir import holds_run, read_facts

_NAMES = "|".join(
    re.escape(name)
    for name in (run_files.CONFIG, run_files.FACTS, run_files.ROSTER, run_files.TAPE)
)
_FILE = r"[A-Za-z0-9][A-Za-z0-9._-]*"
ALLOWED = re.compile(
    rf"{_NAMES}|tape\.\d{{6}}\.jsonl|{run_files.LOG}/log-\d+\.bin"
    rf"|{run_files.PUBLISHES}/\d+/{_FILE}\.publish"
    rf"|{run_files.CHECKPOINTS}/coordinator/(\d+/)?{_FILE}\.snapshot"
    rf"|{run_files.SOURCE}/{_FILE}"
)
"""Paths that a primary may send."""


class Mirror:
    """Files of one workdir. Used on one thread."""

    def __init__(self, workdir: Path, placement: Placement) -> None:
        self._workdir, self._keep = workdir, placement.snapshots_kept
        self._snapshots = checkpoint.snapshots_folder(placement, workdir)
        self._open: dict[str, Appended] = {}
        self._scratch: dict[str, Appended] = {}
        """Files that are not whole yet: a publish may come amid a snapshot."""
        self._publishes: Publishes | None = None
        """Set once the copy is whole."""

    def sealed(self) -> dict[str, str]:
        """Return the seals of the sealed files that are here, by path."""
        self._end_own_workers()
        found = {}
        for path in self._sealed_files():
            with path.open("rb") as file:
                found[path.relative_to(self._workdir).as_posix()] = seal_of(file)
        return found

    def clear(self, run_id: str, keep: Collection[str] = ()) -> None:
        """Remove what is there of this run but the files to keep: a copy follows, or
        the islands' anchors. Raises ConfigError if another run is there."""
        if holds_run(self._workdir):
            here = read_facts(self._workdir).run_id
            if here != run_id:
                raise ConfigError(
                    f"{self._workdir} holds run {here}, the primary's is {run_id}; a "
                    f"standby needs a workdir of its own: give another --workdir"
                )
        self._end_own_workers()
        self.close()
        self._publishes = None
        # First: without it the workdir holds no run.
        (self._workdir / run_files.FACTS).unlink(missing_ok=True)
        sync_path(self._workdir)
        for name in (run_files.LOG, run_files.SOURCE):
            shutil.rmtree(self._workdir / name, ignore_errors=True)
        kept = {self._workdir / name for name in keep}
        for path in self._sealed_files():
            if path not in kept:
                path.unlink()
        for folder in (self._workdir / run_files.PUBLISHES, Path(self._snapshots)):
            # Of a stream that ended: nobody sends a file of that name again.
            for torn in folder.rglob(f"*{TEMPORARY}"):
                torn.unlink()
        remove_tape(self._workdir / run_files.TAPE)
        (self._workdir / run_files.ROSTER).unlink(missing_ok=True)

    def chunk(self, name: str, data: bytes, *, first: bool, last: bool) -> None:
        """Take the next bytes of a file that comes whole."""
        path = self._path(name)
        scratch = path.with_name(f"{path.name}{TEMPORARY}")
        if first:
            path.parent.mkdir(parents=True, exist_ok=True)
            if (before := self._scratch.pop(name, None)) is not None:
                before.close()
            scratch.unlink(missing_ok=True)
            self._scratch[name] = Appended(scratch)
        if name not in self._scratch:
            raise RemoteProtocolError(
                f"the primary sends the middle of {name}, whose beginning did not come"
            )
        self._scratch[name].append(data, sync=last)
        if last:
            self._scratch.pop(name).close()
            scratch.replace(path)
            sync_path(path.parent)
            if self._publishes is not None:
                self._forget_older(path, self._publishes)

    def _end_own_workers(self) -> None:
        """End the workers that are left of the time when this node led: nobody else may
        write here."""
        rendezvous.end_others(self._workdir, 0)

    def _sealed_files(self) -> list[Path]:
        publishes = (self._workdir / run_files.PUBLISHES).glob("*/*.publish")
        found = Path(self._snapshots).rglob(f"*{snapshots.SUFFIX}")
        return [*publishes, *found]

    def whole(self) -> None:
        """Note that the copy is whole."""
        self._publishes = Publishes(self._workdir / run_files.PUBLISHES)

    def append(self, name: str, data: bytes, *, sync: bool) -> None:
        """Append to a file. sync: it is on disk when this returns."""
        file = self._open.get(name)
        if file is None:
            path = self._path(name)
            made = not path.exists()
            file = self._open[name] = Appended(path)
            if made:
                sync_path(path.parent)
        file.append(data, sync=sync)
        if name.startswith(run_files.LOG):
            for other in [n for n in self._open if n.startswith(run_files.LOG)]:
                if other != name:  # A segment that has ended.
                    self._open.pop(other).close()

    def put_aside(self, name: str) -> None:
        """Put a file of the tape aside."""
        path = self._path(name)
        if (file := self._open.pop(name, None)) is not None:
            file.close()
        put_aside(path)

    def close(self) -> None:
        """Close the files."""
        for file in (*self._scratch.values(), *self._open.values()):
            file.close()
        self._scratch.clear()
        self._open.clear()

    def _path(self, name: str) -> Path:
        if not ALLOWED.fullmatch(name):
            raise RemoteProtocolError(
                f"the primary sends a file {name!r}, which no standby takes; both ends "
                f"must run the same version of diloco"
            )
        return self._workdir / name

    def _forget_older(self, path: Path, publishes: Publishes) -> None:
        """Delete what a new snapshot makes superfluous, as the primary does."""
        folder = self._snapshots
        if path.suffix != snapshots.SUFFIX:
            return
        if path.parent == Path(folder):
            kept = snapshots.states(folder)[-self._keep :]
            for number in snapshots.states(folder)[: -self._keep]:
                snapshots.state_path(folder, number).unlink()
            log.forget(self._workdir / run_files.LOG, kept[0])
            return
        fragment, newest = snapshots.named(Folder(path))
        found, own = [], 0
        for version in snapshots.versions(folder, fragment):
            same = version.term == newest.term
            if version <= newest:
                found.append(version)
                own += same
            elif same:  # An anchor of this term that was not committed.
                self._unlink(path, version)
        if own == 1 and len(found) > 1:
            return  # Until its record is here, the term before counts.
        for version in found[: -self._keep]:
            self._unlink(path, version)
        publishes.forget(fragment, found[-self._keep :][0])

    def _unlink(self, beside: Path, version: Version) -> None:
        with naming(beside):
            os.unlink(beside.with_name(f"{name_of(version)}{snapshots.SUFFIX}"))
