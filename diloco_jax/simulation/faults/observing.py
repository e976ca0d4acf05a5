"""Observation of a run: its observations, and the error for a wrong one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.records import Durable
from diloco_jax.protocol.values import DeltaKey, Outstanding, Version
from diloco_jax.simulation.faults.arrays import Anchor, Delta
from diloco_jax.simulation.faults.gatherer import Opened

Incarnation = tuple[str, int]
"""Island and incarnation."""
Key = tuple[str, int, int, int]
"""Identity of a take: island, incarnation, fragment, tick."""


class ViolationError(Exception):
    """An invariant that does not hold.

    invariant: its name. what: the observation, and what had to hold.
    """

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what


class Invariant:
    """Observer of a run. Records are those of the log; steps count from 0."""

    name: ClassVar[str]
    effects: ClassVar[tuple[type, ...]] = ()
    """Types of the effects at which it looks, or of the messages and records in them:
    `carrying_out` is called for no others, and `decided` for no step without one.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config

    def hold(self, holds: bool, what: str, *values: object) -> None:
        """Raise ViolationError unless it holds. values: put into the braces of `what`,
        others behind it; they cost nothing as long as it holds, unlike a formatted
        string.
        """
        if not holds:
            placed = what.count("{}")
            text = [what.format(*values[:placed]), *map(str, values[placed:])]
            raise ViolationError(self.name, " ".join(text))

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        """Observe a step of the protocol and its effects; nothing of it is visible
        yet."""

    def stepped(self, state: State, changed: Sequence[Island], *, writes: bool) -> None:
        """Observe the state after any step, and the islands that it changed. writes:
        the log does not have all of it yet, since records are among the effects."""

    def ending(self, before: State, after: State, now: float) -> None:
        """Observe a step of the protocol, at a time of its clock, once the run stops;
        nothing of it is visible yet."""

    def persisted(self, record: Durable) -> None:
        """Observe that a record is on the disk."""

    def prepared(self, fragment: int, version: Version, digest: str) -> None:
        """Observe that the publish of a computed merge is whole on the disk."""

    def cut(
        self,
        fragment: int,
        saved: Sequence[Version],
        published: Mapping[Version, bytes],
    ) -> None:
        """Observe that publishes were deleted: the versions of the snapshots of a
        fragment, and the publishes that are left.
        """

    def restored(self, fragment: int, anchor: Anchor) -> None:
        """Observe that a coordinator comes up with this anchor, after `recovered`."""

    def arrived(self, key: DeltaKey) -> None:
        """Observe that a delta has arrived at the worker of its fragment."""

    def worker_died(self, fragments: Sequence[int]) -> None:
        """Observe that the worker of these fragments died."""

    def worker_away(self, fragments: Sequence[int]) -> None:
        """Observe that the lead is about to hear of a worker's death."""

    def worker_back(self, fragments: Sequence[int]) -> None:
        """Observe that the lead is about to hear of a worker's return."""

    def lost(self, fragments: tuple[int, ...]) -> None:
        """Observe that workers have lost these fragments, and say so."""

    def carrying_out(self, effect: AnyEffect) -> None:
        """Observe that an effect is about to be visible."""

    def recovered(self, state: State) -> None:
        """Observe the state from which a coordinator goes on."""

    def opened(self, opened: Opened) -> None:
        """Observe a new term of a coordinator that had lost its state; the old log is
        gone.
        """

    def published(self, fragment: int, anchor: Anchor) -> None:
        """Observe that the coordinator holds a version, which islands may fetch."""

    def adopted(
        self, who: Incarnation, fragment: int, anchor: Anchor, *, kept: bool
    ) -> None:
        """Observe that an island adopted an anchor.

        kept: the delta of the island's last take stays beside it.
        """

    def took(self, who: Incarnation, take: Outstanding, delta: Delta) -> None:
        """Observe that an island took a fragment: the entry in its books, and the
        arrays.
        """

    def trained(self, who: Incarnation, step: int, positions: np.ndarray) -> None:
        """Observe that an island began a step on these positions of the data."""

    def finished(self, state: State) -> None:
        """Observe the end of the run."""
