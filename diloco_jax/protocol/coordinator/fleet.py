"""A fragment's view of the islands: which of them count, and how fast they are."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from diloco_jax.protocol.coordinator import schedule
from diloco_jax.protocol.coordinator.state import (
    SHORTEST_STEP_S,
    PolicyConfig,
    State,
)

LONGER_STEP = 1.25
"""Duration of a slow step, as a multiple of the usual one."""


class Fleet:
    """The islands of one state."""

    def __init__(self, config: PolicyConfig, state: State) -> None:
        self._config, self._state = config, state
        self._running = state.phase == "running"
        self._latest_s: float | None = None

    def is_live(self, name: str) -> bool:
        """Tell whether the island can be waited for."""
        island = self._state.islands[name]
        return island.counted if self._running else island.answers

    def token_rate(self, name: str) -> float:
        """Return the island's tokens per second; 0 while its speed is unknown."""
        return self._state.islands[name].tokens_per_second

    def boundaries_after(self, name: str) -> int:
        """Return the boundaries by which an island must delay a take requested now.

        An island that could take at once waits for islands of about the pacing speed
        that take some boundaries later: otherwise it would be merged without them."""
        if self._latest_s is None:
            self._latest_s = schedule.longest_lead_seconds(self._config, self._state)
        island = self._state.islands[name]
        if not (self._latest_s and island.counted and island.step_seconds):
            return 0
        ahead_s = self._latest_s - island.lead_seconds
        return max(0, round(ahead_s / max(island.step_seconds, SHORTEST_STEP_S)))

    def step_seconds(self) -> float:
        """Return the step time of the pacing island, in seconds."""
        return schedule.pacing_step_seconds(self._config, self._state)

    def take_seconds(self, names: AbstractSet[str]) -> float:
        """Return the seconds from a request until the named islands of about the pacing
        speed have taken, the slowest after a slow step; 0 if there is no such island.
        """
        alike = schedule.alike(self._config, self._state)
        steps_s = [alike[name].step_seconds for name in names & alike.keys()]
        if not any(steps_s):
            return 0.0
        lead_s = schedule.longest_lead_seconds(self._config, self._state)
        return lead_s + LONGER_STEP * max(steps_s)
