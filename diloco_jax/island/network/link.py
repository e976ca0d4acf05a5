"""An island's connections: the control stream, and its lanes to the workers.

The control stream has hello, reports, and messages of the coordinator. Two threads: one
receives, dispatches and reconnects, one reports. A lost coordinator stops no island:
the link tries again for as long as the island lives, and reports again what was not
acknowledged. A coordinator that lost its state, too, is given the anchors that it asks
for, and welcomes the island in a new term; one of an earlier term is left again. An
island that is refused ends, but one whose key was revoked has a while for another one.

A lane goes to the worker of a fragment, or to the coordinator itself.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.protocol.holding import deal
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.island.conversation import Errand, Wanted, goes_back
from diloco_jax.protocol.island.reporting import Reporting, Status
from diloco_jax.protocol.messages import (
    MAX_TEXT,
    Goodbye,
    Hello,
    ProfileRequest,
    ResendRequest,
    Welcome,
)
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import (
    FetchRequest,
    Revocation,
    RevocationRequest,
    UploadStart,
)
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
from diloco_jax.wire.transfers import Fetched, Transfers

logger = logging.getLogger(__name__)

MISUNDERSTANDINGS = 5
"""Failures in a row that are no accident: the two ends are of different versions."""
AWAY = (ConnectionLost, Busy)
"""Errors of a coordinator that may come, or let the island in, later."""


class Awaited:
    """The wait for one coordinator: told at its first failure, then once in
    `pin_s`."""

    def __init__(self, deadlines: Deadlines, began: float) -> None:
        """began: time of the clock of `tell`."""
        self._every_s, self._began, self._tell_at = deadlines.pin_s, began, began

    def tell(self, error: Exception, now: float, until: float) -> None:
        """Log why it is waited for, for how long already, and until when at most."""
        if now < self._tell_at:
            return
        self._tell_at = now + self._every_s
        logger.warning(
            "waits for the coordinator, for %.0f s of at most %.0f: %s",
            now - self._began,
            until - self._began,
            error,
        )


class Lanes:
    """Control messages to the coordinator, and bulk to and from the worker of each
    fragment, over connections of its own. Thread-safe.
    """

    def __init__(
        self,
        coordinator: Client,
        sizes: tuple[int, ...],
    ) -> None:
        """Begin with the coordinator alone, which `close` closes too. sizes: parameters
        by fragment."""
        self.coordinator, self._sizes = coordinator, sizes
        self._lock = threading.Lock()
        self._addresses: tuple[str, ...] = ()
        self._dealt: tuple[int, ...] = ()
        self.moved: Callable[[tuple[str, ...]], object] = lambda _: None
        """Called with new addresses, once they are in use."""

    @property
    def dealt(self) -> tuple[int, ...]:
        """The worker of each fragment; empty if there are no workers."""
        return self._dealt

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the workers, as the coordinator last gave them."""
        return self._addresses

    def use(self, addresses: tuple[str, ...]) -> None:
        """Exchange bulk with workers at these addresses from now on; empty: with the
        coordinator. Raises ConfigError for one that must not go without TLS."""
        for worker, address in enumerate(addresses):
            self.coordinator.transfers_at(address, worker)
        with self._lock:
            before, self._addresses = self._addresses, addresses
            count = len(addresses)
            self._dealt = deal(self._sizes, count) if count else ()
        # Those of a lead that was started again, if its workers ended with it.
        self.coordinator.leave_others(addresses)
        if addresses != before:
            self.moved(addresses)

    def open_control(self, hello: Hello) -> ControlStream:
        """Say hello to the coordinator; see `Client.open_control`. Its Welcome has the
        addresses of the workers."""
        stream = self.coordinator.open_control(hello)
        self.use(stream.welcome.workers)
        return stream

    def upload(
        self, start: UploadStart, payload: bytes | bytearray | memoryview
    ) -> int:
        """Send a delta to its fragment's worker; see `Transfers.upload`."""
        return self._of(start.fragment).upload(start, payload)

    def fetch(self, request: FetchRequest, *, max_bytes: int) -> Fetched:
        """Fetch a fragment from its worker; see `Transfers.fetch`."""
        return self._of(request.fragment).fetch(request, max_bytes=max_bytes)

    def is_revoked(self, serial: int) -> bool:
        """Ask the coordinator whether a certificate is revoked. Raises WireError."""
        request = RevocationRequest(serial=f"{serial:x}")
        return self.coordinator.transfers.ask(request, Revocation).revoked

    def close(self) -> None:
        """Close all connections."""
        self.coordinator.close()

    def _of(self, fragment: int) -> Transfers:
        with self._lock:
            if not self._addresses:
                return self.coordinator.transfers
            worker = self._dealt[fragment]
            address = self._addresses[worker]
        return self.coordinator.transfers_at(address, worker)


