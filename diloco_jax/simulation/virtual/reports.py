"""The reports of an island in virtual time, in the protocol's cadence."""

from __future__ import annotations

from collections.abc import Callable

from diloco_jax.protocol.island.conversation import Conversation
from diloco_jax.protocol.island.reporting import Reporting
from diloco_jax.protocol.messages import Report
from diloco_jax.simulation.virtual.clock import Clock, Due


class Reports:
    """Reports of one incarnation.

    report_s: longest time in seconds between two reports. say: sends a report.
    """

    def __init__(
        self,
        conversation: Conversation,
        clock: Clock,
        report_s: float,
        say: Callable[[Report], None],
    ) -> None:
        self._conversation, self._clock = conversation, clock
        self._report_s, self._say = report_s, say
        self._said: Reporting | None = None
        """Reports on this connection, once it is welcomed."""
        self._next: Due | None = None

    @property
    def begun(self) -> bool:
        """True on a connection that is welcomed."""
        return self._said is not None

    def welcomed(self) -> None:
        """Begin anew, unless this connection was welcomed before."""
        if self._said is None:
            # There is no interval: virtual time may stand still between question and
            # answer.
            self._said = Reporting(self._report_s, self._clock.now, 0.0)

    def disconnected(self) -> None:
        """Stop reporting until the next welcome."""
        self._said = None

    def look(self) -> None:
        """Report if a report is due, and look again at the next due time."""
        said, conversation = self._said, self._conversation
        if said is None:
            return
        now = self._clock.now
        news = said.has_news(conversation.posted, conversation.newest_record)
        due = said.news_due_at if news else said.alive_due_at
        if due <= now:
            self.send()
            due = said.alive_due_at
        # It is set anew only if it would come too late: most reports have news.
        if self._next is not None and self._next.at > due:
            self._next.cancel()
            self._next = None
        if self._next is None:
            self._next = self._clock.at(due, self._ring)

    def send(self) -> None:
        """Report at once."""
        said, conversation = self._said, self._conversation
        if said is None:
            return
        for report in said.reports(
            conversation.current(), conversation.unsent(said.sent_through)
        ):
            said.sent(report, self._clock.now)
            self._say(report)

    def _ring(self) -> None:
        self._next = None
        self.look()
