"""The phases of a run, as they are seen from outside while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fault_cases import FRAGMENTS, ISLANDS, Case

from diloco_jax import run_files
from diloco_jax.observability.tape import NewLines, read_lines

LOOK_S = 0.01
"""Seconds between two looks at a run."""
PATIENCE_S = 240.0
"""Seconds after which a run is ended that has not."""
SETTLED_MERGES = 2
"""Merges of all islands before a phase counts."""


class Phase:
    """Tells that a settled run is in a phase: call it with the workdir, often.

    idle: no island is asked for anything. transfer: the victim has taken a delta that
    is not merged. merge: the coordinator merges, as a file says.
    """

    def __init__(
        self, phase: str, victim: str, islands: tuple[str, ...], merging: Path
    ) -> None:
        """merging: the file of `slow_mean.py`."""
        self._phase, self._victim = phase, victim
        self._islands, self._merging = set(islands), merging
        self._tail: NewLines | None = None
        self._merges = 0
        self._open: dict[int, set[str]] = {}
        """Islands that have taken, by tick."""

    def __call__(self, workdir: Path) -> bool:
        """Read what is new on the tape, and tell."""
        if self._tail is None:
            self._tail = NewLines(workdir / run_files.TAPE)
        for record in self._tail:
            self.note(record)
        return self._merges >= SETTLED_MERGES and self._is_now()

    def _is_now(self) -> bool:
        if self._phase == "merge":
            return self._merging.exists()
        if self._phase == "transfer":
            return any(self._victim in took for took in self._open.values())
        return not self._open

    def note(self, record: dict[str, Any]) -> None:
        """Take a line of the tape into account."""
        kind = record["kind"]
        if kind == "tick":
            self._open[record["tick"]] = set()
        elif kind in ("merged", "skipped"):
            self._open.pop(record["tick"], None)
        if kind == "island" and record["record"]["kind"] == "took":
            self._open.get(record["record"]["tick"], set()).add(record["island"])
        elif kind == "merged":
            whole = {part["island"] for part in record["contributions"]}
            self._merges += whole == self._islands


class Recovery:
    """Tells that nothing strikes any more, and that every island was merged since then,
    killed ones in the life that followed."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._tail: NewLines | None = None
        self._merged: dict[str, tuple[float, int]] = {}
        """Time of an island's last merge, and its incarnation."""
        self._fit: set[tuple[str, int]] = set()
        """Islands and fragments that were merged since the last refusal."""
        self._refused = 0

    def __call__(self, workdir: Path) -> bool:
        """Read what is new on the tape, and tell."""
        if self._tail is None:
            self._tail = NewLines(workdir / run_files.TAPE)
        for record in self._tail:
            self.note(record)
        try:
            struck = list(read_lines(workdir / run_files.CHAOS))
        except FileNotFoundError:
            struck = []
        if len(struck) < len(self._case.strikes):
            return False
        over = max((s["time"] + s["seconds"] for s in struck), default=0.0)
        if self._case.spoiled and not self._refused:
            return False
        return all(
            self._merged.get(name, (0.0, 0)) > (over, self._kills(name))
            and self._merged[name][1] > self._kills(name)
            and all((name, number) in self._fit for number in range(FRAGMENTS))
            for name in ISLANDS
        )

    def note(self, record: dict[str, Any]) -> None:
        """Take a line of the tape into account."""
        if record["kind"] == "refused":
            self._refused += 1
            self._fit.clear()
        elif record["kind"] == "merged":
            for part in record["contributions"]:
                name = part["island"]
                self._merged[name] = record["time"], part["incarnation"]
                self._fit.add((name, record["fragment"]))

    def _kills(self, name: str) -> int:
        return sum(s.kind == "kill" and name in s.who for s in self._case.strikes)


def open_ticks(tape: list[dict[str, Any]], time: float) -> list[int]:
    """Return the ticks whose fragments were neither merged nor given up at a time."""
    open_then: dict[int, None] = {}
    for record in tape:
        if record["time"] > time:
            break
        if record["kind"] == "tick":
            open_then[record["tick"]] = None
        elif record["kind"] in ("merged", "skipped"):
            open_then.pop(record["tick"], None)
    return list(open_then)


@contextlib.contextmanager
def ending(workdir: Path, recovered: Recovery) -> Iterator[threading.Event]:
    """End the run within the block once it has recovered, as by Ctrl-C, and say so."""
    over, ended = threading.Event(), threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not recovered(workdir) and time.monotonic() < deadline:
            if over.wait(LOOK_S * 10):
                return
        ended.set()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        thread.join()
