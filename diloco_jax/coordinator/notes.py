"""What a coordinator writes onto the tape of itself: every kind of line as a struct.

What the policy decides to write down is in `protocol/records.py`; the two together are
all that a tape holds.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from diloco_jax.protocol import records
from diloco_jax.protocol.values import Version

Environment = dict[str, Any]
"""What `diloco_jax.environment.describe` said in a process."""


class Begun(records.Written, frozen=True, kw_only=True):
    """The first line of a new run."""

    run_id: str
    fingerprint: str
    plan: str
    """Digest of the fragment plan."""
    environment: Environment


class Recovered(records.Written, frozen=True, kw_only=True):
    """A coordinator came back, from a snapshot and the log after it."""

    snapshot: int
    snapshot_merges: int
    """How many the snapshot held."""
    records: int
    """How many the log held after it."""
    versions: tuple[Version, ...]
    """By fragment, with the log's."""
    parameters_digest: str
    environment: Environment


class Term(records.Written, frozen=True, kw_only=True):
    """The first line of a coordinator that had lost its state: a new term, begun with
    anchors of islands."""

    term: int
    run_id: str
    versions: tuple[Version, ...]
    """By fragment, as they are called in this term."""
    sources: tuple[str, ...] = msgspec.field(name="from")
    """By fragment, the island whose anchor it is."""
    replaced: tuple[Version, ...]
    """By fragment, what that island called it."""
    tokens: int
    next_position: int
    fingerprint: str
    plan: str
    parameters_digest: str
    environment: Environment


class Hello(records.Written, frozen=True, kw_only=True):
    """An incarnation asked to be let in."""

    island: str
    incarnation: int
    config: dict[str, Any]
    """Its `IslandConfig`."""
    environment: Environment
    peer: str
    """Its address."""


class Compiled(records.Written, frozen=True):
    """What merges need is compiled: those that are ordered earlier wait."""


class Alert(records.Written, frozen=True, kw_only=True):
    """Something that people should know of."""

    text: str


Note = Begun | Recovered | Term | Hello | Compiled | Alert


def dated(record: Note | records.Durable | records.Noted) -> dict[str, Any]:
    """The line of the tape: with the time at which it is written, in unix seconds."""
    return {**records.line(record), "time": time.time()}
