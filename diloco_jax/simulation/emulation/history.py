"""Events of an emulation, as arrays. Times are virtual seconds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np

from diloco_jax.island.timing import LOSS_STEPS
from diloco_jax.protocol.messages import Measures

if TYPE_CHECKING:
    import pandas

Table = dict[str, np.ndarray]
"""Columns by name, all of one length; a matrix has a column per island."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """Tables of an emulation. Rows about an island or fragment name it.

    Attributes:
      islands: names, in the order of the columns of matrices.
      merges: time, tokens (of the run, not lost, as far as reported), fragment,
        version, final (of the flush), contributions (tokens by island, 0 = not in it),
        share (of all tokens per second that is in it), norm (of the merged delta),
        digest (of Theta's fragment).
      steps: island, incarnation, step, began, time (its end), loss (nats per token),
        learning_rate. Completed ones only.
      takes: island, incarnation, fragment, time, arrived (NaN = never).
      adoptions: island, incarnation, fragment, version, time.
      lives: island, incarnation, began, first_step (NaN = none), ended, steps, end
        (why).
      evaluations: time, tokens, loss: of the global parameters.
    """

    islands: tuple[str, ...]
    merges: Table
    steps: Table
    takes: Table
    adoptions: Table
    lives: Table
    evaluations: Table

    def frame(self, name: str) -> pandas.DataFrame:
        """Return one of the tables; a matrix's columns are called
        `contributions.ISLAND`.
        """
        import pandas

        columns: dict[str, Any] = {}
        for key, values in getattr(self, name).items():
            if values.ndim == 1:
                columns[key] = values
                continue
            for island, column in zip(self.islands, values.T, strict=True):
                columns[f"{key}.{island}"] = column
        return pandas.DataFrame(columns)

    def write(self, folder: Path) -> None:
        """Write one CSV file per table."""
        folder.mkdir(parents=True, exist_ok=True)
        for field in dataclasses.fields(self):
            if field.name != "islands":
                self.frame(field.name).to_csv(folder / f"{field.name}.csv", index=False)


@dataclasses.dataclass(kw_only=True)
class Diary:
    """Events of one incarnation of an island, while it runs."""

    island: str
    incarnation: int
    tokens_per_step: int
    began: float
    compile_seconds: float
    ended: float | None = None
    end: str = ""
    steps: int = 0
    """Completed steps; the columns may have one more, which has begun."""
    step_began: list[float] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[SupportsFloat] = dataclasses.field(default_factory=list)
    skipped: list[SupportsFloat] = dataclasses.field(default_factory=list)
    """1 for a skipped step, whose loss or gradient was not finite; else 0."""
    predicted: list[SupportsFloat] = dataclasses.field(default_factory=list)
    """Sum of the weights of a step's predictions."""
    learning_rates: list[float] = dataclasses.field(default_factory=list)
    takes: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """Fragment and time of each take."""
    arrived: list[float] = dataclasses.field(default_factory=list)
    """Time of arrival, by take; NaN if it has not arrived."""
    adoptions: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    """Fragment, version and time of each adoption."""
    versions: dict[int, int] = dataclasses.field(default_factory=dict)
    """Version adopted last, by fragment."""
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_join: int = 0

    def took(self, fragment: int, now: float) -> None:
        """Note a take, whose delta is on its way."""
        self.takes.append((fragment, now))
        self.arrived.append(math.nan)

    def delivered(self, fragment: int, now: float) -> None:
        """Note that the newest delta of the fragment has arrived."""
        for index in range(len(self.takes) - 1, -1, -1):
            if self.takes[index][0] == fragment:
                self.arrived[index] = now
                return

    def adopted(self, fragment: int, version: int, now: float) -> None:
        """Note that the island adopted a published fragment."""
        self.adoptions.append((fragment, version, now))
        self.versions[fragment] = version

    def measures(self) -> Measures:
        """Return the measures that a real island would report (see `island.timing`)."""
        done = slice(self.steps)
        began, seconds = np.array(self.step_began[done]), self.step_seconds[done]
        fields: dict[str, Any] = {
            "compile_seconds": self.compile_seconds,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "bytes_join": self.bytes_join,
        }
        if not self.steps:
            return Measures(**fields)
        ends = began + seconds
        gaps = np.diff(ends, prepend=began[0])
        losses = [float(loss) for loss in self.losses[done][-LOSS_STEPS:]]
        return Measures(
            steps=self.steps,
            skipped_steps=sum(map(int, map(float, self.skipped[done]))),
            tokens_predicted=round(math.fsum(map(float, self.predicted[done]))),
            median_step_seconds=float(np.median(gaps)),
            max_step_gap_seconds=float(np.max(gaps)),
            step_seconds_total=math.fsum(seconds),
            stalled_seconds=max(0.0, math.fsum(gaps) - math.fsum(seconds)),
            loss=statistics.fmean(losses),
            learning_rate=self.learning_rates[self.steps - 1],
            first_step_unix=float(began[0]),
            last_step_unix=float(ends[-1]),
            **fields,
        )


MERGE_COLUMNS = (
    *("time", "tokens", "fragment", "version", "final"),
    *("contributions", "share", "norm", "digest"),
    *("pairwise_cosine", "cosine_to_last", "length_ratio", "step_ratio"),
)


def collect(
    diaries: Mapping[str, Sequence[Diary]],
    merges: Sequence[tuple[Any, ...]],
    evaluations: Sequence[tuple[float, int, float]],
) -> History:
    """Collect the history of closed diaries; rows of `merges` as in MERGE_COLUMNS."""
    steps, takes, adoptions, lives = [], [], [], []
    for d in itertools.chain.from_iterable(diaries.values()):
        who = (d.island, d.incarnation)
        for index in range(d.steps):
            began = d.step_began[index]
            end = began + d.step_seconds[index]
            loss, rate = float(d.losses[index]), d.learning_rates[index]
            steps.append((*who, index, began, end, loss, rate))
        for (fragment, time), arrived in zip(d.takes, d.arrived, strict=True):
            takes.append((*who, fragment, time, arrived))
        adoptions += [(*who, *adoption) for adoption in d.adoptions]
        first = d.step_began[0] if d.step_began else math.nan
        lives.append((*who, d.began, first, d.ended, d.steps, d.end))
    who_columns = ("island", "incarnation")
    return History(
        islands=tuple(diaries),
        merges=_table(MERGE_COLUMNS, merges),
        steps=_table(
            (*who_columns, "step", "began", "time", "loss", "learning_rate"), steps
        ),
        takes=_table((*who_columns, "fragment", "time", "arrived"), takes),
        adoptions=_table((*who_columns, "fragment", "version", "time"), adoptions),
        lives=_table(
            (*who_columns, "began", "first_step", "ended", "steps", "end"), lives
        ),
        evaluations=_table(("time", "tokens", "loss"), evaluations),
    )


def outages(history: History) -> Mapping[str, list[float | None]]:
    """Return the seconds from an island's end to its next first step, by island.

    The value is None if there was no further step.
    """
    found: dict[str, list[float | None]] = {name: [] for name in history.islands}
    lives = history.lives
    for name in history.islands:
        mine = np.flatnonzero(lives["island"] == name)
        for before, after in itertools.pairwise(mine):
            away = lives["first_step"][after] - lives["ended"][before]
            found[name].append(None if math.isnan(away) else float(away))
    return found


def _table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Table:
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return {name: np.array(v) for name, v in zip(columns, values, strict=True)}
