"""The service's writing: the record log, and the tape beside it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from diloco_jax.coordinator import notes
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.faults import Faults
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import Ignored

logger = logging.getLogger(__name__)

ALERTS_KEPT = 20


class Journal:
    """The `Log` of the service's engine. Only the engine's thread may use it."""

    def __init__(
        self,
        log: RecordLog,
        tape: Tape,
        *,
        published: Callable[[int], bytes],
        faults: Faults,
        merges: int,
    ) -> None:
        """published: returns the encoded publish of a fragment's computed merge.
        faults: fired with the number of each merge once that is durable. merges: merges
        of the run so far."""
        self.alerts: list[str] = []
        self.ignored_messages: Counter[str] = Counter()
        """Messages that made no move, counted by the state that they met."""
        self._log, self._tape, self._published = log, tape, published
        self._faults, self._merges = faults, merges

    def persist(self, record: records.Durable) -> None:
        """See engine.Log."""
        payload = b""
        if isinstance(record, records.Merged):
            payload = self._published(record.fragment)
        self._log.append(records.line(record), payload)
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

    def alert(self, text: str) -> None:
        """See engine.Log."""
        logger.warning("%s", text)
        self.alerts = [*self.alerts, text][-ALERTS_KEPT:]
        self.note(notes.Alert(text=text))