class Connects(Protocol):
    """Calls of a `wire.Client` that the link needs."""

    def open_control(self, hello: Hello) -> ControlStream:
        """Say hello and wait for the Welcome."""
        ...


def ending_of(refused: Refused) -> Ending:
    """Return the ending of an island that is refused. If the run is over already, it
    has not failed.
    """
    if refused.code == "finished":
        return Ending(EXIT_DONE, f"it came too late: {refused.message}", "finished")
    return Ending(EXIT_REFUSED, f"{refused.message} ({refused.code})", "refused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
    """Destination of errands: methods of the receiver, the sender and others."""

    want: Callable[[int, Version], None]
    resend: Callable[[ResendRequest], None]
    profile: Callable[[ProfileRequest], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Connection:
    """A stream, and what was said on it."""

    stream: ControlStream
    began: float
    reporting: Reporting


class Link:
    """Keep the island's control stream up, with one thread that receives and one that
    reports.

    Call `connect`, then `start`, and `close` at the end. make_hello: returns the hello
    of this process for the island's status.
    """

    def __init__(
        self,
        client: Connects,
        make_hello: Callable[[Status], Hello],
        mailbox: Mailbox,
        deadlines: Deadlines,
    ) -> None:
        self._client = client
        self._make_hello = make_hello
        self._mailbox = mailbox
        self._deadlines = deadlines
        self._targets: Targets | None = None
        self._connection: _Connection | None = None
        """Replaced as one by the receiving thread: a record that was sent on another
        stream may be lost with it."""
        self._misunderstood = 0
        """Connections in a row that ended at once since one end sent what the other
        does not understand."""
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._threads = [
            threading.Thread(target=self._receive, name="link", daemon=True),
            threading.Thread(target=self._report, name="reports", daemon=True),
        ]

    def connect(self, patience_s: float, away_s: float = 0.0) -> Welcome:
        """Connect for the first time, and try again for `patience_s`.

        A coordinator that cannot be reached, or says "come again", is tried for
        `away_s` if that is longer: its machine may still be on its way. Raises Refused
        at once. Raises SecurityError the second time, since the first may be due to a
        coordinator that was just ending; otherwise the last error, once the time is
        over.
        """
        began, pauses = time.monotonic(), Backoff(self._deadlines)
        away_until = began + max(patience_s, away_s)
        until = began + patience_s
        suspicious, awaited = False, Awaited(self._deadlines, began)
        while True:
            welcome, pause_s = self._try_to_connect(), pauses.next_s()
            if isinstance(welcome, Welcome):
                return welcome
            now = time.monotonic()
            if away := isinstance(welcome, AWAY):
                until = now + patience_s
            deadline = away_until if away else until
            if now >= deadline or self._mailbox.ending is not None:
                raise welcome
            if isinstance(welcome, SecurityError):
                if suspicious:
                    raise welcome
                suspicious, pause_s = True, self._deadlines.retry_max_s
            else:
                awaited.tell(welcome, now, deadline)
            self._closing.wait(pause_s)

    def start(self, targets: Targets) -> None:
        """Start receiving and reporting."""
        self._targets = targets
        for thread in self._threads:
            thread.start()

    def close(self, ending: Ending, timeout_s: float) -> None:
        """Report what is left, say goodbye and hang up. Never raises."""
        self._closing.set()
        # Wakes the reporting thread; the end of the stream wakes the other one.
        self._mailbox.end(ending.exit_code, ending.text, ending.reason)
        # At once: the threads may take a while to end, and the machine may be gone.
        first = self._connection
        said = first is not None and self._hang_up(first, ending, timeout_s)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)
        last = self._connection
        if last is not None and last is not first:  # Connected again meanwhile.
            said = self._hang_up(last, ending, timeout_s)
        if last is not None and not said:
            logger.warning("left without a goodbye: the coordinator is away")

    def _hang_up(
        self, connection: _Connection, ending: Ending, timeout_s: float
    ) -> bool:
        """Say the last words and end the stream; return True if they were sent."""
        said = self._say_goodbye(connection, ending)
        connection.stream.close(timeout_s)
        return said

    def _say_goodbye(self, connection: _Connection, ending: Ending) -> bool:
        """Say the last words on this stream."""
        with self._sending:
            try:
                self._send_reports(connection)
                text = ending.text[:MAX_TEXT]
                goodbye = Goodbye(reason=ending.reason, text=text)
                connection.stream.send(goodbye)
            except WireError:
                return False
            return True

    # ---- receiving --------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while not self._closing.is_set():
                assert self._connection is not None
                try:
                    message = self._connection.stream.receive(self._deadlines.report_s)
                except WireError as error:
                    if isinstance(error, Refused) and error.code != REVOKED_CODE:
                        self._refused(error)
                        return
                    if self._closing.is_set() or self._given_up(error):
                        return
                    self._reconnect(error)
                    continue
                if message is not None:
                    self._do(self._mailbox.receive(message))
        except Exception as error:
            logger.exception("the control stream's thread failed")
            self._mailbox.end(EXIT_FAILED, f"the control stream failed: {error!r}")

    def _given_up(self, error: WireError) -> bool:
        """Tell if the two ends do not understand each other, which no connection
        cures."""
        assert self._connection is not None
        lasted_s = time.monotonic() - self._connection.began
        if not isinstance(error, ProtocolError) or lasted_s > self._deadlines.lease_s:
            self._misunderstood = 0
            return False
        self._misunderstood += 1
        if self._misunderstood < MISUNDERSTANDINGS:
            return False
        text = f"{self._misunderstood} connections in a row ended at once: {error}"
        self._mailbox.end(EXIT_REFUSED, text, "refused")
        self._closing.set()
        return True

    def _reconnect(self, error: WireError) -> None:
        began, told = time.monotonic(), ""
        logger.warning("the coordinator is away (%s); training goes on", error)
        backoff = Backoff(self._deadlines, self._misunderstood)
        revoked = error if isinstance(error, Refused) else None
        ends = began + self._deadlines.another_key_s
        while not self._closing.wait(backoff.next_s()):
            welcome: Welcome | WireError
            now = time.monotonic()
            try:
                welcome = self._try_to_connect()
            except Refused as refused:
                if refused.code != REVOKED_CODE:
                    self._refused(refused)
                    return
                if revoked is None:
                    ends = now + self._deadlines.another_key_s
                welcome = revoked = refused
            if isinstance(welcome, Welcome):
                logger.info("connected again after %.1f s", time.monotonic() - began)
                return
            if revoked is not None and now >= ends:
                self._refused(revoked)
                return
            # One that answers says why the island is not let in, as if its config is
            # another one while the coordinator gathers anchors.
            if not isinstance(welcome, ConnectionLost) and str(welcome) != told:
                told = str(welcome)
                logger.warning("the coordinator does not let it in yet: %s", told)

    def _try_to_connect(self) -> Welcome | WireError:
        before = self._mailbox.status()
        try:
            stream = self._client.open_control(self._make_hello(before))
        except Refused:
            raise
        except WireError as error:
            return error
        if goes_back(before.term, stream.welcome):
            stream.close(0.0)
            return Busy(
                f"this coordinator is in term {stream.welcome.term}, and this island "
                f"has been in term {before.term}: its state is an old one; stop it, "
                f"and start the one that has the newest state"
            )
        now = time.monotonic()
        reporting = Reporting(self._deadlines.report_s, now)
        self._connection = _Connection(stream=stream, began=now, reporting=reporting)
        if before.term and stream.welcome.anew:
            logger.warning(
                "the coordinator lost its state: term %d begins", stream.welcome.term
            )
        self._do(self._mailbox.receive(stream.welcome))
        return stream.welcome

    def _do(self, errands: tuple[Errand, ...]) -> None:
        """Hand bulk work on. A join has no targets yet, and fetches everything."""
        if self._targets is None:
            return
        for errand in errands:
            match errand:
                case Wanted():
                    self._targets.want(*errand)
                case ResendRequest():
                    self._targets.resend(errand)
                case ProfileRequest():
                    self._targets.profile(errand)

    def _refused(self, refused: Refused) -> None:
        self._mailbox.end(*ending_of(refused))
        self._closing.set()

    # ---- reporting --------------------------------------------------------------

    def _report(self) -> None:
        try:
            while True:
                assert self._connection is not None
                said = self._connection.reporting
                alive_in_s = said.alive_due_at - time.monotonic()
                self._mailbox.wait_for_post(said.has_news, alive_in_s)
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
        except Exception as error:
            logger.exception("the reporting thread failed")
            self._mailbox.end(EXIT_FAILED, f"reporting failed: {error!r}")

    def _send_reports(self, connection: _Connection) -> None:
        """Send status, and the records that this stream has not had."""
        said = connection.reporting
        status, unsent = self._mailbox.report(said.sent_through)
        for report in said.reports(status, unsent):
            connection.stream.send(report)
            said.sent(report, time.monotonic())
