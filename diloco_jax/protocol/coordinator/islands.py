"""The islands of a run, each as the coordinator knows it, and all of them together.

Most events change one island, and there may be many. What is asked about all of them
after every event is kept as one changes, so that nobody has to look at each.

An island's steps and speed are bounded by the coordinator's clock (`WallTime`). One
that lies could otherwise make any number of steps at once, and end the run or outweigh
all others; or call itself fast, idle, and make the others' merges small; or call itself
slow, and make them wait. So each claimed step uses up wall time, and an island's step
time is about that of its claimed steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from diloco_jax.protocol.messages import Donor, Phase, Span

FIRST_LEASE_STEPS = 64
"""Steps for which data is granted before an island's speed is known."""
GRANTS_AT_ONCE = 4.0
"""Largest grants that an island may be given in a moment."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Positions granted to an incarnation; `offset` sequences were granted before."""

    offset: int
    span: Span


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """An ended incarnation with a delta that may still be merged. Its leases are those
    of the steps that are in no other merge."""

    island: str
    incarnation: int
    sequences_per_step: int
    leases: tuple[Lease, ...]
    in_merges: tuple[Span, ...]


SHORTEST_STEP_S = 1e-4
"""Shortest step time that is believed of any island, in seconds."""
FASTER = 2.0
"""Claimed steps per wall second that are believed, as a multiple of those of the
shortest believed step: a wrong config must not put out an honest island."""
LATE_S = 1.0
"""Wall time that the first incarnation of an island begins with: messages may come
late."""
NEAR = 2.0
"""Largest ratio between a step time that is believed and the wall time per step of the
latest reports: it is a median, to which stalls and evaluations do not belong."""


