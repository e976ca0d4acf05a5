"""The history of a recorded run, from its tape and its metrics."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.errors import ConfigError
from diloco_jax.observability.history import History, of_rows
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import Repeats, read_tape

PAUSE_S = 1.0
"""Seconds beyond twice its steps' usual time from which an interval has a pause."""
MEASURES = ("norm", "pairwise_cosine", "cosine_to_last", "length_ratio", "step_ratio")

Line = Mapping[str, Any]


def read_history(workdir: str | Path) -> History:
    """Return the history of a run from its workdir, while it goes on or afterwards.

    It reads all of the tape and of `metrics.jsonl`, and keeps a row for every event.

    Args:
      workdir: of `diloco run`, of a coordinator, or `LocalCluster.workdir`.

    Raises:
      ConfigError: the folder has no tape.
      TapeError: the tape was altered, or is damaged.
    """
    workdir = Path(workdir)
    if not (workdir / run_files.TAPE).exists():
        raise ConfigError(
            f"{workdir} has no {run_files.TAPE}, so no run was recorded there; give "
            f"the workdir of a run"
        )
    reader = _Reader()
    for line in read_tape(workdir / run_files.TAPE):
        reader.read(line)
    try:
        reader.measured(list(read_metrics(workdir)))
    except FileNotFoundError:
        reader.measured([])  # It has only just begun.
    return reader.history()


@dataclasses.dataclass(kw_only=True)
class _Life:
    """One incarnation of an island; times as on the tape."""

    began: float
    first_step: float = math.nan
    ended: float = math.nan
    absent: float = math.nan
    steps: int = 0
    end: str = ""


class _Reader:
    def __init__(self) -> None:
        self._begin: float | None = None
        self._last = 0.0
        self._lives: dict[tuple[str, int], _Life] = {}
        self._repeats = Repeats()
        self._merged: list[Line] = []
        self._rows: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def read(self, line: Line) -> None:
        """Take in a line of the tape."""
        if self._begin is None:
            self._begin = line["time"]
        kind, now = line["kind"], line["time"] - self._begin
        self._last = now
        if kind == "merged":
            self._merged.append(line)
        if kind == "joined":
            self._lives[line["island"], line["incarnation"]] = _Life(began=now)
        life = self._lives.get((line.get("island", ""), line.get("incarnation", 0)))
        if life is None:
            return
        if kind == "island" and not self._repeats.seen(line):
            self._fact(line["island"], line["incarnation"], line["record"], now, life)
        elif kind == "absent":
            life.absent = now
        elif kind == "resumed":
            life.absent = math.nan
        elif kind == "left":
            life.ended = now if math.isnan(life.absent) else life.absent
            life.steps, life.end = line["steps"], line["reason"]

    def _fact(
        self, island: str, incarnation: int, record: Line, now: float, life: _Life
    ) -> None:
        step, fragment = record["step"], record["fragment"]
        if not step:
            return  # It joins.
        life.steps = max(life.steps, step)
        if math.isnan(life.first_step):
            life.first_step = now
        who = (island, incarnation, fragment)
        if record["kind"] == "took":
            self._rows["takes"].append((*who, now, math.nan))
        elif record["kind"] == "adopted":
            self._rows["adoptions"].append((*who, record["version"][1], now))

    def measured(self, lines: list[dict[str, Any]]) -> None:
        """Take in all lines of the metrics, after the tape."""
        begin = self._begin or 0.0
        starts: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for (island, incarnation), life in self._lives.items():
            starts[island].append((life.began, incarnation))
        before: dict[tuple[str, int], tuple[float, int]] = {}
        measures: dict[tuple[int, int], Line] = {}
        for line in lines:
            now = line["time"] - begin
            if line["kind"] == "merge":
                measures[line["fragment"], line["version"]] = line
            elif line["kind"] == "merged_model":
                loss = line["eval_loss"]
                self._rows["evaluations"].append((now, math.nan, _number(loss)))
            elif known := starts.get(line.get("island", "")):
                at = bisect.bisect(known, (now, math.inf)) - 1
                who = (line["island"], known[max(0, at)][1])
                self._steps(who, line, now, before)
        names = self._islands()
        for merge in self._merged:
            self._merge(merge, names, measures)

    def _steps(
        self,
        who: tuple[str, int],
        line: Line,
        now: float,
        before: dict[tuple[str, int], tuple[float, int]],
    ) -> None:
        """Add a row for the steps since the line before."""
        last, step = before.get(who, (self._lives[who].began, 0))
        if step < line["step"]:
            usual = (line["step"] - step) * line["median_step_seconds"]
            # The steps come right before the line if they do not fill the time.
            paused = not step or now - last > 2 * usual + PAUSE_S
            began = max(last, now - usual) if paused else last
            loss = _number(line["loss"])
            row = (*who, line["step"] - 1, began, now, loss, line["learning_rate"])
            self._rows["steps"].append(row)
        before[who] = (now, line["step"])

    def _merge(
        self, line: Line, names: tuple[str, ...], measures: Mapping[Any, Line]
    ) -> None:
        fragment, version = line["fragment"], line["version"][1]
        tokens = dict.fromkeys(names, 0)
        for part in line["contributions"]:
            tokens[part["island"]] += part["tokens"]
        found = measures.get((fragment, version), {})
        self._rows["merges"].append(
            (
                line["time"] - (self._begin or 0.0),
                math.nan,
                fragment,
                version,
                line["final"],
                list(tokens.values()),
                line["share"],
                _number(found.get(MEASURES[0])),
                line["digest"],
                *(_number(found.get(name)) for name in MEASURES[1:]),
            )
        )

    def history(self) -> History:
        """Return what was read."""
        for (island, incarnation), life in self._lives.items():
            ended = self._last if math.isnan(life.ended) else life.ended
            self._rows["lives"].append(
                (
                    *(island, incarnation, life.began, life.first_step),
                    *(ended, life.steps, life.end),
                )
            )
        return of_rows(self._islands(), self._rows, recorded=True)

    def _islands(self) -> tuple[str, ...]:
        return tuple(sorted({island for island, _ in self._lives}))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
