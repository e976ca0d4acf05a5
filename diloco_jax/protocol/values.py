"""Values in events, records and effects: versions, data, deltas, records of islands.

Steps count from 0 within an incarnation. Intervals of steps are half-open. `tokens`
counts the tokens of one island.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

Phase = Literal["joining", "compiling", "training", "stopped"]
BEGINNING: tuple[Phase, ...] = ("joining", "compiling")
"""Phases of an island before its first step."""
Verdict = Literal["merged", "pending", "refused", "none"]

ISLAND_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Pattern of an island's name, which appears in paths, commands and log lines."""

# Bounds every count that decisions use: above that of any run, and far below the limit
# of 64-bit integers.
MAX_COUNT = 2**48
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
MOST_POSITION = MAX_COUNT // 2
"""Largest position that an island may say it knows: a term that begins there has room
for all that it grants."""
CountOrNone = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""A count, or -1 for none."""
Rate = Annotated[float, Meta(ge=0, le=1e9)]
Term = Annotated[int, Meta(ge=0, le=2**20)]

LEAD = 2
"""Boundaries between a decision and its time, where several hosts must have it; more
than the steps dispatched ahead, so that no host waits."""


def lead_of(hosts: int) -> int:
    """Return the boundaries between a decision of an island and its time."""
    return LEAD if hosts > 1 else 0


class Version(NamedTuple):
    """Version of a fragment. A coordinator that lost its state opens a new term."""

    term: Term = 1
    number: Count = 0

    def next(self) -> Version:
        """Return the version that the next merge makes."""
        return Version(self.term, self.number + 1)


FIRST_VERSION = Version()
NOTHING = Version(0, 0)
"""Below every version."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared merge: digest and length of its encoded publish, which is on disk."""

    digest: str
    payload_bytes: int


class Span(NamedTuple):
    """Half-open range of positions in the global shuffled index."""

    start: int
    stop: int


OfFragment = Literal["took", "adopted", "reopened", "dropped", "reset", "carried"]
RecordKind = Literal[OfFragment, "granted", "progress", "restored"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One asynchronous fact about an island, numbered per incarnation by `seq`.

    Kinds and their fields:
    `took` (fragment, tick, start, version, rate_sum): the steps [start, step) entered
    the delta against the anchor of that version; the sum is of their learning rates.
    `adopted` (fragment, version, tick): the version lacks the take of `tick`, whose
    steps stay in the local parameters; an incarnation begins with the versions adopted
    at step 0. `reopened` (fragment, tick): a refused delta's steps are still in the
    local parameters. `dropped` (fragment, tick): they are not. `reset`: as `dropped`,
    and the local parameters are the anchor's. `carried` (fragment, start): an earlier
    term's books settle the steps before `start`. `granted` (start, stop): data
    positions. `progress` (value): the other islands' tokens behind the learning rate;
    negative if those islands lost more in an earlier term than they have computed
    since. `restored`: the incarnation begins with the moments that incarnation `start`
    had after `value` steps, and with its residual of the fragment if one is given.
    """

    seq: Count
    kind: RecordKind
    step: Count
    fragment: CountOrNone = -1
    tick: CountOrNone = -1
    version: Version = FIRST_VERSION
    start: Count = 0
    stop: Count = 0
    value: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    rate_sum: Rate = 0.0
    """Sum of the learning rates of a take's steps; 0: unknown."""


class Outstanding(msgspec.Struct, frozen=True, kw_only=True):
    """A take whose verdict the island does not know; the island still holds the bytes.
    `seq` is the number of its record."""

    fragment: Count
    tick: Count
    start: Count
    end: Count
    base: Version
    seq: Count
    rate_sum: Rate = 0.0
    """Sum of the learning rates of its steps; 0: unknown."""


class DeltaKey(NamedTuple):
    """Identity of a delta."""

    island: str
    incarnation: int
    fragment: int
    tick: int


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The last final verdict on an island's takes, sent again if it may be lost."""

    tick: int
    verdict: Verdict
    reason: str


class Contribution(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One delta in a merge."""

    island: str
    incarnation: int
    tick: int
    start: int
    end: int
    tokens: int
    base: Version
    norm: float = 0.0
    """Length of the delta; 0: unknown."""
    rate_sum: float = 0.0
    """Sum of the learning rates of its steps, as the island says; 0: unknown."""

    @property
    def steps(self) -> int:
        """Steps whose effect is in the delta."""
        return self.end - self.start
