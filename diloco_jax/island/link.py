"""An island's control stream, and how it comes to have one.

The stream has hello, reports, and messages of the coordinator. Two threads: one
receives, dispatches and reconnects, one reports. A lost coordinator stops no island:
the link tries again for as long as the island lives, and reports again what was not
acknowledged. A coordinator that lost its state, too, is given the anchors that it asks
for, and welcomes the island in a new term; one of an earlier term is left again. An
island that is refused ends, but one whose key was revoked has a while for another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from diloco_jax.config import Config, Placement
from diloco_jax.config.loading import from_builtins
from diloco_jax.config.placement import Deadlines
from diloco_jax.errors import EXIT_DONE, EXIT_REFUSED
from diloco_jax.island.mailbox import Mailbox, NetworkThreads
from diloco_jax.island.transfers import Lanes
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.island.conversation import goes_back
from diloco_jax.protocol.island.reporting import Reporting, Status
from diloco_jax.protocol.messages import (
    MAX_TEXT,
    AnchorRequest,
    Goodbye,
    Hello,
    Welcome,
)
from diloco_jax.wire import peers
from diloco_jax.wire.client import Client, ControlStream
from diloco_jax.wire.errors import (
    REVOKED_CODE,
    Busy,
    ConnectionLost,
    ProtocolError,
    Refused,
    SecurityError,
    WireError,
)
from diloco_jax.wire.peers import Backoff
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

MISUNDERSTANDINGS = 5
"""Failures in a row that are no accident: the two ends are of different versions."""
Got = TypeVar("Got")


def insist(
    attempt: Callable[[], Got],
    deadlines: Deadlines,
    wait: Callable[[float], object],
    patience_s: float,
    away_s: float,
) -> Got:
    """Return what an attempt to reach the coordinator brings, and try again for
    `patience_s`.

    A coordinator that cannot be reached, or says "come again", is tried for `away_s` if
    that is longer: its machine may still be on its way. The log says why it is waited
    for: at the first failure, then once in `pin_s`. wait: lets seconds pass before the
    next attempt; returns True if there is to be none.

    Raises Refused at once; SecurityError the second time, since the first may be due to
    a coordinator that was just ending; otherwise the last error, once the time is over.
    """
    began, pauses = time.monotonic(), Backoff(*deadlines.retries_s)
    until, away_until = began + patience_s, began + max(patience_s, away_s)
    suspicious, tell_at = False, began
    while True:
        pause_s = pauses.next_s()
        try:
            return attempt()
        except Refused:
            raise
        except WireError as error:
            now, untrusted = time.monotonic(), isinstance(error, SecurityError)
            if away := untrusted or isinstance(error, ConnectionLost | Busy):
                until = now + patience_s
            deadline = away_until if away else until
            if now >= deadline or (untrusted and suspicious):
                raise
            if untrusted:
                suspicious, pause_s = True, deadlines.retry_max_s
            elif now >= tell_at:
                tell_at = now + deadlines.pin_s
                logger.warning(
                    "waits for the coordinator, for %.0f s of at most %.0f: %s",
                    now - began,
                    deadline - began,
                    error,
                )
            if wait(pause_s):
                raise


def ask_config(address: str, name: str, placement: Placement) -> Config:
    """Return the run's config, as the coordinator at HOST:PORT gives it to the island
    of this name. One that is not there is tried again for `away_s`.

    placement: the way to the coordinator, with its certificates.

    Raises:
      ConnectionLost: it is not there. SecurityError: it cannot be trusted.
      ConfigError: it is of another version.
    """
    tls = TlsFiles.load_given(placement.certificates, peers.island(name))
    deadlines, away_s = placement.deadlines, placement.away_s
    client = Client(
        address,
        tls=tls,
        deadlines=deadlines,
        bulk_channels=1,
        insecure=placement.insecure,
    )

    def ask() -> Config:
        return from_builtins(client.config(deadlines.connect_s), client.address)

    try:
        return insist(ask, deadlines, time.sleep, 0.0, away_s)
    finally:
        client.close()


def ending_of(refused: Refused) -> Ending:
    """Return the ending of an island that is refused. If the run is over already, it
    has not failed.
    """
    if refused.code == "finished":
        return Ending(EXIT_DONE, f"it came too late: {refused.message}", "finished")
    return Ending(EXIT_REFUSED, f"{refused.message} ({refused.code})", "refused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Connection:
    """A stream, and what was said on it."""

    stream: ControlStream
    began: float
    reporting: Reporting


class Link(NetworkThreads):
    """Keep the island's control stream up, with one thread that receives and one that
    reports.

    Call `connect`, then `start`, and `leave` at the end. make_hello: returns the hello
    of this process for the island's status.
    """

    def __init__(
        self,
        lanes: Lanes,
        make_hello: Callable[[Status], Hello],
        mailbox: Mailbox,
        deadlines: Deadlines,
    ) -> None:
        self._lanes, self._make_hello = lanes, make_hello
        super().__init__(mailbox, "link", self._receive, self._report)
        self._deadlines = deadlines
        self._connection: _Connection | None = None
        """Replaced as one by the receiving thread: a record that was sent on another
        stream may be lost with it."""
        self._misunderstood = 0
        """Connections in a row that ended at once since one end sent what the other
        does not understand."""
        self._sending = threading.Lock()

    def connect(self, patience_s: float, away_s: float = 0.0) -> Welcome:
        """Connect for the first time; `insist` for these times, as long as the island
        does not end."""

        def wait(pause_s: float) -> bool:
            return self._closing.wait(pause_s) or self._mailbox.ending is not None

        return insist(self._open, self._deadlines, wait, patience_s, away_s)

    def leave(self, ending: Ending, timeout_s: float) -> None:
        """Report what is left, say goodbye and hang up. Never raises."""
        self._closing.set()
        # Wakes the reporting thread; the end of the stream wakes the other one.
        self._mailbox.end(ending.exit_code, ending.text, ending.reason)
        # At once: the threads may take a while to end, and the machine may be gone.
        first = self._connection
        said = first is not None and self._hang_up(first, ending, timeout_s)
        self.close(timeout_s)
        last = self._connection
        if last is not None and last is not first:  # Connected again meanwhile.
            said = self._hang_up(last, ending, timeout_s)
        if last is not None and not said:
            logger.warning("left without a goodbye: the coordinator is away")

    def _hang_up(
        self, connection: _Connection, ending: Ending, timeout_s: float
    ) -> bool:
        """Say the last words and end the stream; return True if they were sent."""
        goodbye = Goodbye(reason=ending.reason, text=ending.text[:MAX_TEXT])
        said = False
        with self._sending, contextlib.suppress(WireError):
            self._send_reports(connection)
            connection.stream.send(goodbye)
            said = True
        connection.stream.close(timeout_s)
        return said

    # ---- receiving --------------------------------------------------------------

    def _receive(self) -> None:
        while not self._closing.is_set():
            assert self._connection is not None
            try:
                message = self._connection.stream.receive(self._deadlines.report_s)
            except WireError as error:
                if isinstance(error, Refused) and error.code != REVOKED_CODE:
                    self._end(ending_of(error))
                elif not self._closing.is_set() and not self._given_up(error):
                    self._reconnect(error)
                continue
            if isinstance(message, AnchorRequest):
                self._lanes.use(message.workers)
            if message is not None:
                self._mailbox.receive(message)

    def _given_up(self, error: WireError) -> bool:
        """End the island if the two ends do not understand each other, which no
        connection cures; return True then."""
        assert self._connection is not None
        lasted_s = time.monotonic() - self._connection.began
        if not isinstance(error, ProtocolError) or lasted_s > self._deadlines.lease_s:
            self._misunderstood = 0
            return False
        self._misunderstood += 1
        if self._misunderstood < MISUNDERSTANDINGS:
            return False
        text = f"{self._misunderstood} connections in a row ended at once: {error}"
        self._end(Ending(EXIT_REFUSED, text, "refused"))
        return True

    def _reconnect(self, error: WireError) -> None:
        began, told = time.monotonic(), ""
        logger.warning("the coordinator is away (%s); training goes on", error)
        backoff = Backoff(*self._deadlines.retries_s, self._misunderstood)
        revoked = error if isinstance(error, Refused) else None
        ends = began + self._deadlines.another_key_s
        while not self._closing.wait(backoff.next_s()):
            now = time.monotonic()
            try:
                self._open()
            except Refused as refused:
                if refused.code != REVOKED_CODE:
                    self._end(ending_of(refused))
                    return
                if revoked is None:
                    ends = now + self._deadlines.another_key_s
                revoked = error = refused
            except WireError as lost:
                error = lost
            else:
                logger.info("connected again after %.1f s", time.monotonic() - began)
                return
            if revoked is not None and now >= ends:
                self._end(ending_of(revoked))
                return
            # One that answers says why the island is not let in, as if its config is
            # another one while the coordinator gathers anchors.
            if not isinstance(error, ConnectionLost) and str(error) != told:
                told = str(error)
                logger.warning("the coordinator does not let it in yet: %s", told)

    def _open(self) -> Welcome:
        """Connect once. Raises WireError."""
        before = self._mailbox.status()
        stream = self._lanes.open_control(self._make_hello(before))
        welcome, now = stream.welcome, time.monotonic()
        if goes_back(before.term, welcome):
            stream.close(0.0)
            raise Busy(
                f"this coordinator is in term {welcome.term}, and this island has been "
                f"in term {before.term}: its state is an old one; stop it, and start "
                f"the one that has the newest state"
            )
        reporting = Reporting(self._deadlines.report_s, now)
        self._connection = _Connection(stream=stream, began=now, reporting=reporting)
        if before.term and welcome.anew:
            logger.warning(
                "the coordinator lost its state: term %d begins", welcome.term
            )
        self._mailbox.receive(welcome)
        return welcome

    def _end(self, ending: Ending) -> None:
        self._closing.set()
        self._mailbox.end(*ending)  # Wakes the reporting thread.

    # ---- reporting --------------------------------------------------------------

    def _report(self) -> None:
        while True:
            assert self._connection is not None
            said = self._connection.reporting
            alive_in_s = said.alive_due_at - time.monotonic()

            def due(status: Status, newest: int, said: Reporting = said) -> bool:
                return self._closing.is_set() or said.has_news(status, newest)

            self._mailbox.wait_for_post(due, alive_in_s)
            news_in_s = said.news_due_at - time.monotonic()
            if self._closing.wait(max(news_in_s, 0.0)):
                return
            try:
                with self._sending:
                    if self._closing.is_set():
                        return
                    self._send_reports(self._connection)
            except WireError:
                # The receiving thread will find out too, and reconnect.
                self._closing.wait(self._deadlines.retry_min_s)

    def _send_reports(self, connection: _Connection) -> None:
        """Send status, and the records that this stream has not had."""
        said = connection.reporting
        status, unsent = self._mailbox.report(said.sent_through)
        failed = list(self._mailbox.failed_donors())
        try:
            while failed:
                connection.stream.send(failed[0])
                del failed[0]
        finally:  # The next stream is told of the others.
            self._mailbox.tell_failed(donor.island for donor in failed)
        for report in said.reports(status, unsent):
            connection.stream.send(report)
            said.sent(report, time.monotonic())
