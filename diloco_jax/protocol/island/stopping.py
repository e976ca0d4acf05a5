"""The end of an island's steps: by its own count of the run's tokens, or by order."""

from __future__ import annotations

import msgspec


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the run, and of one step of this island."""

    total_tokens: int
    tokens_per_step: int

    def share_done(self, step: int, others_tokens: int) -> float:
        """Return the share of the run's tokens that is done before `step`. It is too
        high for a moment after another island lost steps."""
        return (others_tokens + step * self.tokens_per_step) / self.total_tokens

    def may_step(self, step: int, others_tokens: int, *, stop: bool) -> bool:
        """Tell whether `step` is to be made. stop: the coordinator said that the run
        has its tokens, or the island is about to leave."""
        return not stop and self.share_done(step, others_tokens) < 1
