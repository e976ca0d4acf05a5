"""Values in events, records and effects: versions, data, deltas, records of islands.

Steps count from 0 within an incarnation. Intervals of steps are half-open; sets of
numbers are sorted, disjoint `Span`s. `tokens` counts the tokens of one island.

Reasons for lost steps, under which the ledger books them, are words for programs, from
a fixed set. A peer's explanation for people goes to the log and the tape (`said`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

Phase = Literal["joining", "compiling", "training", "stopped"]
BEGINNING: tuple[Phase, ...] = ("joining", "compiling")
"""Phases of an island before its first step."""
Verdict = Literal["merged", "pending", "refused"]

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

LOOKAHEAD = 2
"""Boundaries between a decision and its time, where several hosts must have it; more
than the steps dispatched ahead, so that no host waits."""


def lookahead_of(hosts: int) -> int:
    """Return the boundaries between a decision of an island and its time."""
    return LOOKAHEAD if hosts > 1 else 0


class Version(NamedTuple):
    """Version of a fragment. A coordinator that lost its state opens a new term."""

    term: Term = 1
    number: Count = 0

    def next(self) -> Version:
        """Return the version that the next merge makes."""
        return Version(self.term, self.number + 1)

    @property
    def name(self) -> str:
        """The name of the version in a file's name."""
        return f"{self.term}-{self.number}"

    @staticmethod
    def named(name: str) -> Version:
        """Return the version of this name."""
        term, number = name.split("-")
        return Version(int(term), int(number))


FIRST_VERSION = Version()
NOTHING = Version(0, 0)
"""Below every version."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared merge: digest and length of its encoded publish, which is on disk."""

    digest: str
    payload_bytes: int
    change: float = 0.0
    """Length of the change that it makes; 0: unknown."""


class Span(NamedTuple):
    """Half-open range of positions in the global shuffled index."""

    start: int
    stop: int


def join_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans`, which may overlap."""
    found: list[Span] = []
    for span in sorted(spans):
        if span.start >= span.stop:
            continue
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return tuple(found)


def spans_without(spans: Iterable[Span], taken: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans` and in none of `taken`."""
    left = join_spans(spans)
    for span in join_spans(taken):
        left = tuple(part for kept in left for part in _cut(kept, span))
    return left


def common_spans(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers that are in any of `spans` and in any of `others`."""
    inside = list(others)
    return join_spans(
        Span(max(a.start, b.start), min(a.stop, b.stop)) for a in spans for b in inside
    )


def _cut(span: Span, taken: Span) -> Iterable[Span]:
    if taken.stop <= span.start or span.stop <= taken.start:
        yield span
        return
    if span.start < taken.start:
        yield Span(span.start, taken.start)
    if taken.stop < span.stop:
        yield Span(taken.stop, span.stop)


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


EndReason = Literal[
    "finished", "stopped", "preempted", "refused", "failed", "died", "absent"
]
"""Reason for which an incarnation ended with open steps. stopped: it was asked to end,
or the whole run was. refused: it was not let in, or was put out for an impossible
claim or by an operator. died: another incarnation replaced it, and it had said no
goodbye. finished, absent: the run ended first, with the island live or absent."""

FAILURES: Final[frozenset[EndReason]] = frozenset(("failed", "died"))
"""Ends that another attempt may repeat; nobody asked for them."""

RefusalReason = Literal[
    "non_finite",
    "out_of_bounds",
    "quarantined",
    "stale",
    "future",
    "overlap",
    "empty",
    "refused",
]
"""Reason for which a delta is not merged; its steps are lost if the island gives them
up. out_of_bounds: it is much longer than the others' deltas. quarantined: it is within
bounds, but too many before it were not. stale: its base lags the current version too
far. future: its base is a version that no merge has made. overlap: some of its steps
are settled. refused: the island gave the delta up without being told to."""

Refusal = RefusalReason | Literal[""]
"""Reason for which a delta is not merged; empty: it is fit."""

LossReason = EndReason | RefusalReason | Literal["coordinator", "worker", "overwritten"]
"""Reason for lost steps. coordinator: it was killed with deltas that it had not merged.
worker: likewise, of a worker.
overwritten: an adoption undid the steps."""

STOPPED: Final = "stopped"
STALE: Final = "stale"
FUTURE: Final = "future"
WORKER: Final = "worker"
# The local value is unusable.
NON_FINITE: Final = "non_finite"
OUT_OF_BOUNDS: Final = "out_of_bounds"
QUARANTINED: Final = "quarantined"
# A reopened delta would overlap again.
OVERLAP: Final = "overlap"