class WallTime(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of an incarnation by the coordinator's clock, in seconds."""

    heard_at: float = 0.0
    """Time of its last hello or report."""
    unused_s: float = LATE_S
    """Wall time that no claimed step has used up."""
    training_s: float = 0.0
    """Wall time in training; it counts for less as it gets older."""
    steps: float = 0.0
    """Steps claimed in that time, which count for less likewise."""
    stepped_at: float = 0.0
    """Time of the last report in training that had more steps; 0: none since it began,
    or was away."""
    stepping_s: float = 0.0
    """Wall time between such reports, which ages only as steps are made: a step may
    take longer than anything is remembered in `training_s`."""
    stepped: float = 0.0
    """Steps in that time, which age likewise."""
    carried: bool = False
    """An incarnation of this name came from an earlier term."""

    @property
    def least_step_s(self) -> float:
        """Shortest step time by the latest claims, in seconds; 0: nothing is known."""
        # One step more may be under way.
        return self.training_s / (NEAR * (self.steps + 1))

    @property
    def most_step_s(self) -> float:
        """Longest step time by the latest claims, in seconds; infinity: nothing is
        known yet, for messages may come late."""
        if self.training_s < LATE_S:
            return math.inf
        shown_s = self.training_s / max(self.steps, 1.0)
        if self.stepped:
            shown_s = max(shown_s, self.stepping_s / self.stepped)
        return NEAR * shown_s

    def next_incarnation(
        self, now: float, most_s: float, under_way_s: float
    ) -> WallTime:
        """Return the wall time of the next incarnation, which keeps at most `most_s`
        unused. Its speed is measured on: else a liar would come again before each
        merge. under_way_s: of a step that began unheard."""
        unused_s = min(self.unused_s + now - self.heard_at + under_way_s, most_s)
        return msgspec.structs.replace(
            self, heard_at=now, unused_s=unused_s, stepped_at=0.0
        )

    def unused_at(self, now: float, most_s: float) -> float:
        """Return the unused wall time at the next message, before its claims. most_s:
        that is kept unused, unless there is more already (`claims.unheard`)."""
        return min(self.unused_s + now - self.heard_at, max(self.unused_s, most_s))

    def slept(self, seconds: float) -> WallTime:
        """Return the wall time after seconds that the coordinator's clock lacks."""
        stepped_at = self.stepped_at and self.stepped_at - seconds
        return msgspec.structs.replace(
            self, heard_at=self.heard_at - seconds, stepped_at=stepped_at
        )

    def heard(
        self, now: float, unused_s: float, steps: int, memory_s: float
    ) -> WallTime:
        """Return the wall time after a message with so many claimed steps, which leave
        `unused_s`. memory_s: age at which time in training counts for less than half;
        0: the time that has passed was none in training."""
        heard = {"heard_at": now, "unused_s": unused_s}
        if not memory_s:
            return msgspec.structs.replace(self, **heard, stepped_at=0.0)
        passed_s = now - self.heard_at
        kept = memory_s / (memory_s + passed_s)
        heard["training_s"] = self.training_s * kept + passed_s
        heard["steps"] = self.steps * kept + steps
        if steps and self.stepped_at:
            passed_s = now - self.stepped_at
            kept = memory_s / (memory_s + passed_s)
            heard["stepping_s"] = self.stepping_s * kept + passed_s
            heard["stepped"] = self.stepped * kept + steps
        if steps:
            heard["stepped_at"] = now
        return msgspec.structs.replace(self, **heard)


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
    lookahead: int = 0
    """Boundaries from a request to its take."""
    gives_at: tuple[str, ...] = ()
    """As in its hello."""
    complaints: dict[str, float] = {}
    """Islands of its region that say it failed them; until when that counts."""
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
    def who(self) -> dict[str, Any]:
        """Name and incarnation, as records have them."""
        return {"island": self.name, "incarnation": self.incarnation}

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
    def lookahead_seconds(self) -> float:
        """Seconds from a request to its take, without the rest of the current step."""
        return self.lookahead * self.believed_step_s

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
        if island.status == "live":
            after.expiry = min(self.expiry, island.lease_until)
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


DONORS = 2
"""Islands of a region that have a publish from the coordinator, at most, unless both
fail the others. The second has it from the first while that is well."""


def donors(
    islands: Islands, regions: Mapping[str, str], what: str, now: float
) -> dict[str, tuple[Donor, ...]]:
    """Return which islands of each region give a publish to the others, by region.

    Of the live ones rendezvous hashing orders those that have an address: each publish
    has other donors, and while an island is away only its own publishes move to others.
    One that failed two live islands, or the only other one, gives nothing: an island
    asks no more who failed it, and its word alone takes no donor from the others. A
    region with fewer than two live islands has none: nobody is there to be given to.

    regions: as in `PolicyConfig`. what: name of the publish.
    """

    def place(name: str) -> bytes:
        return hashlib.blake2b(f"{what}/{name}".encode(), digest_size=8).digest()

    found: dict[str, list[Island]] = {}
    for name in sorted(islands.standing.answering, key=place):
        if (region := regions.get(name)) is not None:
            found.setdefault(region, []).append(islands[name])
    chosen = {}
    for region, live in found.items():
        enough = min(2, len(live) - 1)
        fit = [
            Donor(island=one.name, addresses=one.gives_at)
            for one in live
            if one.gives_at
            and sum(one.complaints.get(o.name, now) > now for o in live) < enough
        ]
        if fit:
            chosen[region] = tuple(fit[:DONORS])
    return chosen


class Absences(msgspec.Struct, frozen=True, kw_only=True):
    """Absences in a running run. Times are those of the events."""

    due: dict[str, float] = msgspec.field(default_factory=dict)
    """When people are told of each island that is absent; when they were, if it is in
    `told`."""
    told: tuple[str, ...] = ()
    """Islands whose absence people were told, and whose return they were not."""
    back_due: float | None = None
    """When people are told of those of them that are back."""
    none_due: float | None = None
    """When people are told that no island is left; None while one is live."""
    none_told: bool = False


NOBODY = Absences()
"""Nobody is absent: every state in which that is so holds this one."""
