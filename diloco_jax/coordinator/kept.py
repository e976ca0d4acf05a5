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

from diloco_jax import run_files, storage
from diloco_jax.coordinator.holding.publishes import require_space
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


@dataclasses.dataclass(kw_only=True)
class _Cycle:
    """A cycle that is being written."""

    number: int
    fragments: dict[int, KeepFragment] = dataclasses.field(default_factory=dict)
    """Those that are on disk."""
    given_up: bool = False


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
        self._cycle = _Cycle(number=-1)
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
        cycle = self._begun(keep.cycle)
        if cycle.given_up or keep.cycle < cycle.number:
            return
        scratch = path_of(self._folder, keep.cycle, TEMPORARY)
        try:
            _write_fragment(self._folder, self._whose, keep, _at_hand(keep, theta))
            cycle.fragments[keep.fragment] = keep
            if len(cycle.fragments) < len(self._sizes):
                return
            self._finish(scratch, cycle)
        except Exception as error:
            # Not the run's business: it goes on, and somebody is told.
            logger.error("cycle %d is not kept: %s", keep.cycle, error)
            cycle.given_up = True
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

    def _begun(self, number: int) -> _Cycle:
        """Return the cycle that is being written; a new one replaces the last."""
        if number > self._cycle.number:
            self._remove_torn()
            self._cycle = _Cycle(number=number)
        return self._cycle

    def _remove_torn(self) -> None:
        for torn in self._folder.glob(f"{NAME}*{TEMPORARY}"):
            shutil.rmtree(torn, ignore_errors=True)

    def _finish(self, scratch: Path, cycle: _Cycle) -> None:
        if self._source.is_dir():
            (scratch / run_files.SOURCE).mkdir(exist_ok=True)
            for path in self._source.iterdir():
                shutil.copyfile(path, scratch / run_files.SOURCE / path.name)
        kept = cycle.fragments.values()
        tokens = sum(k.tokens * self._sizes[k.fragment] for k in kept)
        facts = {
            **self._whose,
            "cycle": cycle.number,
            "merges": sum(k.merges for k in kept),
            "tokens": tokens // sum(self._sizes),
        }
        write_json(facts, scratch / FACTS)
        sync_path(scratch)
        final = path_of(self._folder, cycle.number)
        if final.exists():  # After a crash ticks, and with them cycles, go on later.
            shutil.rmtree(final)
        scratch.rename(final)
        sync_path(self._folder)
        for old in self.numbers()[: -self._keep]:
            shutil.rmtree(path_of(self._folder, old), ignore_errors=True)


def telling(tell: Callable[[FromHolder], None]) -> Done:
    """Return a function that tells the lead what becomes of a cycle."""

    def done(cycle: int, trouble: str) -> None:
        if trouble:
            tell(HolderTroubled(text=trouble))
        tell(CycleKept(cycle=cycle))

    return done


def _at_hand(keep: KeepFragment, theta: Theta) -> list[Any]:
    try:
        return theta()
    except WireError as error:
        raise _NotFetched(
            f"fragment {keep.fragment} did not come from its worker: {error}"
        ) from error


def _write_fragment(
    folder: Path, whose: dict[str, Any], keep: KeepFragment, theta: list[Any]
) -> None:
    scratch = path_of(folder, keep.cycle, TEMPORARY)
    scratch.mkdir(parents=True, exist_ok=True)
    arrays = [np.asarray(array) for array in theta]
    require_space(scratch, sum(array.nbytes for array in arrays))
    facts = {
        **whose,
        "cycle": keep.cycle,
        "fragment": keep.fragment,
        "version": list(keep.version),
    }
    storage.write_sealed(scratch / fragment_name(keep.fragment), facts, arrays)


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
