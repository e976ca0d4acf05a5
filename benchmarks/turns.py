"""Two groups of processes that take turns on the same cores, some seconds each, so that
whatever slows the machine for a while slows both."""

from __future__ import annotations

import bisect
import collections
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from machine import cpu_seconds

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Turns:
    """Stops one group with SIGSTOP while the other runs. Call it often."""

    def __init__(self, groups: Mapping[str, Sequence[int]], turn_s: float) -> None:
        """groups: two of them, pids by a name; the first begins."""
        self._groups, self._turn_s = dict(groups), turn_s
        self._running = ""
        self._since = 0.0
        self.turns: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        """Unix seconds from which and until which each group ran, its last turn
        aside."""
        self._cpu: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
        self._begun: dict[int, dict[str, float]] = {}
        for name in groups:
            self._signal(name, signal.SIGSTOP)
        self._give(next(iter(groups)))

    def __call__(self) -> None:
        """Sample CPU seconds, and let the other group run if it is time."""
        self._sample()
        if time.time() - self._since < self._turn_s:
            return
        (other,) = set(self._groups) - {self._running}
        self._signal(self._running, signal.SIGSTOP)
        self._sample()
        self.turns[self._running].append((self._since, time.time()))
        self._give(other)

    def end(self) -> None:
        """Let both run on."""
        for name in self._groups:
            self._signal(name, signal.SIGCONT)

    def ran(self, name: str, since: float, until: float) -> float:
        """Return for how many seconds of that time a group ran."""
        spans = ((max(a, since), min(b, until)) for a, b in self.turns[name])
        return sum(max(0.0, b - a) for a, b in spans)

    def cpu(self, pid: int, at: float) -> float:
        """Return the CPU seconds that a process had used by then."""
        samples = self._cpu[pid]
        index = bisect.bisect_left(samples, (at, 0.0))
        index = min(max(index, 1), len(samples) - 1)
        (a, before), (b, after) = samples[index - 1 : index + 1]
        share = min(max((at - a) / (b - a), 0.0), 1.0)
        return before + share * (after - before)

    def threads(self, pid: int) -> dict[str, float]:
        """Return the CPU seconds of a process's threads since the first turn began, by
        the kernel's names of them."""
        now = thread_seconds(pid)
        return {name: s - self._begun[pid].get(name, 0.0) for name, s in now.items()}

    def _give(self, name: str) -> None:
        self._running, self._since = name, time.time()
        self._sample()
        for pid in self._groups[name]:
            self._begun.setdefault(pid, thread_seconds(pid))
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: int) -> None:
        for pid in self._groups[name]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _sample(self) -> None:
        now = time.time()
        for pid in (pid for pids in self._groups.values() for pid in pids):
            with contextlib.suppress(OSError):
                self._cpu[pid].append((now, cpu_seconds(pid)))


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a process's threads so far, by the kernel's names of
    them, numbers left out; its first thread is "main"."""
    found: dict[str, float] = collections.defaultdict(float)
    for task, name, seconds in _threads(pid):
        found["main" if task == pid else name] += seconds
    return dict(found)


def _threads(pid: int) -> Iterator[tuple[int, str, float]]:
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            head, _, tail = (folder / "stat").read_text().rpartition(")")
            name = head.partition("(")[2].rstrip("0123456789").rstrip("-_/")
            user, system = tail.split()[11:13]
            yield int(folder.name), name, (int(user) + int(system)) / TICKS_PER_S
