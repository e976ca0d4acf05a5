"""The islands of a run, each as the coordinator knows it, and all of them together.

Most events change one island, and there may be many. What is asked about all of them
after every event is kept as one changes, so that nobody has to look at each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from diloco_jax.protocol.coordinator.granted import GRANTS_AT_ONCE, Lease
from diloco_jax.protocol.coordinator.wall_time import WallTime
from diloco_jax.protocol.values import Phase


class Island(msgspec.Struct, frozen=True, kw_only=True):
    """A member. live: its reports come. absent: silent, but may return. gone: ended."""

    name: str
    incarnation: int
    session: str
    tokens_per_step: int
    sequences_per_step: int
    status: Literal["live", "absent", "gone"] = "live"
    phase: Phase = "joining"
    lease_until: float = 0.0
    steps: int = 0
    steps_at_tick: int = 0
    step_seconds: float = 0.0
    """As the island says; see `believed_step_s`."""
    lead: int = 0
    """Boundaries from a request to its take."""
    records_through: int = 0
    quarantined: bool = False
    """True if none of its deltas may be merged."""
    streak: int = 0
    """Deltas in a row that were unfit; while it is quarantined, those that were fit."""
    watches: bool = False
    """True if it can evaluate the merged model, and is not at it."""
    watched_cycle: int = 0
    """The last cycle that the incarnation was to watch."""
    tokens_before: int = 0
    """Tokens computed by earlier incarnations."""
    joins: int = 1
    fruitless: int = 0
    """Ended incarnations in a row that failed without a step."""
    leases: tuple[Lease, ...] = ()
    """Grants of which some step is in no merge; merges keep them few."""
    sequences_granted: int = 0
    granted_at: float = 0.0
    """Time of the last grant."""
    grants_left: float = GRANTS_AT_ONCE
    """Largest grants that the island might be given after it; see `leases.top_up`."""
    wall_time: WallTime = WallTime()

    @property
    def computed_tokens(self) -> int:
        """Tokens of all incarnations' reported steps."""
        return self.tokens_before + self.steps * self.tokens_per_step

    @property
    def tokens_per_second(self) -> float:
        """Speed of the island; 0 while it is unknown."""
        if not self.step_seconds:
            return 0.0
        step_s = max(self.believed_step_s, self.wall_time.least_step_s)
        return self.tokens_per_step / step_s

    @property
    def believed_step_s(self) -> float:
        """Step time for which others may wait; 0 while it is unknown. It may be shorter
        than what its reports show: a stall must not slow the pace for long."""
        return min(self.step_seconds, self.wall_time.most_step_s)

    @property
    def lead_seconds(self) -> float:
        """Seconds from a request to its take, without the rest of the current step."""
        return self.lead * self.believed_step_s

    @property
    def answers(self) -> bool:
        """True if the island can answer a take request."""
        return self.status == "live" and self.phase in ("training", "stopped")

    @property
    def counted(self) -> bool:
        """True if the island makes steps that pacing and requests may count on."""
        return self.status == "live" and self.phase == "training"


class Standing(msgspec.Struct, frozen=True):
    """Names of the islands by what may be expected of them, sorted."""

    live: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    answering: tuple[str, ...] = ()
    """Live islands that can answer a take request."""
    counted: tuple[str, ...] = ()
    """Live islands that fragments wait for."""
    quarantined: tuple[str, ...] = ()
    """Those that are gone, too."""


class Islands(dict[str, Island]):
    """Islands by name, and what follows from all of them.

    It is never changed: `having` returns another one.
    """

    __slots__ = ("computed_tokens", "expiry", "standing")

    def __init__(self, islands: Iterable[Island] = ()) -> None:
        super().__init__({island.name: island for island in islands})
        self.standing = _standing(self)
        self.computed_tokens = sum(i.computed_tokens for i in self.values())
        leases = (i.lease_until for i in self.values() if i.status == "live")
        self.expiry = min(leases, default=math.inf)
        """No lease of a live island ends before this time; one may end later."""

    def having(self, island: Island) -> Islands:
        """Return the islands with one replaced or added."""
        before = self.get(island.name)
        after = Islands.__new__(Islands)
        after.update(self)
        after[island.name] = island
        after.computed_tokens = self.computed_tokens + island.computed_tokens
        if before is not None:
            after.computed_tokens -= before.computed_tokens
        after.expiry = self.expiry
        if island.lease_until < self.expiry and island.status == "live":
            after.expiry = island.lease_until
        after.standing = self.standing
        if before is None or _differs(before, island):
            after.standing = _standing(after)
        return after


def _differs(before: Island, island: Island) -> bool:
    """Tell whether the island's standing may be another one."""
    return (
        before.status != island.status
        or before.phase != island.phase
        or before.quarantined != island.quarantined
    )


def _standing(islands: Mapping[str, Island]) -> Standing:
    ordered = sorted(islands.items())
    return Standing(
        live=tuple(name for name, i in ordered if i.status == "live"),
        absent=tuple(name for name, i in ordered if i.status == "absent"),
        answering=tuple(name for name, i in ordered if i.answers),
        counted=tuple(name for name, i in ordered if i.counted),
        quarantined=tuple(name for name, i in ordered if i.quarantined),
    )
