"""Bytes that the coordinator's folders must have free for what it writes next.

They follow from the size of the state (`sizes.py`), as those of `diloco plan` do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_jax import checkpoint
from diloco_jax.config import Config
from diloco_jax.coordinator.holding.publishes import SPARED_BYTES
from diloco_jax.coordinator.sizes import next_snapshots, state_sizes
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.files import is_bucket

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
