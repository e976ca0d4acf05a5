"""What events, records and effects are about: versions, data, deltas, islands' facts.

Steps count from 0 within an incarnation; intervals of steps are half-open; `tokens`
are of one island.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

Phase = Literal["joining", "compiling", "training", "stopped"]
Verdict = Literal["merged", "pending", "refused", "none"]

ISLAND_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Names are in paths, commands and lines of logs."""

# What decisions are computed from: more than any run has, and far from where whole
# numbers of 64 bits end.
MAX_COUNT = 2**48
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
CountOrNone = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""-1: there is none."""


class Version(NamedTuple):
    """A fragment's version. A coordinator that lost its state opens a new term."""

    term: int = 1
    number: int = 0

    def next(self) -> Version:
        """The version that the next merge makes."""
        return Version(self.term, self.number + 1)


FIRST_VERSION = Version()


class Span(NamedTuple):
    """Half-open range of positions in the global shuffled index."""

    start: int
    stop: int


OfFragment = Literal["took", "adopted", "reopened", "dropped", "reset", "carried"]
RecordKind = Literal[OfFragment, "granted", "progress", "restored"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One asynchronous fact of an island's life, numbered per incarnation by `seq`.

    kind: `took` (fragment, tick, start: the interval [start, step) entered the delta,
    version: of the anchor it is against), `adopted` (fragment, version; tick: of
    the take that is not in it, and stays in the local parameters; its first ones, at
    step 0, are what it begins with), `reopened` (fragment, tick: a refused
    delta's steps are in the local parameters still), `dropped` (fragment, tick: they
    are not), `reset` (as dropped, and the local parameters are the anchor's),
    `carried` (fragment, start: what became of the steps before `start` is in the books
    of an earlier term), `granted` (start, stop: data positions), `progress` (value:
    others' tokens on which the learning rate is based; below 0 where these had lost
    more in an earlier term than they have done since), `restored` (it begins with the
    moments that incarnation `start` had after `value` steps; with a fragment: and with
    the residual of it).
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


class Outstanding(msgspec.Struct, frozen=True, kw_only=True):
    """A take whose verdict an island does not know; it still holds the bytes. `seq` is
    the number of its record."""

    fragment: Count
    tick: Count
    start: Count
    end: Count
    base: Version
    seq: Count


class DeltaKey(NamedTuple):
    """Which delta."""

    island: str
    incarnation: int
    fragment: int
    tick: int


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """One delta in a merge."""

    island: str
    incarnation: int
    tick: int
    start: int
    end: int
    tokens: int
    base: Version

    @property
    def steps(self) -> int:
        """Steps whose effect is in the delta."""
        return self.end - self.start
