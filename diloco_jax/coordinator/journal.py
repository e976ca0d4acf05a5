"""The service's writing: the record log, and the tape beside it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

from diloco_jax.coordinator import notes
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.faults import Faults
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import Ignored

logger = logging.getLogger(__name__)

ALERTS_KEPT = 20
ALERTS_EACH = 3
"""Alerts about one island that are kept: it may raise many, and the others stay."""
UNTOLD_KEPT = 100
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
        self.untold: list[str] = []
        """Those that nobody has collected yet."""
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

    def note(self, record: notes.Note | records.Durable | records.Noted) -> None:
        """See engine.Log; also writes the coordinator's own notes."""
        if isinstance(record, records.TurnedAway):
            logger.info(
                "island %s refused (%s): %s", record.island, record.code, record.message
            )
        self._tape.append(notes.dated(record))

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
        self.untold = [*self.untold, text][-UNTOLD_KEPT:]
        self.alerts_raised += 1
        self.note(notes.Alert(text=text))

    def _watch(self, seconds: float) -> None:
        now = time.monotonic()
        if seconds > self._slow_s and now - self._slow_told > SLOW_TOLD_EVERY_S:
            self._slow_told = now
            self.alert(
                f"the record log's disk is slow: one record took {seconds:.1f} s, and "
                f"no decision is made meanwhile; give the workdir a disk of its own"
            )
