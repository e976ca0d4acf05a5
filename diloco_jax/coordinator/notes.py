"""The coordinator's own lines on the tape: every kind of line as a struct.

Lines that the protocol decides to write are in `protocol/records.py`. A tape holds
these two kinds of lines and no other.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from diloco_jax.protocol import records
from diloco_jax.protocol.values import Version

Environment = dict[str, Any]
"""Result of `diloco_jax.before_jax.describe` in a process."""


class Begun(records.Written, frozen=True, kw_only=True):
    """The first line of a new run."""

    run_id: str
    fingerprint: str
    plan: str
    """Digest of the fragment plan."""
    total_tokens: int
    """Those of the config that the run began with; it may be extended."""
    environment: Environment
    first_from: str = ""
    """Island that gave the first parameters; empty: they were drawn, or read."""
    parameters_digest: str = ""
    """Digest of those that an island gave."""


class Recovered(records.Written, frozen=True, kw_only=True):
    """A coordinator came back from its snapshots, the log and the publishes."""

    snapshot: int
    """Number of the snapshot of the state."""
    snapshot_versions: tuple[Version, ...]
    """Versions by fragment of the snapshots of the fragments."""
    records: int
    """Records that the log held after the snapshot of the state."""
    discarded: int
    """Merges that were prepared and never committed."""
    versions: tuple[Version, ...]
    """Versions by fragment, the log's records included."""
    parameters_digest: str
    environment: Environment
    momentum_untouched: bool = False
    """True if the outer optimizer of some fragment is as it was in its snapshot,
    although merges came after it: it cannot be inferred from a published change."""


class WorkerRecovered(
    records.Written, frozen=True, kw_only=True, tag="worker_recovered"
):
    """A worker came back from snapshots and publishes of these fragments, beside a
    coordinator that went on."""

    worker: int
    fragments: tuple[int, ...]
    snapshot_versions: tuple[Version, ...]
    """Versions of the snapshots, in the order of `fragments`."""
    away_seconds: float | None = None
    """Time since it was noticed to be away. None: before this life of the lead."""


class Term(records.Written, frozen=True, kw_only=True):
    """The first line of a coordinator that had lost its state: a new term begins with
    anchors of islands."""

    term: int
    run_id: str
    versions: tuple[Version, ...]
    """Versions by fragment, as this term calls them."""
    sources: tuple[str, ...] = msgspec.field(name="from")
    """Names of the islands whose anchors were taken, by fragment."""
    replaced: tuple[Version, ...]
    """Versions by fragment, as those islands called them."""
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
    """The island's `IslandConfig`."""
    environment: Environment
    peer: str
    """Address of the island."""


class Compiled(records.Written, frozen=True):
    """All functions that merges need are compiled. A merge that was ordered before this
    line waited for them.
    """


class Measured(records.Written, frozen=True, kw_only=True):
    """Measures of a merge (`core/fragment_merge.py`); no decision depends on them."""

    fragment: int
    version: Version
    pairwise_cosine: float | None = None
    cosine_to_last: float | None = None
    length_ratio: float | None = None
    step_ratio: float | None = None
    directions: tuple[float | None, ...] = ()
    """Cosine of each delta with the others, in the order of the merge's contributions;
    none if there are too few."""


class Digested(records.Written, frozen=True, kw_only=True):
    """Digest of a fragment's Theta at a version; it is computed after the merge."""

    fragment: int
    version: Version
    digest: str


class Alert(records.Written, frozen=True, kw_only=True):
    """An alert that people should know about."""

    text: str


Note = (
    Begun
    | Recovered
    | WorkerRecovered
    | Term
    | Hello
    | Compiled
    | Measured
    | Digested
    | Alert
)


def dated(record: Note | records.Durable | records.Noted) -> dict[str, Any]:
    """Return the record as a line of the tape, with the present time in unix
    seconds."""
    return {**records.line(record), "time": time.time()}
