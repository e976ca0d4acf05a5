"""The order of an island's fetches, and the version that each continues from.

A join fetches every fragment in full, JOIN_FETCHES at a time. After the join, fetches
run one at a time, the fragment that lags most first. A fetch continues from the
island's version, or is in full if the coordinator no longer keeps that chain. Every
host fetches its part; `agreed` tells what became of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Literal, NamedTuple

import msgspec

from diloco_jax.protocol.values import NOTHING, Version

JOIN_FETCHES = 4
"""Most fragments that a join fetches at a time."""


class Fetch(NamedTuple):
    """One fetch, for every host of the island."""

    fragment: int
    want: Version
    have: Version | None
    """The version to continue from; None: in full."""
    accepted: Version | None
    """The newest version that all hosts have; publishes after it must not be used."""


Outcome = Literal["done", "gone", "lost"]
"""gone: the version is not kept any more; lost: the connection is lost."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a fetch on one host."""

    outcome: Outcome
    chain: int | None = None
    """Publishes that came, if it is done; None: the anchor in full."""


def agreed(parts: Sequence[Part]) -> Outcome:
    """Return what became of a fetch on the island, whose hosts adopt together.

    If the coordinator drops publishes while hosts fetch them, some get the anchor in
    their place. These forms of a version are adopted by different programs, so it is
    gone: all hosts fetch again, in full.
    """
    outcomes = {part.outcome for part in parts}
    if "gone" in outcomes:
        return "gone"
    if "lost" in outcomes:
        return "lost"
    return "done" if len({part.chain for part in parts}) <= 1 else "gone"


class Fetching:
    """The versions that are wanted, under way and received. Not thread-safe."""

    def __init__(self, versions: Sequence[Version]) -> None:
        """versions: the versions to join with, or newer ones."""
        self._wanted = list(versions)
        self._have: list[Version | None] = [None] * len(versions)
        self._accepted: dict[int, Version] = {}
        self._under_way: set[int] = set()
        self._behind = set(range(len(versions)))
        """Fragments of which a newer version is wanted than the island has, or any."""

    @property
    def joined(self) -> bool:
        """True once every fragment was received."""
        return len(self._accepted) == len(self._wanted)

    @property
    def lags(self) -> bool:
        """True if a newer version is wanted than the island has, or any; its fetch may
        be under way."""
        return bool(self._behind)

    def want(self, fragment: int, version: Version) -> None:
        """Note a published version; versions older than a known one are ignored."""
        if version >= self._wanted[fragment]:
            self._wanted[fragment] = version
            self._compare(fragment)

    def next(self, away: Set[int] = frozenset()) -> Fetch | None:
        """Begin the next fetch; None if nothing lags or no more fetches may run at a
        time. Each fetch ends with `got`, `failed` or `gone`. away: fragments that
        cannot be fetched now, or belong to another lane, whose fetches do not count."""
        joined = self.joined
        lagging = [
            fragment
            for fragment in self._behind - self._under_way
            if fragment not in away and (joined or self._have[fragment] is None)
        ]
        limit = 1 if joined else JOIN_FETCHES
        if not lagging or len(self._under_way - away) >= limit:
            return None
        return self._begin(min(lagging, key=lambda f: (self.order(f), f)))

    def again(self, fragment: int) -> Fetch:
        """Begin a failed fetch of a join anew."""
        return self._begin(fragment)

    def order(self, fragment: int) -> Version:
        """Return the sort key of a lagging fragment: the lowest goes first."""
        return self._have[fragment] or NOTHING

    def got(self, fragment: int, version: Version) -> None:
        """Note a version that all hosts have now."""
        self._under_way.discard(fragment)
        self._have[fragment] = self._accepted[fragment] = version
        self._compare(fragment)

    def failed(self, fragment: int) -> None:
        """Note that a fetch brought nothing."""
        self._under_way.discard(fragment)

    def gone(self, fragment: int) -> None:
        """Note that the chain is no longer kept, or the version was overtaken: the next
        fetch is in full."""
        self._under_way.discard(fragment)
        self._have[fragment] = None
        self._compare(fragment)

    def disconnected(self) -> None:
        """Note that all fetches under way are lost."""
        self._under_way.clear()

    def _begin(self, fragment: int) -> Fetch:
        self._under_way.add(fragment)
        return Fetch(
            fragment=fragment,
            want=self._wanted[fragment],
            have=self._have[fragment],
            accepted=self._accepted.get(fragment),
        )

    def _compare(self, fragment: int) -> None:
        have = self._have[fragment]
        if have is None or have < self._wanted[fragment]:
            self._behind.add(fragment)
        else:
            self._behind.discard(fragment)
