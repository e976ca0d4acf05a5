"""An island's account of itself: its status, its hello, and the cadence of its reports.

A hello is the first message on every connection. Then an island reports news at most
once every `min_interval_s`, and reports at least every `report_s` to show that it is
alive. Records are sent in order, each once on each connection: records sent on a lost
connection may be lost with it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import asdict

from diloco_jax.protocol.messages import (
    MAX_RECORDS,
    MOST_POSITION,
    Hello,
    Measures,
    Outstanding,
    Phase,
    Record,
    Report,
    Version,
)

MIN_REPORT_INTERVAL_S = 0.02


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Status of an incarnation. The loop posts the first fields; the conversation with
    the coordinator adds the others."""

    phase: Phase = "joining"
    steps: int = 0
    outstanding: tuple[Outstanding, ...] = ()
    versions: tuple[Version, ...] = ()
    """Versions of the anchors, current or about to be adopted."""
    measures: Measures = Measures()
    watches: bool = False

    run_id: str = ""
    """The island's run, known from its first welcome on."""
    term: int = 0
    """Newest term in which this process was welcomed; 0: none yet."""
    term_name: str = ""
    changes: tuple[float, ...] = ()
    """See `Hello` for these two."""
    sequences_granted: int = 0
    records_through: int = 0
    """Number of the last acknowledged record."""
    tokens: int = 0
    """Progress of the run in tokens, as last heard."""
    own_tokens: int = 0
    """Tokens of the incarnation's steps in it."""
    next_position: int = 0
    """Position below which data was granted to any island, as last heard."""


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a hello that is constant during an incarnation; see `Hello` for its
    fields."""

    island: str
    incarnation: int
    session: str
    fingerprint: str
    tokens_per_step: int
    sequences_per_step: int
    lookahead: int = 0
    gives_at: tuple[str, ...] = ()
    plan: str = ""
    run: dict[str, Any] = msgspec.field(default_factory=dict)
    island_config: dict[str, Any] = msgspec.field(default_factory=dict)
    environment: dict[str, Any] = msgspec.field(default_factory=dict)


def hello(who: Introduction, status: Status) -> Hello:
    """Return the hello of an incarnation with this status."""
    said = asdict(status)
    del said["measures"], said["watches"]
    said["next_position"] = min(status.next_position, MOST_POSITION)
    step_seconds = status.measures.median_step_seconds
    return Hello(**asdict(who), **said, step_seconds=step_seconds)


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
                watches=status.watches,
            )
            for first in range(0, max(len(unsent), 1), MAX_RECORDS)
        ]

    def sent(self, report: Report, now: float) -> None:
        """Note that a report was sent."""
        self._said, self._said_at = (report.phase, report.steps), now
        if report.records:
            self.sent_through = report.records[-1].seq
