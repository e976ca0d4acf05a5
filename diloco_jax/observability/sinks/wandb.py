"""Curves in Weights & Biases, under the run's id, so that a coordinator that comes back
goes on with them.

Where to, and with which key, is said to wandb itself: `wandb login` or WANDB_API_KEY,
WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline.
"""

from __future__ import annotations

import os

import wandb

from diloco_jax.observability.sinks import Point, RunOf

PROJECT = "diloco"
"""Unless WANDB_PROJECT names another."""


class WeightsAndBiases:
    """One run of wandb. Each island, fragment and merged model has an axis of its own:
    their steps, versions and cycles, which know nothing of each other."""

    def __init__(self, run: RunOf, attempt: int) -> None:
        """Begin the run there, or go on with it."""
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.run_id,
            name=run.workdir.name,
            dir=str(run.workdir),
            config=dict(run.config),
            resume="allow",
        )
        self._known: set[str] = set()
        self._row: dict[str, float] = {}
        """Values of one line that were not handed on yet."""
        self._at: tuple[str, int] | None = None
        """Axis of that line, and the place on it."""

    def write(self, point: Point) -> None:
        """Take a point; those of one line go as one row."""
        axis = point.axis
        if self._at != (axis, point.step):
            self.flush()
            self._at, self._row = (axis, point.step), {axis: point.step}
        if point.curve not in self._known:
            self._known.add(point.curve)
            self._run.define_metric(point.curve, step_metric=axis)
        self._row[point.curve] = point.value

    def flush(self) -> None:
        """Hand the last line on; wandb sends it by itself."""
        if self._row:
            self._run.log(self._row)
        self._at, self._row = None, {}

    def close(self) -> None:
        """Hand on what was taken, and end the run's life here."""
        self.flush()
        self._run.finish()
