"""Where an island stands in the run: what its learning rate and its end go by."""

from __future__ import annotations

from diloco_jax.config import RunConfig
from diloco_jax.core.inner import learning_rate


class Pace:
    """Progress of one incarnation. Progress = (the others' tokens that are not lost +
    own ones) / total_tokens, monotone."""

    def __init__(
        self, run: RunConfig, tokens_per_step: int, *, warm: bool = False
    ) -> None:
        """warm: it does not begin with fresh moments."""
        self._rewarm_steps = 0 if warm else run.inner.rewarm_steps
        self._inner, self._total_tokens = run.inner, run.total_tokens
        self._tokens_per_step = tokens_per_step
        self._progress = 0.0

    def share_done(self, step: int, others_tokens: int) -> float:
        """Of the run's tokens, before `step`. Can be too high for a moment, when
        another island's steps were lost."""
        return (others_tokens + step * self._tokens_per_step) / self._total_tokens

    def learning_rate(self, step: int, others_tokens: int) -> float:
        """Of `step`, counted from 0. Call it once for every step, in order."""
        inner = self._inner
        # Monotone, though tokens may be lost elsewhere.
        self._progress = max(self._progress, self.share_done(step, others_tokens))
        rewarm = (step + 1) / self._rewarm_steps if self._rewarm_steps else 1.0
        return learning_rate(
            peak=inner.learning_rate,
            schedule=inner.schedule,
            warmup_fraction=inner.warmup_fraction,
            final_fraction=inner.final_fraction,
            progress=self._progress,
            rewarm=rewarm,
        )
