"""Events of a run, emulated or recorded, as arrays."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco_jax.observability import plots

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Table = dict[str, np.ndarray]
"""Columns by name, all of one length; a matrix has a column per island."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "merges": (
        *("time", "tokens", "fragment", "version", "final"),
        *("contributions", "share", "norm", "digest"),
        *("pairwise_cosine", "cosine_to_last", "length_ratio", "step_ratio"),
    ),
    "steps": (
        *("island", "incarnation", "step", "began", "time"),
        *("loss", "learning_rate"),
    ),
    "takes": ("island", "incarnation", "fragment", "time", "arrived"),
    "adoptions": ("island", "incarnation", "fragment", "version", "time"),
    "lives": (
        *("island", "incarnation", "began", "first_step"),
        *("ended", "steps", "end"),
    ),
    "evaluations": ("time", "tokens", "loss"),
}
"""Columns of each table of a history."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """Tables of a run. Rows about an island or fragment name it.

    Times are virtual seconds in an emulation; in a recorded run they are seconds since
    its coordinator began, by the coordinator's clock when it heard of the event.

    Example:
      >>> from diloco_jax import Config, emulate, preset
      >>> config = Config().replace("model", preset("tiny"))
      >>> config = config.replace("islands.a.step_seconds", 1.0)
      >>> config = config.replace("total_tokens", 16_384)
      >>> history = emulate(config).history
      >>> history.frame("steps").columns[:3].tolist()
      ['island', 'incarnation', 'step']
      >>> axes = history.plot_timeline()
      >>> axes.get_xlabel()
      'virtual seconds'

    Attributes:
      islands: names, in the order of the columns of matrices.
      merges: time, tokens (of the run, not lost, as far as reported; NaN if recorded),
        fragment, version, final (of the flush), contributions (int [merges, islands]:
        tokens by island, 0 = not in it), share (of all tokens per second that is in
        it), norm (of the merged delta), digest (emulated: of Theta's fragment;
        recorded: of the encoded publish), and the measures of docs/metrics.md.
      steps: island, incarnation, step, began, time (its end), loss (nats per token),
        learning_rate. Completed ones only. In a recorded run a row covers all steps
        between two lines of metrics, a second or more apart; step is the last of them.
      takes: island, incarnation, fragment, time, arrived (NaN = never, or recorded).
      adoptions: island, incarnation, fragment, version, time.
      lives: island, incarnation, began, first_step (NaN = none), ended, steps, end
        (why; empty if it had not ended).
      evaluations: time, tokens (NaN if recorded), loss: of the global parameters.
      recorded: True for a run of real processes, False for an emulation.
    """

    islands: tuple[str, ...]
    merges: Table
    steps: Table
    takes: Table
    adoptions: Table
    lives: Table
    evaluations: Table
    recorded: bool = False

    def frame(self, name: str) -> pandas.DataFrame:
        """Return one of the tables; a matrix's columns are called
        `contributions.ISLAND`. Raises KeyError if there is no such table."""
        import pandas

        columns: dict[str, Any] = {}
        for key, values in self._table(name).items():
            if values.ndim == 1:
                columns[key] = values
                continue
            for island, column in zip(self.islands, values.T, strict=True):
                columns[f"{key}.{island}"] = column
        return pandas.DataFrame(columns)

    def absences(self, island: str) -> list[tuple[float, float]]:
        """Return the end of each life of an island but the last, and the seconds from
        there to its next first step; NaN if there was none."""
        lives = self.lives
        mine = np.flatnonzero(lives["island"] == island)
        return [
            (float(end := lives["ended"][one]), float(lives["first_step"][after] - end))
            for one, after in itertools.pairwise(mine)
        ]

    def write(self, folder: Path) -> None:
        """Write one CSV file per table."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in COLUMNS:
            self.frame(name).to_csv(folder / f"{name}.csv", index=False)

    def plot_timeline(
        self,
        begin: float = 0.0,
        end: float | None = None,
        *,
        title: str | None = None,
        axes: Axes | None = None,
    ) -> Axes:
        """Draw who computed, sent and adopted when, one lane per island.

        Args:
          begin, end: seconds that are shown; None = to the last event.
          title: None = what the history shows, in one sentence.
          axes: where to draw; None = a figure of its own.

        Returns:
          The matplotlib axes. Takes and adoptions are drawn while they can be told
          apart; choose a shorter time to see them.
        """
        return plots.timeline(self, begin, end, title, axes)

    def plot_loss(
        self,
        *,
        final: float | None = None,
        title: str | None = None,
        axes: Axes | None = None,
    ) -> Axes:
        """Draw the training loss of every island over time, and the validation losses.

        Args:
          final: validation loss at the end, nats per token; drawn as a line.
          title: None = from where to where the loss falls.
          axes: where to draw; None = a figure of its own.

        Returns:
          The matplotlib axes.
        """
        return plots.losses(self, final, title, axes)

    def _table(self, name: str) -> Table:
        if name not in COLUMNS:
            raise KeyError(f"no table {name!r}; there are {', '.join(COLUMNS)}")
        found: Table = getattr(self, name)
        return found


def outages(history: History) -> Mapping[str, list[float | None]]:
    """Return the seconds from an island's end to its next first step, by island.

    The value is None if there was no further step.
    """
    return {
        name: [None if math.isnan(s) else s for _, s in history.absences(name)]
        for name in history.islands
    }


def table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Table:
    """Return the columns of rows."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return {name: np.array(v) for name, v in zip(columns, values, strict=True)}


def of_rows(
    islands: tuple[str, ...],
    rows: Mapping[str, Sequence[tuple[Any, ...]]],
    *,
    recorded: bool = False,
) -> History:
    """Return the history with these rows of each table, in the order of COLUMNS."""
    tables: Any = {name: table(COLUMNS[name], rows.get(name, ())) for name in COLUMNS}
    return History(islands=islands, recorded=recorded, **tables)
