"""The cadence of an island's reports on a connection, and what a report says.

An island reports what is new, but not more often than every `min_interval_s`, and
says at least every `report_s` that it lives. Records go along in order, each once on
each connection: those that were sent on another one may be lost with it.
"""

from __future__ import annotations

from diloco_jax.protocol.island.status import Status
from diloco_jax.protocol.messages import MAX_RECORDS, Report
from diloco_jax.protocol.values import Phase, Record

MIN_REPORT_INTERVAL_S = 0.02


class Reporting:
    """Keeps what was said on one connection, and when it was said last."""

    def __init__(
        self,
        report_s: float,
        now: float,
        min_interval_s: float = MIN_REPORT_INTERVAL_S,
    ) -> None:
        """now: seconds on any clock, of which all later ones are."""
        self._report_s, self._min_interval_s = report_s, min_interval_s
        self.sent_through = 0
        """Number of the last record that was sent."""
        self._said: tuple[Phase, int] | None = None
        self._said_at = now - min_interval_s

    def has_news(self, status: Status, newest_record: int) -> bool:
        """True if phase, steps or records were not said yet. newest_record: its number,
        0 if there is none."""
        said = (status.phase, status.steps) == self._said
        return not said or newest_record > self.sent_through

    @property
    def news_due_at(self) -> float:
        """Time from which on news may be reported."""
        return self._said_at + self._min_interval_s

    @property
    def alive_due_at(self) -> float:
        """Time of the next report, if there is no news before it."""
        return self._said_at + self._report_s

    def reports(self, status: Status, unsent: tuple[Record, ...]) -> list[Report]:
        """The reports to send now, at least one: together they have all records that
        were not sent yet."""
        return [
            Report(
                phase=status.phase,
                steps=status.steps,
                step_seconds=status.measures.median_step_seconds,
                records=unsent[first : first + MAX_RECORDS],
                measures=status.measures,
            )
            for first in range(0, max(len(unsent), 1), MAX_RECORDS)
        ]

    def sent(self, report: Report, now: float) -> None:
        """Notes that a report is on its way."""
        self._said, self._said_at = (report.phase, report.steps), now
        if report.records:
            self.sent_through = report.records[-1].seq
