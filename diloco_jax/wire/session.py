"""The coordinator's end of one control stream, and what it costs at most.

A session has two threads. gRPC's thread sends what `Session.send` queued; a daemon
thread reads and calls the handlers, always in the order connect, receive ...,
disconnect.

A control message may cost lines on the tape and the log, and time of the one thread
that decides. A peer that is too fast waits: the coordinator stops reading, and gRPC's
flow control reaches the peer. A request for bulk costs a thread's time, whatever its
length, and has a rate, too. A refused call costs its peer nothing and may come a
thousand times a second, so each peer has a few lines of the log. The number of those
that were left out stands in the next one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol import messages
from diloco_jax.wire import encoding, errors
from diloco_jax.wire.encoding import decoded
from diloco_jax.wire.errors import Busy, Refused, RemoteProtocolError, WireError
from diloco_jax.wire.principal import Principal, require_island
from diloco_jax.wire.threads import ByteQueue, IdleWatch, QueueClosed

logger = logging.getLogger(__name__)

BYTES_PER_SECOND = 64 << 10
"""Rate of one island in the long run: hundreds of records, or one hello, a second."""
BURST_BYTES = 4 << 20
HELLO_BYTES = 64 << 10
"""Bytes that a hello counts for: it may end one incarnation and begin another, and each
is made durable."""
REQUESTS_PER_SECOND = 16
"""Rate of requests for bulk, for each place of the peer: stripes have 1 MiB or more
unless the payload is smaller, so it holds up no link."""
LEAST_REQUESTS = 64
BURST_S = 8
"""Seconds of requests at that rate which may come at once, as in a join."""
TOLD_EVERY_S = 60.0


class Quota:
    """The quota of one peer, over all of its streams or connections. Any thread may
    call it."""

    def __init__(
        self,
        who: str,
        rate: float = BYTES_PER_SECOND,
        burst: float = BURST_BYTES,
        what: str = "bytes of control messages",
    ) -> None:
        """rate, burst: of `what`, a second and at once."""
        self._who, self._rate, self._burst, self._what = who, rate, burst, what
        self._lock = threading.Lock()
        self._left, self._at = float(burst), time.monotonic()
        self._told = -TOLD_EVERY_S

    def wait_s(self, amount: int) -> float:
        """Count so much; return the seconds to wait before it is handled."""
        with self._lock:
            now = time.monotonic()
            earned = (now - self._at) * self._rate
            self._left = min(self._left + earned, self._burst) - amount
            self._at = now
            if self._left >= 0:
                return 0.0
            if now - self._told >= TOLD_EVERY_S:
                self._told = now
                logger.warning(
                    "%s sends more than %d %s a second; what it sends waits",
                    self._who,
                    self._rate,
                    self._what,
                )
            return -self._left / self._rate


AT_ONCE = 20
"""Lines about one peer in a row."""
EVERY_S = 60.0
"""Seconds in which a peer earns another one."""
MOST_KNOWN = 1000
"""Peers whose lines are counted; beyond these, the one longest without a line is
forgotten."""
MOST_CHARS = 1000
"""Characters of one line."""


class FewLines:
    """The lines of one server, by peer. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Principal | str | None, tuple[float, float, int]] = {}
        """Lines left, when, and how many were left out since the last one. Peers
        without a certificate share theirs."""

    def log(
        self,
        logger: logging.Logger,
        level: int,
        who: Principal | str | None,
        text: str,
        *,
        trace: bool = False,
    ) -> None:
        """Log a line about `who`, a peer or in words several, or count it. trace: with
        the error at hand."""
        if not logger.isEnabledFor(level):
            return
        out = self._left_out(who)
        if out is None:
            return
        more = f"; {out} more lines about {_name(who)} were left out" if out else ""
        logger.log(level, "%s%s", text[:MOST_CHARS], more, exc_info=trace)

    def _left_out(self, who: Principal | str | None) -> int | None:
        """Count a line; return how many were left out before it, None if it is one of
        them."""
        now = time.monotonic()
        with self._lock:
            left, at, out = self._known.pop(who, (float(AT_ONCE), now, 0))
            left = min(left + (now - at) / EVERY_S, AT_ONCE)
            written = left >= 1
            self._known[who] = (
                (left - 1, now, 0) if written else (left, now, out + 1)
            )  # The newest one stands last.
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
            return out if written else None


def _name(who: Principal | str | None) -> str:
    return "peers without a certificate" if who is None else str(who)


OUTBOX_BYTES = encoding.QUEUED_CONTROL_BYTES
Identify = Callable[[], Principal | None]


class ControlHandlers(Protocol):
    """Handlers that a session calls from its own reading thread."""

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Handle a peer's hello; every answer goes through `session.send`.

        May raise Refused; then neither `receive` nor `disconnect` is called.
        """

    def receive(
        self, session: Session, message: messages.Report | messages.Goodbye
    ) -> None:
        """Handle the peer's next message."""

    def disconnect(self, session: Session) -> None:
        """Handle the end of the session, which either end may have caused. Called
        once."""


