"""Kept cycles: the global parameters of one cycle as a folder of the workdir.

`exports/cycle-N` has a sealed file for each fragment, cycle.json, and the small files
of the weights that the run started from. It gets its name when all of it is on disk.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax import run_files, sealed
from diloco_jax.coordinator.publishes import require_space
from diloco_jax.files import write_json
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.wire.threads import DaemonPool

logger = logging.getLogger(__name__)

NAME, TEMPORARY = "cycle-", ".tmp"
FACTS = "cycle.json"
SUFFIX = ".fragment"

Done = Callable[[int, str], None]
"""Called once a cycle is kept or given up, with the reason for the latter."""


@dataclasses.dataclass(kw_only=True)
class _Cycle:
    """A cycle that is being written."""

    number: int
    waiting: set[int]
    merges: int = 0
    tokens: int = 0
    """Sum over the fragments, each weighted by its size."""
    given_up: bool = False


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
        self._cycle = _Cycle(number=-1, waiting=set())
        for torn in self._folder.glob(f"{NAME}*{TEMPORARY}"):
            shutil.rmtree(torn)

    def keep(self, keep: KeepFragment, theta: Sequence[Any], done: Done) -> None:
        """Write a fragment of a cycle; `done` follows its last one, on the writer's
        thread."""
        self._writer.submit(self._write, keep, list(theta), done)

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

    def _write(self, keep: KeepFragment, theta: list[Any], done: Done) -> None:
        if keep.cycle != self._cycle.number:
            waiting = set(range(len(self._sizes)))
            self._cycle = _Cycle(number=keep.cycle, waiting=waiting)
        cycle = self._cycle
        if cycle.given_up:
            return
        scratch = path_of(self._folder, keep.cycle, TEMPORARY)
        try:
            self._write_fragment(scratch, keep, theta)
            cycle.waiting.discard(keep.fragment)
            cycle.merges += keep.merges
            cycle.tokens += keep.tokens * self._sizes[keep.fragment]
            if cycle.waiting:
                return
            self._finish(scratch, cycle)
        except Exception as error:
            # Not the run's business: it goes on, and somebody is told.
            logger.exception("cycle %d is not kept", keep.cycle)
            cycle.given_up = True
            shutil.rmtree(scratch, ignore_errors=True)
            done(
                keep.cycle,
                f"cycle {keep.cycle} is not kept: it cannot be written to "
                f"{self._folder} ({error}); free some space there",
            )
            return
        logger.info("cycle %d is kept", keep.cycle)
        done(keep.cycle, "")

    def _write_fragment(
        self, scratch: Path, keep: KeepFragment, theta: list[Any]
    ) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        arrays = [np.asarray(array) for array in theta]
        require_space(scratch, sum(array.nbytes for array in arrays))
        facts = {
            **self._whose,
            "cycle": keep.cycle,
            "fragment": keep.fragment,
            "version": list(keep.version),
        }
        sealed.write(scratch / fragment_name(keep.fragment), facts, arrays)

    def _finish(self, scratch: Path, cycle: _Cycle) -> None:
        if self._source.is_dir():
            (scratch / run_files.SOURCE).mkdir(exist_ok=True)
            for path in self._source.iterdir():
                shutil.copyfile(path, scratch / run_files.SOURCE / path.name)
        facts = {
            **self._whose,
            "cycle": cycle.number,
            "merges": cycle.merges,
            "tokens": cycle.tokens // sum(self._sizes),
        }
        write_json(facts, scratch / FACTS)
        sealed.sync_path(scratch)
        final = path_of(self._folder, cycle.number)
        if final.exists():  # After a crash ticks, and with them cycles, go on later.
            shutil.rmtree(final)
        scratch.rename(final)
        sealed.sync_path(self._folder)
        for old in self.numbers()[: -self._keep]:
            shutil.rmtree(path_of(self._folder, old), ignore_errors=True)


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
