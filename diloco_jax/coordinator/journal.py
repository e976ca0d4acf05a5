"""The coordinator's writing: the record log, and the tape beside it.

A tape holds two kinds of lines and no other: those that the protocol decides to write
(`protocol/records.py`), and the coordinator's own, each kind of which is a struct here.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from typing import Any

import msgspec

from diloco_jax.coordinator.log import RecordLog
from diloco_jax.faults import Faults
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import Ignored
from diloco_jax.protocol.values import Version

logger = logging.getLogger(__name__)

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


class Term(records.Written, frozen=True, kw_only=True):
    """The first line of a coordinator that had lost its state: a new term begins with
    anchors of islands."""

    term: int
    name: str
    """Drawn as it opened."""
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
    """Digests of a fragment's Theta and anchor at a version; they are computed after
    the merge. That of the anchor tells whether an island has it."""

    fragment: int
    version: Version
    digest: str
    anchor: str = ""
    """Digest of the anchor; empty on tapes of before."""


class Alert(records.Written, frozen=True, kw_only=True):
    """An alert that people should know about."""

    text: str


Note = Begun | Recovered | Term | Hello | Compiled | Measured | Digested | Alert


def dated(record: Note | records.Durable | records.Noted) -> dict[str, Any]:
    """Return the record as a line of the tape, with the present time in unix
    seconds."""
    return {**records.line(record), "time": time.time()}


ALERTS_KEPT = 20
ALERTS_EACH = 3
"""Alerts about one island that are kept: it may raise many, and the others stay."""
SLOW_TOLD_EVERY_S = 60.0
"""Seconds between two alerts about a slow log."""


class Journal:
    """The `Log` of the service's engine. Only the engine's thread may use it."""

    def __init__(
        self,
        log: RecordLog,
        tape: Tape,
        *,
        faults: Faults,
        merges: int,
        slow_s: float,
    ) -> None:
        """faults: fired with the number of each merge, before its record commits it
        and after. merges: merges of the run so far. slow_s: a record that takes longer
        to write raises an alert, since no decision is made meanwhile."""
        self._alerts: list[tuple[str, str]] = []
        """The last ones, oldest first, with the islands that they are about."""
        self.alerts_raised = 0
        self.ignored_messages: Counter[str] = Counter()
        """Messages that made no move, counted by the state that they met; machines and
        states are few."""
        self._log, self._tape = log, tape
        self._faults, self._merges, self._found = faults, merges, merges
        self._slow_s, self._slow_told = slow_s, -math.inf

    def persist(self, record: records.Durable) -> None:
        """See engine.Log."""
        if isinstance(record, records.Merged) and self._merges > self._found:
            # Not for the first one: the life before may have ended at this fault.
            self._faults.fire(self._merges + 1, prepared=True)
        began = time.monotonic()
        self._log.append(records.line(record))
        self._watch(time.monotonic() - began)
        self.note(record)
        if isinstance(record, records.Merged):
            self._merges += 1
            self._faults.fire(self._merges)

    def note(self, record: Note | records.Durable | records.Noted) -> None:
        """See engine.Log; also writes the coordinator's own notes."""
        if isinstance(record, records.TurnedAway):
            logger.info(
                "island %s refused (%s): %s", record.island, record.code, record.message
            )
        self._tape.append(dated(record))

    def ignored(self, ignored: Ignored) -> None:
        """See engine.Log."""
        what = f"{ignored.message} of a {ignored.machine} that is {ignored.state}"
        self.ignored_messages[what] += 1
        if not ignored.expected and self.ignored_messages[what] == 1:
            logger.warning(
                "ignored: %s; the two ends disagree, look at the island's log",
                what,
            )

    @property
    def alerts(self) -> list[str]:
        """The last alerts, oldest first."""
        return [text for _, text in self._alerts]

    def alert(self, text: str, island: str = "") -> None:
        """See engine.Log."""
        logger.warning("%s", text)
        same = [alert for alert in self._alerts if alert[0] == island]
        if island and len(same) == ALERTS_EACH:
            self._alerts.remove(same[0])
        self._alerts = [*self._alerts, (island, text)][-ALERTS_KEPT:]
        self.alerts_raised += 1
        self.note(Alert(text=text))

    def _watch(self, seconds: float) -> None:
        now = time.monotonic()
        if seconds > self._slow_s and now - self._slow_told > SLOW_TOLD_EVERY_S:
            self._slow_told = now
            self.alert(
                f"the record log's disk is slow: one record took {seconds:.1f} s, and "
                f"no decision is made meanwhile; give the workdir a disk of its own"
            )
