"""Events of an emulated island while it runs, and the history that they become."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np

from diloco_jax.island.timing import LOSS_STEPS
from diloco_jax.observability.history import History, of_rows
from diloco_jax.protocol.messages import Measures


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


def collect(
    diaries: Mapping[str, Sequence[Diary]],
    merges: Sequence[tuple[Any, ...]],
    evaluations: Sequence[tuple[float, int, float]],
) -> History:
    """Collect the history of closed diaries; rows as in COLUMNS."""
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
    rows: dict[str, Sequence[tuple[Any, ...]]] = {
        "merges": merges,
        "steps": steps,
        "takes": takes,
        "adoptions": adoptions,
        "lives": lives,
        "evaluations": evaluations,
    }
    return of_rows(tuple(diaries), rows)
