"""The order of an island's fetches, and the version that each goes on from.

A join fetches every fragment in full, JOIN_FETCHES at a time. After it, fetches go one
at a time: first the fragment that lags most, from the version that is here on, or in
full where that chain is not kept any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.protocol.values import Version

JOIN_FETCHES = 4
"""Fragments fetched at a time by a join."""
NOTHING = Version(0, 0)


class Fetch(NamedTuple):
    """One fetch, for every host of the island."""

    fragment: int
    want: Version
    have: Version | None
    """The version to go on from; None: in full."""
    accepted: Version | None
    """The newest version that all hosts have; what came after it is not to be used."""


class Fetching:
    """The versions that are wanted, under way and here. Not thread-safe."""

    def __init__(self, versions: Sequence[Version]) -> None:
        """versions: those to join with, or newer ones."""
        self._wanted = list(versions)
        self._have: list[Version | None] = [None] * len(versions)
        self._accepted: dict[int, Version] = {}
        self._under_way: set[int] = set()

    @property
    def joined(self) -> bool:
        """True once every fragment has been here."""
        return len(self._accepted) == len(self._wanted)

    def want(self, fragment: int, version: Version) -> None:
        """Notes a published version; older ones than known are ignored."""
        self._wanted[fragment] = max(self._wanted[fragment], version)

    def next(self) -> Fetch | None:
        """Begins the next fetch; None if as many as may be are under way, or nothing
        lags. Each ends with `got`, `failed` or `gone`."""
        limit = 1 if self.joined else JOIN_FETCHES
        lagging = [f for f in range(len(self._wanted)) if self._lags(f)]
        if not lagging or len(self._under_way) >= limit:
            return None
        return self._begin(min(lagging, key=self.order))

    def again(self, fragment: int) -> Fetch:
        """Begins a fetch anew that failed during a join."""
        return self._begin(fragment)

    def order(self, fragment: int) -> Version:
        """Sorts the fragments that lag: the lowest goes first."""
        return self._have[fragment] or NOTHING

    def got(self, fragment: int, version: Version) -> None:
        """Notes a version that all hosts have now."""
        self._under_way.discard(fragment)
        self._have[fragment] = self._accepted[fragment] = version

    def failed(self, fragment: int) -> None:
        """Notes that a fetch brought nothing."""
        self._under_way.discard(fragment)

    def gone(self, fragment: int) -> None:
        """Notes that the chain is not kept any more, or the version was overtaken: the
        next fetch is in full."""
        self._under_way.discard(fragment)
        self._have[fragment] = None

    def disconnected(self) -> None:
        """Notes that everything under way is lost."""
        self._under_way.clear()

    def _begin(self, fragment: int) -> Fetch:
        self._under_way.add(fragment)
        return Fetch(
            fragment=fragment,
            want=self._wanted[fragment],
            have=self._have[fragment],
            accepted=self._accepted.get(fragment),
        )

    def _lags(self, fragment: int) -> bool:
        have = self._have[fragment]
        if fragment in self._under_way or (not self.joined and have is not None):
            return False
        return have is None or have < self._wanted[fragment]
