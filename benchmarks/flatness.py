"""The use of a run's processes and disk over time, and whether it stays flat."""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from machine import NOT_COUNTED, Watch, disk_bytes, number_of, processes

from diloco_jax import run_files

FIELDS = ("memory", "descriptors", "threads")
RECORDS = (
    *NOT_COUNTED,
    run_files.CURVES,
    run_files.TAPE,
    run_files.METRICS,
    run_files.CHAOS,
)
"""Files for people and for replay, which grow with the run's length."""


class Use(NamedTuple):
    """One look at one process."""

    time: float
    """Unix seconds."""
    name: str
    age_s: float
    """Seconds since the first look at this process."""
    memory: int
    """Bytes of its own, without mapped files."""
    descriptors: int
    threads: int


class Disk(NamedTuple):
    """One look at a workdir, in bytes."""

    time: float
    state: int
    """Snapshots, checkpoints, publishes and the log: what a restart reads."""
    total: int
    """The records included."""


class Growth(NamedTuple):
    """Medians of the first third of a time and of its last third."""

    name: str
    field: str
    first: float
    last: float

    @property
    def share(self) -> float:
        """By how much the last one is above the first, as a share."""
        return self.last / self.first - 1 if self.first else 0.0


class UseOverTime(Watch):
    """Looks at all processes of a run and at its disk."""

    def __init__(self, workdir: Path, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.uses: list[Use] = []
        self.disk: list[Disk] = []
        self._workdir = workdir
        self._seen: dict[str, float] = {}

    def _look(self) -> None:
        now = time.time()
        for name, folder in processes(self._workdir):
            age_s = now - self._seen.setdefault(folder.name, now)
            with contextlib.suppress(OSError, StopIteration):
                status = folder / "status"
                use = Use(
                    time=now,
                    name=name,
                    age_s=age_s,
                    memory=1024 * number_of(status, "RssAnon:"),
                    descriptors=sum(1 for _ in (folder / "fd").iterdir()),
                    threads=number_of(status, "Threads:"),
                )
                self.uses.append(use)
        total = disk_bytes(self._workdir, NOT_COUNTED)
        state = disk_bytes(self._workdir, RECORDS)
        self.disk.append(Disk(now, state, total))


def growths(
    uses: Sequence[Use], disk: Sequence[Disk], since: float, settled_s: float
) -> list[Growth]:
    """Return the growth of each process's use and of the state on disk.

    since: unix seconds from which looks count. settled_s: looks at younger processes
    are left out: a process that was killed begins anew.
    """
    found = []
    by_name = collections.defaultdict(list)
    for use in uses:
        if use.time >= since and use.age_s >= settled_s:
            by_name[use.name].append(use)
    for name, of in sorted(by_name.items()):
        for field in FIELDS:
            pairs = [(use.time, float(getattr(use, field))) for use in of]
            found += _growth(name, field, pairs)
    looks = [(look.time, float(look.state)) for look in disk if look.time >= since]
    return found + _growth("workdir", "disk", looks)


def _growth(
    name: str, field: str, pairs: Iterable[tuple[float, float]]
) -> list[Growth]:
    """Return one growth, or none without a look."""
    pairs = list(pairs)
    if not pairs:
        return []
    begin, end = pairs[0][0], pairs[-1][0]
    third = (end - begin) / 3
    first = [value for at, value in pairs if at <= begin + third]
    last = [value for at, value in pairs if at >= end - third]
    return [Growth(name, field, statistics.median(first), statistics.median(last))]
