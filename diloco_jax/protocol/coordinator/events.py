"""What can happen to the policy, and what it decides: its whole interface.

Events go in with a time, effects come out in the order in which the shell must carry
them out. A `Persist` is durable before any later effect of the same step is visible.
Steps count from 0 within an incarnation; intervals of steps are half-open; `tokens`
are of one island.
"""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.reasons import EndReason, Refusal
from diloco_jax.protocol.records import Durable, Noted
from diloco_jax.protocol.values import (
    Contribution,
    Outstanding,
    Phase,
    Record,
    Span,
    Verdict,
    Version,
)

# ---- events -------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """An island asks to join, or a known incarnation is back on a new connection."""

    island: str
    incarnation: int
    session: str
    """Drawn once per process: tells a reconnection from another process."""
    run_id: str
    fingerprint: str
    tokens_per_step: int
    sequences_per_step: int
    steps: int = 0
    step_seconds: float = 0.0
    phase: Phase = "joining"
    outstanding: tuple[Outstanding, ...] = ()
    sequences_granted: int = 0
    """Sequences that this incarnation has been granted and knows of."""
    records_through: int = 0
    """Its records up to this number are acknowledged: they are on the tape."""
    term: int = 0
    """The newest one in which this process was welcomed; 0: in none."""
    lead: int = 0
    """Boundaries from a request to its take: hosts agree on it ahead."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life; `records` come in order and may repeat ones already seen."""

    island: str
    session: str
    phase: Phase
    steps: int
    step_seconds: float
    records: tuple[Record, ...] = ()


class Goodbye(msgspec.Struct, frozen=True, kw_only=True):
    """An island leaves for good. What is here of its deltas is merged, no more."""

    island: str
    session: str
    reason: EndReason
    said: str  # For people.


class DeltaArrived(msgspec.Struct, frozen=True, kw_only=True):
    """All bytes of a take are here and checked; `refusal` says if they are unfit."""

    island: str
    incarnation: int
    fragment: int
    tick: int
    refusal: Refusal = ""


class MergeComputed(msgspec.Struct, frozen=True, kw_only=True):
    """The merge that the policy ordered is computed and its publish is encoded."""

    fragment: int
    version: Version
    digest: str


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed; due when `decide.next_deadline` says so."""


class Disconnected(msgspec.Struct, frozen=True, kw_only=True):
    """A session's connection broke; the incarnation may come back on another."""

    island: str
    session: str


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """The run goes on after it was stopped: every process that was in it has ended.

    `steps` is what each last reported, by name and incarnation, where that is known.
    """

    steps: dict[tuple[str, int], int] = msgspec.field(default_factory=dict)


Event = (
    Hello
    | Report
    | Goodbye
    | DeltaArrived
    | MergeComputed
    | Disconnected
    | Resumed
    | Timer
)

# ---- effects ------------------------------------------------------------------


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Write a record to the log (and the tape), durably, before what follows."""

    record: Durable


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Write a record to the tape."""

    record: Noted


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The island is in. `resumed`: it is the incarnation that was here before."""

    island: str
    session: str
    resumed: bool
    versions: tuple[Version, ...]


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """The peer is not let in, or is put out: its session ends with this reason."""

    island: str
    session: str
    code: str
    message: str


class AskTake(msgspec.Struct, frozen=True, kw_only=True):
    """The island is to take the fragment, `after` boundaries later than it can."""

    island: str
    fragment: int
    tick: int
    after: int = 0


class AskResend(msgspec.Struct, frozen=True, kw_only=True):
    """The island is to send a delta that it still holds once more."""

    island: str
    fragment: int
    tick: int


class DropDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a delta are not needed any more."""

    island: str
    incarnation: int
    fragment: int
    tick: int


class TellVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a take; `version` is the fragment's current one."""

    island: str
    fragment: int
    tick: int
    verdict: Verdict
    reason: str
    version: Version


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """Merge these deltas, in this order, into `version` of the fragment. `share`: what
    the merged delta is multiplied by; `final`: as the flush does it (weighted mean,
    learning rate 1, momentum untouched)."""

    fragment: int
    version: Version
    contributions: tuple[Contribution, ...]
    share: float
    final: bool


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """Send the fragment's new version to every connected island; `verdicts` says,
    by island, (tick, verdict, reason) of its outstanding take."""

    fragment: int
    version: Version
    verdicts: dict[str, tuple[int, Verdict, str]]


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of data for the island, after those it has; `offset` is the number
    of sequences granted to this incarnation before."""

    island: str
    span: Span
    offset: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the whole run that are not lost, and those of this incarnation's steps;
    acknowledges records. next_position: nothing from there on is granted yet."""

    island: str
    tokens: int
    own_tokens: int
    records_through: int
    next_position: int


class StopStepping(msgspec.Struct, frozen=True, kw_only=True):
    """The run has its tokens: the island ends its step and answers takes only."""

    island: str


class LetGo(msgspec.Struct, frozen=True, kw_only=True):
    """All that an island which is about to leave could be asked for is here."""

    island: str


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that could be merged is merged: the run is over."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something a person should look at."""

    text: str


Effect = (
    Persist
    | Note
    | Welcome
    | Refuse
    | AskTake
    | AskResend
    | DropDelta
    | TellVerdict
    | Merge
    | Publish
    | Grant
    | Progress
    | StopStepping
    | LetGo
    | Finish
    | Alert
)
