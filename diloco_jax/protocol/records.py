"""What the policy decides to write down: every kind of record as a struct.

A line of log or tape is such a struct as a JSON object, whose `kind` says which. Those
in `Durable` are in both, and recovery reads them back; those in `Noted` are on the tape
alone, for replay, calibration and people. What coordinators note there of themselves is
in `coordinator/notes.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from diloco_jax.protocol.reasons import EndReason, RefusalReason
from diloco_jax.protocol.values import Contribution, Record, Verdict, Version

R = TypeVar("R", bound="Written")


class Written(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="kind",
    tag=str.lower,
):
    """Its kind is the name of its class."""


class _OfIncarnation(Written, frozen=True, kw_only=True):
    island: str
    incarnation: int


# ---- durable ------------------------------------------------------------------


class Carrying(msgspec.Struct, frozen=True, kw_only=True):
    """What an incarnation of an earlier term brings into this one."""

    steps: int
    sequences_granted: int


class Joined(_OfIncarnation, frozen=True, kw_only=True):
    """An incarnation is in. carried: it began in an earlier term."""

    session: str
    tokens_per_step: int
    sequences_per_step: int
    carried: Carrying | None = None


class Carried(_OfIncarnation, frozen=True, kw_only=True):
    """What became of a fragment's steps before `steps` is in books of an earlier
    term."""

    fragment: int
    steps: int


class Granted(_OfIncarnation, frozen=True, kw_only=True):
    """Positions [start, stop) of the data, after `offset` sequences it had before."""

    start: int
    stop: int
    offset: int


class LeftBehind(Contribution, frozen=True, kw_only=True):
    """A delta of an incarnation that has ended, which may be merged still."""

    fragment: int


class Left(_OfIncarnation, frozen=True, kw_only=True):
    """An incarnation ended after `steps` steps; what it `said` is for people.

    settled_steps_by_fragment, merged_steps: as `membership.ended` takes them."""

    steps: int
    reason: EndReason
    said: str
    settled_steps_by_fragment: tuple[int, ...]
    merged_steps: int
    lost_tokens_by_fragment: tuple[int, ...]
    left_behind: tuple[LeftBehind, ...]


class Merged(Written, frozen=True, kw_only=True):
    """A merge that is done. final: of the flush; share: what the merged delta was
    multiplied by; verdicts: (tick, verdict, reason) of outstanding takes, by island;
    digest: of the fragment's Theta."""

    fragment: int
    version: Version
    tick: int
    final: bool
    contributions: tuple[Contribution, ...]
    share: float
    verdicts: dict[str, tuple[int, Verdict, str]]
    digest: str


class Ticks(Written, frozen=True, kw_only=True):
    """Numbers of ticks up to `through` may be used before the next such record."""

    through: int


class Stopping(Written, frozen=True, kw_only=True):
    """The run has its tokens; the flush begins."""

    tokens: int


class Finished(Written, frozen=True, kw_only=True):
    """The run is over."""


Durable = Joined | Carried | Granted | Left | Merged | Ticks | Stopping | Finished

# ---- noted --------------------------------------------------------------------


class Fact(_OfIncarnation, frozen=True, kw_only=True, tag="island"):
    """A fact of an island's own life came in."""

    record: Record


class Tick(Written, frozen=True, kw_only=True):
    """Islands are asked for a fragment. final: for the flush."""

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
"""The first four: the fragment is in that phase."""


class Skipped(Written, frozen=True, kw_only=True):
    """A tick asks nobody, or what it asked for is given up."""

    tick: int
    fragment: int
    why: Why


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One take that is asked for."""

    fragment: int
    tick: int


class Leaving(_OfIncarnation, frozen=True, kw_only=True):
    """An island that is about to leave is asked for what it has."""

    asked: tuple[Asked, ...]


class DeltaRefused(_OfIncarnation, frozen=True, kw_only=True, tag="refused"):
    """A delta is not merged."""

    fragment: int
    tick: int
    reason: RefusalReason


class TurnedAway(Written, frozen=True, kw_only=True, tag="turned_away"):
    """A process was not let in, or was put out."""

    island: str
    code: str
    message: str


class Resumed(_OfIncarnation, frozen=True, kw_only=True):
    """A known incarnation is back on a new connection."""

    steps: int


AbsentFor = Literal["silent", "disconnected"]


class Absent(_OfIncarnation, frozen=True, kw_only=True):
    """No sign of it: its connection broke (disconnected), or its lease ran out."""

    why: AbsentFor


Noted = Fact | Tick | Skipped | Leaving | DeltaRefused | TurnedAway | Resumed | Absent


def line(record: Written) -> dict[str, Any]:
    """As log and tape have it."""
    found: dict[str, Any] = msgspec.to_builtins(record)
    return found


def from_log(written: Mapping[str, Any]) -> Durable:
    """The record that a line of the log is; msgspec.ValidationError if it is none, or
    says more than this version knows."""
    found: Durable = msgspec.convert(written, Durable)
    if json.loads(json.dumps(line(found))) != written:
        raise msgspec.ValidationError(f"fields that {type(found).__name__} has not")
    return found


def from_tape(written: Mapping[str, Any], kind: type[R]) -> R:
    """The record of that kind that a line of the tape is, whatever else is in the line;
    msgspec.ValidationError if it is none."""
    return msgspec.convert(written, kind)
