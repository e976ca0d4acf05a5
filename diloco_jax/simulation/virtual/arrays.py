"""Arrays behind a run in virtual time, or none: merges, fetches and model copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from diloco_jax.island.mailbox import Arrival
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.island.books import Outcome
from diloco_jax.protocol.island.boundary import Arrays
from diloco_jax.protocol.values import DeltaKey, Prepared, Refusal, Version


class VirtualFetch(NamedTuple):
    """Fragment on its way to an island."""

    version: Version
    nbytes: int
    data: Any
    """Data from which `body.Body.arrival` makes arrays."""


class Received(NamedTuple):
    """A delta as merges need it; why it is unfit, or ""; and its length, if known."""

    delta: Any
    refusal: Refusal = ""
    norm: float = 0.0


class Merging(Protocol):
    """Arrays of the coordinator."""

    def receive(self, key: DeltaKey, encoded: Any) -> Received:
        """Take in a delta that arrived."""

    def compute(self, merge: Merge, deltas: Sequence[Any]) -> Prepared:
        """Compute a merge and keep it; return its digest and length once it is
        prepared.
        """

    def commit(self, fragment: int, version: Version) -> None:
        """Make the computed merge the current version."""

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        """Return the publishes from `have` to `want`, or the newest version in full."""


class NoArrays:
    """Merges without arrays; only versions and bytes.

    bytes_down: bytes of an encoded publish, by fragment.
    bytes_full: bytes of an anchor in full, by fragment.
    """

    def __init__(self, bytes_down: tuple[int, ...], bytes_full: tuple[int, ...]):
        self._bytes_down, self._bytes_full = bytes_down, bytes_full

    def receive(self, key: DeltaKey, encoded: Any) -> Received:
        return Received(None)

    def compute(self, merge: Merge, deltas: Sequence[Any]) -> Prepared:
        return Prepared(digest="", payload_bytes=self._bytes_down[merge.fragment])

    def commit(self, fragment: int, version: Version) -> None: ...

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        if have is None or have.term != want.term:
            return VirtualFetch(want, self._bytes_full[fragment], None)
        behind = want.number - have.number
        return VirtualFetch(want, behind * self._bytes_down[fragment], None)


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
