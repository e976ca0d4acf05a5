"""Model copies behind an island's steps and boundaries in virtual time, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from diloco_jax.island.mailbox import Arrival
from diloco_jax.protocol.island.books import Outcome
from diloco_jax.protocol.island.boundary import Arrays
from diloco_jax.simulation.virtual.merging import VirtualFetch


class Body(Arrays, Protocol):
    """Model copy of an island, and how it is stepped; or no arrays (`NoBody`)."""

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> None:
        """Join with these anchors, in full, by fragment."""

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        """Return a later version, ready to be adopted."""

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        """Make one inner step on the sequences at these positions of the data."""


class NoBody:
    """A body without arrays."""

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> None: ...

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        return Arrival(fragment=fragment, version=fetched.version)

    def train(self, positions: np.ndarray, learning_rate: float) -> None: ...

    def take(self, fragment: int) -> None: ...

    def adopt(self, arrival: Arrival, *, keep: bool) -> None: ...

    def judge(self, fragment: int, outcome: Outcome) -> None: ...
