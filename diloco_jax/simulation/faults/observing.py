"""How a run is watched: observations, and what is raised when one must not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.records import (
    Durable,
)
from diloco_jax.protocol.values import Outstanding
from diloco_jax.simulation.faults.arrays import Anchor, Delta
from diloco_jax.simulation.faults.gatherer import Opened

Incarnation = tuple[str, int]
"""Island and incarnation."""
Key = tuple[str, int, int, int]
"""Which take: island, incarnation, fragment, tick."""


class ViolationError(Exception):
    """invariant: its name. what: what was seen, and what had to be."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what


class Invariant:
    """What can be observed. A record is one of the log; steps count from 0."""

    name: ClassVar[str]

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config

    def hold(self, holds: bool, what: str, *values: object) -> None:
        """Raises ViolationError unless it holds."""
        if not holds:
            raise ViolationError(self.name, " ".join([what, *map(str, values)]))

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        """The policy made a step; nothing of it is visible yet."""

    def persisted(self, record: Durable) -> None:
        """A record is on the disk."""

    def carrying_out(self, effect: AnyEffect) -> None:
        """An effect is about to be visible."""

    def recovered(self, state: State) -> None:
        """A coordinator goes on from this."""

    def opened(self, opened: Opened) -> None:
        """A coordinator that had lost its state begins a new term; what the log said
        before is gone."""

    def published(self, fragment: int, anchor: Anchor) -> None:
        """The coordinator holds a version, and sends it to whoever asks."""

    def adopted(
        self, who: Incarnation, fragment: int, anchor: Anchor, *, kept: bool
    ) -> None:
        """An island took over an anchor; kept: beside the delta of its last take."""

    def took(self, who: Incarnation, take: Outstanding, delta: Delta) -> None:
        """An island took a fragment: what its books say, and what is in the arrays."""

    def trained(self, who: Incarnation, step: int, positions: np.ndarray) -> None:
        """An island began a step on these positions of the data."""

    def finished(self, state: State) -> None:
        """The run is over."""
