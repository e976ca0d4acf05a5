"""Space on the coordinator's disks: bytes that must be free, and writes that wait.

The bytes that must be free follow from the size of the state (`settings.state_sizes`),
as those of `diloco plan` do.

Islands train on while the coordinator cannot write. So a write that finds no space, or
no free file, is repeated for as long as islands last without the coordinator, and
people are told. No other error of a disk is repeated, since what is on the disk is then
unknown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco_jax import checkpoint
from diloco_jax.config import Config
from diloco_jax.coordinator.holding.publishes import SPARED_BYTES
from diloco_jax.coordinator.settings import next_snapshots, state_sizes
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.errors import PASSING, lack, remedy
from diloco_jax.files import is_bucket

logger = logging.getLogger(__name__)

WORKDIR, CHECKPOINTS = "workdir", "checkpoints"


class DiskNeed:
    """The folders that a coordinator writes to, and the bytes that each must have
    free."""

    def __init__(self, config: Config, plan: FragmentPlan, workdir: Path) -> None:
        """config: with a resolved outer optimizer. plan: that of the model."""
        self._placement, self._fragments = config.placement, len(plan.sizes)
        self._sizes = state_sizes(config.run, plan)
        self.folders = {WORKDIR: workdir}
        elsewhere = config.placement.checkpoints
        self._snapshots: Path | None = None
        """Folder of snapshots on a disk; None if they are in a bucket, or on the
        machines of workers."""
        if elsewhere and not is_bucket(elsewhere):
            self.folders[CHECKPOINTS] = Path(elsewhere)
        if not (is_bucket(elsewhere) or config.placement.worker_addresses):
            folder = checkpoint.snapshots_folder(config.placement, workdir)
            self._snapshots = Path(folder)

    def free(self, status: Mapping[str, Any]) -> dict[Path, int]:
        """Return the bytes that each folder must have free for the next round of
        snapshots and the publishes meanwhile. Of folders on one disk the first has what
        all of them need, and the others nothing. status: see `summary.status`."""
        needed = dict.fromkeys(self.folders.values(), 0)
        if not self._placement.worker_addresses:
            merges_per_s = status["merges"] / max(status["seconds"], 1.0)
            publish = self._sizes.publish / self._fragments
            round_s = self._placement.snapshot_every_s
            needed[self.folders[WORKDIR]] += round(merges_per_s * publish * round_s)
        if self._snapshots is not None:
            state, largest, _ = self._sizes
            held = _bytes_in(self._snapshots)
            where = self.folders.get(CHECKPOINTS, self.folders[WORKDIR])
            needed[where] += next_snapshots(self._placement, state, largest, held)
        return _by_disk(needed)


def _by_disk(needed: Mapping[Path, int]) -> dict[Path, int]:
    found, firsts = dict[Path, int](), dict[int, Path]()
    for folder, octets in needed.items():
        first = firsts.setdefault(_disk_of(folder), folder)
        found.setdefault(folder, 0)
        found[first] += octets + (SPARED_BYTES if first == folder else 0)
    return found


def _disk_of(folder: Path) -> int:
    """Return the number of the disk that a folder is on, or will be made on."""
    made = next(f for f in (folder, *folder.absolute().parents) if f.exists())
    return made.stat().st_dev


def _bytes_in(folder: Path) -> int:
    found = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # It was removed meanwhile.
                found += os.stat(os.path.join(where, name)).st_size
    return found


AGAIN_S = 0.5
"""Pause before a write that found no space is repeated, in seconds."""


class DiskWait:
    """Repeats writes of small files. Any thread may read `alerts`."""

    def __init__(self, patience_s: float, ended: Callable[[], bool]) -> None:
        """patience_s: longest wait for one write. ended: asked between two attempts;
        once it is true, nothing is waited for."""
        self._patience_s, self._ended = patience_s, ended
        self.touch: Callable[[], None] = lambda: None
        """Called between two attempts: the thread that waits does not hang."""
        self._waiting: dict[str, str] = {}
        """Waits, by the name of the data to be written."""
        self._over: list[str] = []

    @property
    def alerts(self) -> list[str]:
        """One alert for each kind of data that cannot be written at the moment."""
        return list(self._waiting.values())

    def over(self) -> list[str]:
        """Return one line for each wait that has ended since the last call."""
        over, self._over = self._over, []
        return over

    def until_written(self, what: str, write: Callable[[], None]) -> None:
        """Repeat `write` until there is room for it.

        Raises OSError, naming the file, the deadline and the remedy, if there is none
        in time. Any other error of the disk is raised at once.
        """
        began = time.monotonic()
        while True:
            try:
                write()
                break
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                waited_s = time.monotonic() - began
                if self._ended() or waited_s >= self._patience_s:
                    raise given_up(what, waited_s, self._patience_s, error) from error
                self._tell(
                    what,
                    f"{what} waits for {lack(error)} in {error.filename} "
                    f"({error.strerror}), and no merge ends meanwhile; islands train "
                    f"on: {remedy(error)} within {self._patience_s:g} s (4 * "
                    f"placement.outage_budget_s), or the coordinator ends",
                )
            self.touch()
            time.sleep(AGAIN_S)
        if self._waiting.pop(what, None):
            waited_s = time.monotonic() - began
            self._over.append(f"{what} waited {waited_s:.1f} s to be written")

    def once(self, what: str, write: Callable[[], None]) -> None:
        """Call `write` once, as `put_off` runs a block."""
        with self.put_off(what):
            write()

    @contextmanager
    def put_off(self, what: str) -> Iterator[None]:
        """Run the block; a full disk, or no free file, raises an alert instead of an
        error.

        The caller tries again later.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in PASSING:
                raise
            self._tell(
                what,
                f"{what} cannot be written to {error.filename} ({error.strerror}) and "
                f"is tried again; {remedy(error)}",
            )
        else:
            self._waiting.pop(what, None)

    def _tell(self, what: str, text: str) -> None:
        if what not in self._waiting:
            logger.warning("%s", text)
        self._waiting[what] = text


def given_up(what: str, waited_s: float, patience_s: float, error: OSError) -> OSError:
    """Return the error of a write that was repeated for as long as islands wait."""
    return OSError(
        error.errno,
        f"{what} could not be written for {waited_s:.0f} s ({error.strerror}), of "
        f"{patience_s:g} (4 * placement.outage_budget_s) in which islands wait for it; "
        f"mend that disk, or {remedy(error)}, and start the coordinator again",
        error.filename,
    )
