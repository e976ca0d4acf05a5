"""The cadence and content of an island's reports on one connection.

An island reports news at most once every `min_interval_s`, and reports at least every
`report_s` to show that it is alive. Records are sent in order, each once on each
connection: records sent on a lost connection may be lost with it.
"""

from __future__ import annotations

from diloco_jax.protocol.island.status import Status
from diloco_jax.protocol.messages import MAX_RECORDS, Report
from diloco_jax.protocol.values import Phase, Record

MIN_REPORT_INTERVAL_S = 0.02


class Reporting:
    """The last report on one connection, and the time at which it was sent."""

    def __init__(
        self,
        report_s: float,
        now: float,
        min_interval_s: float = MIN_REPORT_INTERVAL_S,
    ) -> None:
        """now: seconds on any clock, the same for all later times."""
        self._report_s, self._min_interval_s = report_s, min_interval_s
        self.sent_through = 0
        """Number of the last sent record."""
        self._said: tuple[Phase, int] | None = None
        self._said_at = now - min_interval_s

    def has_news(self, status: Status, newest_record: int) -> bool:
        """Tell whether phase, steps or records are not reported yet. newest_record: the
        number of the newest record; 0 if there is none."""
        said = (status.phase, status.steps) == self._said
        return not said or newest_record > self.sent_through

    @property
    def news_due_at(self) -> float:
        """Time from which news may be reported."""
        return self._said_at + self._min_interval_s

    @property
    def alive_due_at(self) -> float:
        """Time of the next report if no news comes before it."""
        return self._said_at + self._report_s

    def reports(self, status: Status, unsent: tuple[Record, ...]) -> list[Report]:
        """Return the reports to send now, at least one; together they carry all unsent
        records."""
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
        """Note that a report was sent."""
        self._said, self._said_at = (report.phase, report.steps), now
        if report.records:
            self.sent_through = report.records[-1].seq
