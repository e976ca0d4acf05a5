"""Events and effects of the coordinator's half: its whole interface.

Events go in with a time; effects come out in the order in which the shell must carry
them out. A `Persist` is durable before any later effect of the same step is visible.
A `Tell` carries the message itself, addressed to a session. What a holder of fragments
is told, and tells, is in `protocol/holding.py`. Steps count from 0 within an
incarnation. Intervals of steps are half-open. `tokens` counts one island's tokens.

Only the shell uses `Hello.run`, `plan`, `island_config` and `environment` (compared and
noted before the hello becomes an event) and `Report.measures`. A hello's `versions`,
`tokens` and `next_position` are for a coordinator without its state
(`anchors.py`).
"""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.holding import (
    CycleKept,
    DeltaArrived,
    MergePrepared,
    ToHolder,
)
from diloco_jax.protocol.messages import (
    FromCoordinator,
    Goodbye,
    Hello,
    Report,
    Steer,
)
from diloco_jax.protocol.records import Durable, Noted

# ---- events -------------------------------------------------------------------


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An island's next message on the stream of a session. Records come in order and
    may repeat. After a goodbye, only the deltas that have arrived are merged."""

    island: str
    session: str
    message: Report | Goodbye


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed; due when `decide.next_deadline` says so."""


class MachineSlept(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's clock stood still, while islands went on. No deadline moves:
    nobody could be heard meanwhile."""

    seconds: float


class Disconnected(msgspec.Struct, frozen=True, kw_only=True):
    """A session's connection broke; the incarnation may return on a new one."""

    island: str
    session: str


class SaidAhead(msgspec.Struct, frozen=True, kw_only=True):
    """An island said hello that knows of a later state of the run, and was told to come
    again. how: as `members.how_ahead` says."""

    island: str
    how: str


class RunResumed(msgspec.Struct, frozen=True, kw_only=True):
    """The run continues after a stop: all its earlier processes have ended.

    `steps` holds the last reported steps, by name and incarnation, where known.
    """

    steps: dict[tuple[str, int], int] = msgspec.field(default_factory=dict)


class RunExtended(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over, and its config now asks for more tokens than it has."""


class KeepAsked(msgspec.Struct, frozen=True, kw_only=True):
    """An operator wants the parameters of one cycle: of the one that is being kept or,
    if none is, of the run's present cycle.
    """


Event = (
    Hello
    | Said
    | Steer
    | DeltaArrived
    | MergePrepared
    | Disconnected
    | SaidAhead
    | RunResumed
    | RunExtended
    | KeepAsked
    | CycleKept
    | MachineSlept
    | Timer
)

# ---- effects ------------------------------------------------------------------


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Write a record durably to the log (and the tape), before any later effect."""

    record: Durable


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Write a record to the tape."""

    record: Noted


class Tell(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message to a session; nothing happens if it is not connected. A `Welcome`
    lets it in, a `Refused` ends it."""

    session: str
    message: FromCoordinator


class Ignored(msgspec.Struct, frozen=True, kw_only=True):
    """Count a message that made no move in its machine's state (`state.py`).
    expected: this happens on a lossy wire; otherwise the two ends disagree."""

    machine: str
    state: str
    message: str
    expected: bool


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Tell people about something that needs their attention. island: the one that it
    is about, which could raise it again and again; empty: none."""

    text: str
    island: str = ""


class Outdated(msgspec.Struct, frozen=True, kw_only=True):
    """End the coordinator, whose state is an old one."""

    text: str


Effect = Persist | Note | Tell | ToHolder | Ignored | Alert | Outdated
