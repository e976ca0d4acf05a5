"""The invariants of a run whose log goes on at another coordinator.

A standby that takes over from its log lacks records that nobody has seen, and one that
gathers lacks them all. What nobody has seen never was: all invariants look at the
history anew, without it.
"""

from __future__ import annotations

import functools
from typing import Any

from diloco_jax.protocol.coordinator.events import Note
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.simulation.faults.invariants import OBSERVATIONS, Monitor, Names
from diloco_jax.simulation.faults.observing import Invariant

OF_ITS_DECISIONS = frozenset(
    {"decided", "persisted", "prepared", "arrived", "recovered", "restored"}
)
"""Observations that are void from the first record on that never was, as are records of
the tape. Messages and commits stay: they wait for the records before them."""


class Lineage(Invariant):
    """A monitor that can take records back."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._monitor = Monitor(config)
        self._journal: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._records: list[int] = []
        """Places of the records of log and tape in the journal."""
        self.last = -1
        """Number of the last record, from the start of the run."""
        for name in OBSERVATIONS:
            setattr(self, name, functools.partial(self._observe, name))

    @property
    def names(self) -> Names:
        """See Monitor."""
        return self._monitor.names

    def take_back(self, after: int) -> None:
        """Forget the records after this one; look at the rest again."""
        if after >= self.last:
            return
        first = self._records[after + 1]
        history = self._journal[:first] + [
            seen
            for seen in self._journal[first:]
            if seen[0] not in OF_ITS_DECISIONS and not _is_noted(*seen[:2])
        ]
        self._monitor, self._journal = Monitor(self.config), []
        self._records, self.last = [], -1
        for name, observation, facts in history:
            self._observe(name, *observation, **facts)

    def _observe(self, name: str, *observation: Any, **facts: Any) -> None:
        if name != "cut":  # It is about the disk at that moment.
            self._journal.append((name, observation, facts))
        if name == "persisted" or _is_noted(name, observation):
            self.last += 1
            self._records.append(len(self._journal) - 1)
        getattr(self._monitor, name)(*observation, **facts)


def _is_noted(name: str, observation: tuple[Any, ...]) -> bool:
    """Tell if an observation is that of a record of the tape."""
    return name == "carrying_out" and isinstance(observation[0], Note)


Watching = Monitor | Lineage
"""A watcher of a run."""
