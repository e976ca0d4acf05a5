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
        self.terms = 0
        """Terms that were opened after the first."""
        for name in OBSERVATIONS:
            setattr(self, name, functools.partial(self._observe, name))

    @property
    def names(self) -> Names:
        """See Monitor."""
        return self._monitor.names

    def take_back(self, after: int, terms: int | None = None) -> None:
        """Forget the records after this one; look at the rest again. terms: forget as
        well the terms that were opened after so many, if it is not None."""
        terms = self.terms if terms is None else terms
        if after >= self.last and terms >= self.terms:
            return
        first = self._records[after + 1] if after < self.last else len(self._journal)
        history, opened = [], 0
        for number, seen in enumerate(self._journal):
            opened += seen[0] == "opened"
            void = seen[0] in OF_ITS_DECISIONS or _is_noted(*seen[:2])
            void = void and number >= first
            if not (void or (seen[0] == "opened" and opened > terms)):
                history.append(seen)
        self._monitor, self._journal = Monitor(self.config), []
        self._records, self.last, self.terms = [], -1, 0
        for name, observation, facts in history:
            self._observe(name, *observation, **facts)

    def _observe(self, name: str, *observation: Any, **facts: Any) -> None:
        if name != "cut":  # It is about the disk at that moment.
            self._journal.append((name, observation, facts))
        self.terms += name == "opened"
        if name == "persisted" or _is_noted(name, observation):
            self.last += 1
            self._records.append(len(self._journal) - 1)
        getattr(self._monitor, name)(*observation, **facts)


def _is_noted(name: str, observation: tuple[Any, ...]) -> bool:
    """Tell if an observation is that of a record of the tape."""
    return name == "carrying_out" and isinstance(observation[0], Note)


Watching = Monitor | Lineage
"""A watcher of a run."""
