"""Kept cycles: the global parameters of one cycle as a folder of the workdir.

`exports/cycle-N` has a sealed file for each fragment, cycle.json, and the small files
of the weights that the run started from. It gets its name when all of it is on disk.
"""

from __future__ import annotations

import logging
import mmap
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax import run_files, storage
from diloco_jax.coordinator.holding.fragment_snapshots import require_space
from diloco_jax.files import sync_path, write_json
from diloco_jax.protocol.holding import (
    CycleKept,
    FromHolder,
    HolderTroubled,
    KeepFragment,
)
from diloco_jax.wire.errors import WireError
from diloco_jax.wire.threads import DaemonPool

logger = logging.getLogger(__name__)

NAME, TEMPORARY = "cycle-", ".tmp"
FACTS = "cycle.json"
SUFFIX = ".fragment"

Done = Callable[[int, str], None]
"""Called once a cycle is kept or given up, with the reason for the latter."""
Theta = Callable[[], list[Any]]
"""Returns the arrays of a fragment, on the writer's thread; a worker's are fetched."""


class _NotFetched(Exception):  # noqa: N818
    """A fragment did not come from its worker."""


class KeptCycles:
    """The kept cycles of one run. They are written on a thread of their own, one at a
    time; a fragment's arrays are held until they are on disk."""

    def __init__(
        self, workdir: Path, keep: int, whose: dict[str, Any], sizes: Sequence[int]
    ) -> None:
        """keep: newest cycles that are kept. whose: facts of the run, see `checkpoint`.
        sizes: parameters by fragment."""
        self._folder = workdir / run_files.KEPT
        self._source = workdir / run_files.SOURCE
        self._keep, self._whose, self._sizes = keep, whose, sizes
        # A coordinator that has ended must not stay for a disk that hangs.
        self._writer = DaemonPool(1, "diloco-keep")
        self._cycle, self._given_up = -1, False
        """The cycle that is being written."""
        self._written: dict[int, KeepFragment] = {}
        """Its fragments that are on disk."""
        self._remove_torn()

    def keep(self, keep: KeepFragment, theta: Theta, done: Done) -> None:
        """Write a fragment of a cycle, later; `done` follows its last one, on the
        writer's thread."""
        self._writer.submit(self._write, keep, theta, done)

    def numbers(self) -> list[int]:
        """Return the cycles that are kept, oldest first."""
        return numbers(self._folder)

    def files(self, cycle: int) -> list[str]:
        """Return the names of a kept cycle's files, below its folder."""
        folder = path_of(self._folder, cycle)
        found = (path for path in folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(folder)) for path in found)

    def path(self, cycle: int, name: str) -> Path | None:
        """Return the path of one of the files; None if there is no such file."""
        if cycle not in self.numbers() or name not in self.files(cycle):
            return None
        return path_of(self._folder, cycle) / name

    def close(self, patience_s: float) -> None:
        """Accept no more fragments, and wait at most `patience_s` for those under
        way.
        """
        self._writer.close(patience_s)

    def _write(self, keep: KeepFragment, theta: Theta, done: Done) -> None:
        if keep.cycle > self._cycle:
            self._remove_torn()
            self._cycle, self._given_up, self._written = keep.cycle, False, {}
        if self._given_up or keep.cycle < self._cycle:
            return
        scratch = path_of(self._folder, keep.cycle, TEMPORARY)
        try:
            self._write_fragment(scratch, keep, theta)
            self._written[keep.fragment] = keep
            if len(self._written) < len(self._sizes):
                return
            self._finish(scratch)
        except Exception as error:
            # Not the run's business: it goes on, and somebody is told.
            logger.error("cycle %d is not kept: %s", keep.cycle, error)
            self._given_up = True
            shutil.rmtree(scratch, ignore_errors=True)
            why = str(error)
            if not isinstance(error, _NotFetched):
                why = (
                    f"it cannot be written to {self._folder} ({error}); free some "
                    f"space there"
                )
            done(keep.cycle, f"cycle {keep.cycle} is not kept: {why}")
            return
        logger.info("cycle %d is kept", keep.cycle)
        done(keep.cycle, "")

    def _write_fragment(self, scratch: Path, keep: KeepFragment, theta: Theta) -> None:
        try:
            arrays = [np.asarray(array) for array in theta()]
        except WireError as error:
            raise _NotFetched(
                f"fragment {keep.fragment} did not come from its worker: {error}"
            ) from error
        scratch.mkdir(parents=True, exist_ok=True)
        require_space(scratch, sum(array.nbytes for array in arrays))
        facts = {
            **self._whose,
            "cycle": keep.cycle,
            "fragment": keep.fragment,
            "version": list(keep.version),
        }
        storage.write_sealed(scratch / fragment_name(keep.fragment), facts, arrays)

    def _finish(self, scratch: Path) -> None:
        if self._source.is_dir():
            (scratch / run_files.SOURCE).mkdir(exist_ok=True)
            for path in self._source.iterdir():
                shutil.copyfile(path, scratch / run_files.SOURCE / path.name)
        kept = self._written.values()
        tokens = sum(k.tokens * self._sizes[k.fragment] for k in kept)
        facts = {
            **self._whose,
            "cycle": self._cycle,
            "merges": sum(k.merges for k in kept),
            "tokens": tokens // sum(self._sizes),
        }
        write_json(facts, scratch / FACTS)
        final = path_of(self._folder, self._cycle)
        if final.exists():  # After a crash ticks, and with them cycles, go on later.
            shutil.rmtree(final)
        scratch.rename(final)
        sync_path(self._folder)
        for old in self.numbers()[: -self._keep]:
            shutil.rmtree(path_of(self._folder, old), ignore_errors=True)

    def _remove_torn(self) -> None:
        for torn in self._folder.glob(f"{NAME}*{TEMPORARY}"):
            shutil.rmtree(torn, ignore_errors=True)


def telling(tell: Callable[[FromHolder], None]) -> Done:
    """Return a function that tells the lead what becomes of a cycle."""

    def done(cycle: int, trouble: str) -> None:
        if trouble:
            tell(HolderTroubled(text=trouble))
        tell(CycleKept(cycle=cycle))

    return done


def numbers(folder: Path) -> list[int]:
    """Return the cycles that are kept in a folder, oldest first."""
    names = (path.name.removeprefix(NAME) for path in folder.glob(f"{NAME}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(folder: Path, cycle: int, suffix: str = "") -> Path:
    """Return the folder of a cycle. suffix: of one that is not whole."""
    return folder / f"{NAME}{cycle:06d}{suffix}"


def fragment_name(fragment: int) -> str:
    """Return the name of a fragment's file."""
    return f"{fragment:05d}{SUFFIX}"


def mapped(path: Path) -> memoryview:
    """Map a file; its bytes stay readable after the file is deleted."""
    if not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def describe(cycles: Iterable[int]) -> str:
    """Return the numbers of cycles for people."""
    return ", ".join(map(str, cycles)) or "none"
