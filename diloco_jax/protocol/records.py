"""The records that the coordinator's half writes: every kind as a struct.

A line of the log or the tape is one of these structs as a JSON object; `kind` names it.
Records in `Durable` are on both, and recovery reads them back. Records in `Noted` are
only on the tape, for replay and people. The records that a coordinator
notes about itself are in `coordinator/journal.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from diloco_jax.protocol.messages import (
    Contribution,
    EndReason,
    Record,
    RefusalReason,
    Span,
    Verdict,
    Version,
)

R = TypeVar("R", bound="Written")


class Written(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="kind",
    tag=str.lower,
):
    """Base of all records; the kind is the name of the class."""


class _OfIncarnation(Written, frozen=True, kw_only=True):
    island: str
    incarnation: int


# ---- durable ------------------------------------------------------------------


class Carrying(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that an incarnation of an earlier term brings into this one."""

    steps: int
    sequences_granted: int
    counted_tokens: int
    """Tokens of these steps that the progress of earlier terms includes."""


class Joined(_OfIncarnation, frozen=True, kw_only=True):
    """An incarnation joined. carried: it began in an earlier term."""

    session: str
    tokens_per_step: int
    sequences_per_step: int
    carried: Carrying | None = None


class Carried(_OfIncarnation, frozen=True, kw_only=True):
    """A fragment's steps before `steps` are settled in the books of an earlier
    term."""

    fragment: int
    steps: int


class Granted(_OfIncarnation, frozen=True, kw_only=True):
    """Positions [start, stop) of the data, after the incarnation's first `offset`."""

    start: int
    stop: int
    offset: int


class LeftBehind(Contribution, frozen=True, kw_only=True):
    """A delta of an ended incarnation that may still be merged."""

    fragment: int


class Left(_OfIncarnation, frozen=True, kw_only=True):
    """An incarnation ended after `steps` steps; `said` is its explanation for people.

    settled_steps_by_fragment, in_merges: the arguments of `members.ended`.
    lost_tokens_by_fragment: of this incarnation alone, by its end."""

    steps: int
    reason: EndReason
    said: str
    settled_steps_by_fragment: tuple[int, ...]
    in_merges: tuple[Span, ...]
    lost_tokens_by_fragment: tuple[int, ...]
    left_behind: tuple[LeftBehind, ...]


class Quarantined(_OfIncarnation, frozen=True, kw_only=True):
    """No delta of the island is merged from now on; `refused` in a row were unfit."""

    refused: int


class Released(_OfIncarnation, frozen=True, kw_only=True):
    """Deltas of the island are merged again; `fit` in a row were within bounds.
    asked: an operator wanted it."""

    fit: int
    asked: bool = False


class Admitted(Written, frozen=True, kw_only=True):
    """An operator lets in an island that the config does not name."""

    island: str


class Removed(Written, frozen=True, kw_only=True):
    """An operator lets such an island in no longer."""

    island: str


class Merged(Written, frozen=True, kw_only=True):
    """A finished merge, which this record commits. Its encoded publish is on disk
    already."""

    fragment: int
    version: Version
    tick: int
    final: bool
    """True for a merge of the flush."""
    contributions: tuple[Contribution, ...]
    share: float
    """Factor of the merged delta."""
    verdicts: dict[str, tuple[int, Verdict, str]]
    """(tick, verdict, reason) of outstanding takes, by island."""
    digest: str
    """Digest of the encoded publish."""
    payload_bytes: int
    """Bytes of the encoded publish."""


class TermBegun(_OfIncarnation, frozen=True, kw_only=True, tag="term_begun"):
    """A fragment that its worker had lost begins the run's next term, with this
    island's anchor."""

    fragment: int
    version: Version
    name: str
    """The random name of the term."""
    replaced: Version
    """Version of the anchor on the island."""
    lost_tokens: dict[str, int]
    """Tokens by island that were merged into versions above it, and are lost."""
    digest: str
    """Digest of Theta."""


class Ticks(Written, frozen=True, kw_only=True):
    """Tick numbers up to `through` may be used before the next such record."""

    through: int


class Stopping(Written, frozen=True, kw_only=True):
    """The run has its tokens; the flush begins."""

    tokens: int


class Finished(Written, frozen=True, kw_only=True):
    """The run is over."""


class Extended(Written, frozen=True, kw_only=True):
    """The run, which was over, goes on until it has this many tokens."""

    total_tokens: int


Durable = (
    Joined
    | Carried
    | Granted
    | Left
    | Quarantined
    | Released
    | Admitted
    | Removed
    | Merged
    | TermBegun
    | Ticks
    | Stopping
    | Finished
    | Extended
)

# ---- noted --------------------------------------------------------------------


class Fact(_OfIncarnation, frozen=True, kw_only=True, tag="island"):
    """A record from an island arrived."""

    record: Record


class Tick(Written, frozen=True, kw_only=True):
    """Islands are asked for a fragment. final: the tick belongs to the flush."""

    tick: int
    fragment: int
    asked: tuple[str, ...]
    final: bool


Why = Literal[
    "idle",
    "open",
    "merging",
    "done",
    "too few islands can be asked",
    "quorum is out of reach",
]
"""Reason for a skipped tick. The first four name the fragment's phase."""


class Skipped(Written, frozen=True, kw_only=True):
    """A tick asks no island, or its request is given up."""

    tick: int
    fragment: int
    why: Why


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One requested take."""

    fragment: int
    tick: int


class Leaving(_OfIncarnation, frozen=True, kw_only=True):
    """A leaving island is asked for its open deltas."""

    asked: tuple[Asked, ...]


class DeltaRefused(_OfIncarnation, frozen=True, kw_only=True, tag="refused"):
    """A delta is not merged. norm, most: its length and the allowed one, if they are
    known; of a miscounted one the sum of its counts, and its tokens."""

    fragment: int
    tick: int
    reason: RefusalReason
    norm: float = 0.0
    most: float = 0.0


class TurnedAway(Written, frozen=True, kw_only=True, tag="turned_away"):
    """A process was not let in, or was put out."""

    island: str
    code: str
    message: str


class Resumed(_OfIncarnation, frozen=True, kw_only=True):
    """A known incarnation returned on a new connection."""

    steps: int


AbsentFor = Literal["silent", "disconnected"]


class Absent(_OfIncarnation, frozen=True, kw_only=True):
    """An incarnation is absent: its connection broke (disconnected) or its lease ran
    out (silent)."""

    why: AbsentFor


Noted = Fact | Tick | Skipped | Leaving | DeltaRefused | TurnedAway | Resumed | Absent


def line(record: Written) -> dict[str, Any]:
    """Convert a record to the form that log and tape hold."""
    found: dict[str, Any] = msgspec.to_builtins(record)
    return found


def from_log(written: Mapping[str, Any]) -> Durable:
    """Parse a line of the log; msgspec.ValidationError if it is no record, or has
    fields that this version does not know."""
    found: Durable = msgspec.convert(written, Durable)
    if json.loads(json.dumps(line(found))) != written:
        raise msgspec.ValidationError(f"fields that {type(found).__name__} has not")
    return found


def from_tape(written: Mapping[str, Any], kind: type[R]) -> R:
    """Parse a line of the tape as a record of that kind; ignore other fields.

    Raises msgspec.ValidationError if the line is of another form.
    """
    return msgspec.convert(written, kind)
