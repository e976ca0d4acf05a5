"""Send a standby a copy of the primary's files, and all that is written after it.

Everything is listed and numbered on the lead's thread, which alone appends to log and
tape; publishes and snapshots come from other threads, or from workers, whose messages
tell of them; those of workers on other machines stay there. A publish goes ahead of the
record that commits it. The anchor of a lost fragment may have many times its size: it
goes beside what is appended, and the lead hears of it once it has gone. Snapshots go
when there is nothing else to send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from diloco_jax import checkpoint, run_files
from diloco_jax.config import Placement
from diloco_jax.coordinator.holding import publishes
from diloco_jax.coordinator.snapshots import SUFFIX, fragment_path
from diloco_jax.coordinator.standby.feed import StandbyFeed
from diloco_jax.coordinator.workers.supervised import Heard
from diloco_jax.observability.tape import closed_segments
from diloco_jax.protocol.holding import AnchorKept, MergePrepared
from diloco_jax.protocol.values import Version
from diloco_jax.protocol.working import FragmentSaved
from diloco_jax.wire import follow
from diloco_jax.wire.errors import Busy, WireError

T = TypeVar("T")


class Outflow:
    """Count what this primary writes, and hand it to the standby, if there is one."""

    def __init__(
        self,
        workdir: Path,
        placement: Placement,
        alive_s: float,
        lost: Callable[[str], None],
    ) -> None:
        """lost: called, on any thread, if the standby cannot be sent what is
        written."""
        self._workdir, self._alive_s, self._lost = workdir, alive_s, lost
        # The lead waits for twice as long, from when it hears that an anchor is here.
        self._beside_s = placement.outage_budget_s / 2
        self._snapshots = checkpoint.snapshots_folder(placement, workdir)
        self._elsewhere = bool(placement.worker_addresses)
        """Workers have their files on other machines, whoever leads."""
        self._lock = threading.Lock()
        self._outgoing: StandbyFeed | None = None
        self.number = 0
        """Number of the last thing that was appended."""
        self.on_written: Callable[[int], None] = lambda number: None
        """Called on the lead's thread with that number."""

    def prepare(self, run_id: str, held: Mapping[str, str]) -> StandbyFeed:
        """Return the stream of a standby that is not accepted yet, and has these
        files."""
        return StandbyFeed(self._workdir, run_id, self._alive_s, held)

    def begin(self, outgoing: StandbyFeed) -> None:
        """Send a copy of all files, then what is written. On the lead's thread."""
        with self._lock:
            if outgoing.ended:
                return
            self._outgoing = outgoing
        # Snapshots after what they make superfluous, which is deleted after they came.
        stages = (self._publishes, self._segments, self._snapshot_files, self._others)
        outgoing.begin(stages, self.number)

    def end(self, outgoing: StandbyFeed, error: WireError | None = None) -> None:
        """Send this standby nothing more."""
        outgoing.end(error)  # First: it may be about to begin.
        with self._lock:
            if self._outgoing is outgoing:
                self._outgoing = None

    def appended(self, path: Path, data: bytes, *, sync: bool) -> None:
        """Take note of bytes that were appended to a file."""
        self.number += 1
        self._append(
            follow.AppendedTo(
                number=self.number, path=self._name(path), sync=sync, data=data
            )
        )

    def put_aside(self, path: Path) -> None:
        """Take note of a file of the tape that was put aside."""
        self.number += 1
        self._append(follow.PutAside(number=self.number, path=self._name(path)))

    def published(self, path: Path) -> None:
        """Take note of a publish that is on disk."""
        self._send_ahead(self._following(), path, StandbyFeed.publish)

    def snapshot(self, path: Path) -> None:
        """Take note of a snapshot or another file that is whole."""
        with self._lock:
            if self._outgoing is not None:
                self._outgoing.snapshot(path)

    def heard(
        self, message: Heard, then: Callable[[], None], waits: Callable[[], None]
    ) -> None:
        """Take note of what a worker says that it has on its disk. then: called, on
        some thread, once records of it may be written. waits: called first if that
        takes a while."""
        if self._elsewhere:
            then()
            return
        match message:
            case MergePrepared(fragment=fragment, version=version):
                folder = self._workdir / run_files.PUBLISHES
                self.published(publishes.path_of(folder, fragment, version))
            case AnchorKept(fragment=fragment, version=version):
                path = self._snapshot_path(fragment, version)
                self._send_beside(path, then, waits)
                return
            case FragmentSaved(fragment=fragment, version=version):
                self.snapshot(self._snapshot_path(fragment, version))
        then()

    def _send_beside(
        self, path: Path, then: Callable[[], None], waits: Callable[[], None]
    ) -> None:
        """Send a file beside what is appended, then call the function. Without a
        standby call it at once: the next copy has the file."""
        outgoing = self._following()
        gone = self._send_ahead(outgoing, path, StandbyFeed.beside)
        if outgoing is None or gone is None:
            then()
            return
        waits()

        def wait() -> None:
            if not gone.wait(self._beside_s):
                why = f"{path} has not gone to it within {self._beside_s:g} s"
                self.end(outgoing, Busy(why))
                self._lost(why)
            then()

        threading.Thread(target=wait, name="diloco-beside", daemon=True).start()

    def _send_ahead(
        self,
        outgoing: StandbyFeed | None,
        path: Path,
        send: Callable[[StandbyFeed, Path], T],
    ) -> T | None:
        """Send a standby a file that has to go ahead of the records of it. Return None
        if nobody follows, or nobody any more."""
        if outgoing is None:
            return None
        try:
            return send(outgoing, path)
        except OSError as error:
            # The record would count there without it.
            self.end(outgoing, Busy(f"{path} cannot be read: {error}"))
            self._lost("a file cannot be read")
            return None

    def _following(self) -> StandbyFeed | None:
        with self._lock:
            return self._outgoing

    def _snapshot_path(self, fragment: int, version: Version) -> Path:
        return Path(fragment_path(self._snapshots, fragment, version))

    def _append(self, message: follow.AppendedTo | follow.PutAside) -> None:
        outgoing = self._following()
        self.on_written(self.number)
        if outgoing is not None and not outgoing.append(message):
            self.end(outgoing, Busy("the standby is too slow for what is written"))
            self._lost("too much waits for it")

    def _publishes(self) -> list[Path]:
        return sorted((self._workdir / run_files.PUBLISHES).glob("*/*.publish"))

    def _segments(self) -> list[Path]:
        return sorted((self._workdir / run_files.LOG).glob("log-*.bin"))

    def _snapshot_files(self) -> list[Path]:
        return sorted(Path(self._snapshots).rglob(f"*{SUFFIX}"))

    def _others(self) -> list[Path]:
        tape = self._workdir / run_files.TAPE
        named = (run_files.CONFIG, run_files.FACTS, run_files.ROSTER)
        paths = [*closed_segments(tape), tape, *(self._workdir / n for n in named)]
        source = sorted((self._workdir / run_files.SOURCE).glob("*"))
        return [path for path in (*paths, *source) if path.is_file()]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._workdir).as_posix()
