"""The learning rate of an island's steps, which follows the run's progress."""

from __future__ import annotations

from diloco_jax.config import RunConfig
from diloco_jax.core.learning_rate import learning_rate
from diloco_jax.protocol.island.boundary import Goal


def goal_of(run: RunConfig, batch_size: int) -> Goal:
    """Return the goal of an island with this batch size."""
    return Goal(
        total_tokens=run.total_tokens,
        tokens_per_step=batch_size * run.sequence_length,
        steps_per_cycle=run.sync.steps_per_cycle,
    )


class Pace:
    """Learning rates of one incarnation, which follow its progress.

    Progress = (the others' tokens that are not lost + own ones) / total_tokens,
    monotone.
    """

    def __init__(self, run: RunConfig, goal: Goal, *, warm: bool = False) -> None:
        """warm: the incarnation does not begin with fresh moments."""
        self._rewarm_steps = 0 if warm else run.inner.rewarm_steps
        self._inner, self._goal = run.inner, goal
        self._progress = 0.0

    def learning_rate(self, step: int, others_tokens: int) -> float:
        """Return the rate of `step`, counted from 0. Call it once for every step, in
        order."""
        done = self._goal.share_done(step, others_tokens)
        # Monotone, though tokens may be lost elsewhere.
        self._progress = max(self._progress, done)
        rewarm = (step + 1) / self._rewarm_steps if self._rewarm_steps else 1.0
        return learning_rate(self._inner, self._progress, rewarm)