class Session:
    """One island's control stream, as the coordinator sees it."""

    hello: messages.Hello
    """The first message; set before `connect` is called."""
    connected = False
    """True once a handler has accepted the hello."""

    def __init__(
        self,
        number: int,
        context: Any,
        identify: Identify,
        quota: Quota | None = None,
        lines: FewLines | None = None,
    ) -> None:
        """identify: returns who the peer is, None without TLS; raises Refused
        once its certificate is revoked. quota, lines: the peer's, over all of its
        streams; None = those of this stream alone."""
        self._lines = lines or FewLines()
        self.id = number
        self._identify = identify
        self.peer: str = context.peer()
        self._context = context
        self._quota = quota or Quota(self.peer)
        self._outbox = ByteQueue(OUTBOX_BYTES)

    def send(self, message: messages.FromCoordinator) -> None:
        """Queue a message and return at once; do nothing on a closed session.

        A peer that leaves more than `OUTBOX_BYTES` unread is too slow: its session
        ends, and it may come back.
        """
        try:
            stored = self._outbox.put(encoding.encode(message))
        except QueueClosed:
            return
        if not stored:
            logger.warning(
                "%s: more than %d bytes of control messages unread; the session ends",
                self,
                OUTBOX_BYTES,
            )
            self._outbox.close(discard=True)
            self._context.cancel()

    def close(self, refused: Refused | None = None) -> None:
        """End the session after the queued messages. If it is refused, the peer is told
        why.
        """
        if refused is not None:
            self.send(messages.Refused(code=refused.code, message=refused.message))
        self._outbox.close()

    def fail(self, error: WireError) -> None:
        """End the session after the queued messages; tell the peer of the error."""
        # Its frames would hold this session, which holds the error, and so the stream
        # on its connection until the garbage is collected.
        self._outbox.close(error.with_traceback(None))

    def serve(
        self,
        requests: Iterator[bytes],
        handlers: ControlHandlers,
        watch: IdleWatch,
        deadlines: Deadlines,
    ) -> Iterator[bytes]:
        """Yield the stream's answers until the session ends."""
        if not self._context.add_callback(self._outbox.close):
            return
        reader = threading.Thread(
            target=self._read,
            args=(requests, handlers, watch, deadlines),
            name=f"diloco-session-{self.id}",
            daemon=True,
        )
        try:
            reader.start()
        except RuntimeError as none:  # "can't start new thread"
            errors.abort(self._context, Busy(f"no thread for this stream: {none}"))
        error: WireError | None = None
        while True:
            try:
                raw = self._outbox.get()
            except QueueClosed as closed:
                error = closed.error
                break
            if raw is not None:
                with watch.guard(deadlines.idle_s, self._context.cancel):
                    yield raw
        if error is not None:
            errors.abort(self._context, error)

    def take(self, raw: bytes, handlers: ControlHandlers) -> None:
        """Hand the peer's next message to the handlers; the first is its hello.

        Raises RemoteProtocolError if it cannot be understood or is out of order,
        Refused or SecurityError if the peer may not say it, and what a handler raises.
        """
        message = self._decode(raw)
        who = self._identify()
        if self.connected:
            if isinstance(message, messages.Hello):
                raise RemoteProtocolError(
                    f"{self.peer} sent a second Hello; open a new stream for it"
                )
            handlers.receive(self, message)
            return
        if not isinstance(message, messages.Hello):
            raise RemoteProtocolError(
                f"first message from {self.peer} is {type(message).__name__}, "
                f"expected Hello"
            )
        require_island(who, message.island)
        self.hello = message
        handlers.connect(message, self)
        self.connected = True

    def _read(
        self,
        requests: Iterator[bytes],
        handlers: ControlHandlers,
        watch: IdleWatch,
        deadlines: Deadlines,
    ) -> None:
        silent = RemoteProtocolError(
            f"{self.peer} opened a control stream and sent no Hello within "
            f"{deadlines.connect_s:g} s"
        )
        try:
            with watch.guard(deadlines.connect_s, lambda: self.fail(silent)):
                first = next(requests, None)
            if first is None:
                return
            self._keep_pace(max(len(first), HELLO_BYTES))
            self.take(first, handlers)
            for raw in requests:
                self._keep_pace(len(raw))
                self.take(raw, handlers)
        except grpc.RpcError:
            self._log(logging.INFO, "the connection is gone")
        except Refused as refused:
            self._log(logging.INFO, f"refused ({refused.code}): {refused.message}")
            self.close(refused)
        except WireError as error:
            self._log(logging.WARNING, str(error))
            self.fail(error)
        except Exception as error:
            self._log(logging.ERROR, "failed")
            self.fail(internal_error(error))
        finally:
            self.close()
            if self.connected:
                handlers.disconnect(self)

    def _log(self, level: int, text: str) -> None:
        who = None
        with contextlib.suppress(WireError):
            who = self._identify()
        trace = level >= logging.ERROR
        self._lines.log(logger, level, who, f"{self}: {text}", trace=trace)

    def _keep_pace(self, nbytes: int) -> None:
        if wait_s := self._quota.wait_s(nbytes):
            time.sleep(wait_s)

    def _decode(self, raw: bytes) -> messages.FromIsland:
        if len(raw) > encoding.MAX_CONTROL_BYTES:
            raise RemoteProtocolError(
                f"message of {len(raw)} bytes from {self.peer}, the limit is "
                f"{encoding.MAX_CONTROL_BYTES}; send it in parts"
            )
        message: messages.FromIsland = decoded(encoding.from_island, raw, self.peer)
        return message

    def __str__(self) -> str:
        hello = getattr(self, "hello", None)
        who = f"island {hello.island}" if hello else "no hello yet"
        return f"session {self.id} ({who}, {self.peer})"


def internal_error(error: Exception) -> WireError:
    """Make the error that a peer is told of a bug or a full disk at this end."""
    return WireError(
        f"the coordinator failed on this call ({type(error).__name__}); see its log"
    )
