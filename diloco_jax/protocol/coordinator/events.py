"""What can happen to the coordinator's half, and what it decides: its whole interface.

Events go in with a time, effects come out in the order in which the shell must carry
them out. A `Persist` is durable before any later effect of the same step is visible.
A `Tell` carries the message itself, addressed to a session. Steps count from 0 within
an incarnation; intervals of steps are half-open; `tokens` are of one island.

Fields that only the shell uses: `Hello.run`, `plan`, `island_config` and `environment`
(compared and noted before the hello becomes an event), `Report.measures`. A hello's
`versions`, `tokens` and `next_position` are for a coordinator without its state
(`protocol/new_term/`).
"""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.messages import FromCoordinator, Goodbye, Hello, Report
from diloco_jax.protocol.reasons import Refusal
from diloco_jax.protocol.records import Durable, Noted
from diloco_jax.protocol.values import Contribution, DeltaKey, Version

# ---- events -------------------------------------------------------------------


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An island's next message on the stream of a session. Records come in order and
    may repeat ones already seen; after a goodbye, what is here of its deltas is merged,
    no more."""

    island: str
    session: str
    message: Report | Goodbye


class DeltaArrived(msgspec.Struct, frozen=True, kw_only=True):
    """All bytes of a take are here and checked; `refusal` says if they are unfit."""

    island: str
    incarnation: int
    fragment: int
    tick: int
    refusal: Refusal = ""


class MergeComputed(msgspec.Struct, frozen=True, kw_only=True):
    """The merge that was ordered is computed and its publish is encoded."""

    fragment: int
    version: Version
    digest: str


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed; due when `decide.next_deadline` says so."""


class Disconnected(msgspec.Struct, frozen=True, kw_only=True):
    """A session's connection broke; the incarnation may come back on another."""

    island: str
    session: str


class RunResumed(msgspec.Struct, frozen=True, kw_only=True):
    """The run goes on after it was stopped: every process that was in it has ended.

    `steps` is what each last reported, by name and incarnation, where that is known.
    """

    steps: dict[tuple[str, int], int] = msgspec.field(default_factory=dict)


Event = Hello | Said | DeltaArrived | MergeComputed | Disconnected | RunResumed | Timer

# ---- effects ------------------------------------------------------------------


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Write a record to the log (and the tape), durably, before what follows."""

    record: Durable


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Write a record to the tape."""

    record: Noted


class Tell(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message to a session; nothing happens if it is not connected. A `Welcome`
    lets it in, a `Refused` ends it."""

    session: str
    message: FromCoordinator


class Drop(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a delta are not needed any more."""

    delta: DeltaKey


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """A new incarnation of the island is in: what those below `before` sent is not
    needed any more, but for `kept`."""

    island: str
    before: int
    kept: tuple[DeltaKey, ...]


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """Merge these deltas, in this order, into `version` of the fragment. `share`: what
    the merged delta is multiplied by; `final`: as the flush does it (weighted mean,
    learning rate 1, momentum untouched)."""

    fragment: int
    version: Version
    contributions: tuple[Contribution, ...]
    share: float
    final: bool


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The computed merge is durable: from here on it is the fragment's version."""

    fragment: int
    version: Version


class Ignored(msgspec.Struct, frozen=True, kw_only=True):
    """A message made no move in the state that its machine is in (`machines.py`).
    expected: that happens on a lossy wire; else the two ends disagree."""

    machine: str
    state: str
    message: str
    expected: bool


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something a person should look at."""

    text: str


Effect = Persist | Note | Tell | Drop | Forget | Merge | Commit | Ignored | Alert
