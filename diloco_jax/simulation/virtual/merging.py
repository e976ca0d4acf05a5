"""What stands behind merges and fetches in virtual time: arrays, or nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

from diloco_jax.protocol.coordinator.events import Merge
from diloco_jax.protocol.reasons import Refusal
from diloco_jax.protocol.values import DeltaKey, Version


class VirtualFetch(NamedTuple):
    """A fragment on its way to an island."""

    version: Version
    nbytes: int
    data: Any
    """What `body.Body.arrival` makes arrays of."""


class Merging(Protocol):
    """The coordinator's arrays."""

    def put(self, key: DeltaKey, encoded: Any) -> Refusal:
        """Keeps a delta that arrived; returns why it is unfit, or ""."""

    def drop(self, key: DeltaKey) -> None:
        """The delta is not needed any more; unknown ones are ignored."""

    def drop_island(self, island: str, before: int, kept: Collection[DeltaKey]) -> None:
        """Drops what incarnations of an island below `before` sent, but for `kept`."""

    def compute(self, merge: Merge) -> str:
        """Computes a merge and keeps it; returns its digest."""

    def commit(self, fragment: int, version: Version) -> None:
        """Makes the computed merge the current version."""

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        """What leads from `have` to `want`, or the newest version in full."""


class NoArrays:
    """Merges without arrays; only versions and bytes.

    bytes_down: of an encoded publish, by fragment.
    bytes_full: of an anchor in full, by fragment.
    """

    def __init__(self, bytes_down: tuple[int, ...], bytes_full: tuple[int, ...]):
        self._bytes_down, self._bytes_full = bytes_down, bytes_full

    def put(self, key: DeltaKey, encoded: Any) -> Refusal:
        """See Merging."""
        return ""

    def drop(self, key: DeltaKey) -> None:
        """See Merging."""

    def drop_island(self, island: str, before: int, kept: Collection[DeltaKey]) -> None:
        """See Merging."""

    def compute(self, merge: Merge) -> str:
        """See Merging."""
        return ""

    def commit(self, fragment: int, version: Version) -> None:
        """See Merging."""

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        """See Merging."""
        if have is None or have.term != want.term:
            return VirtualFetch(want, self._bytes_full[fragment], None)
        behind = want.number - have.number
        return VirtualFetch(want, behind * self._bytes_down[fragment], None)
