"""The coordinator's end of one control stream, and the answers to all calls.

A session has two threads. gRPC's thread sends what `Session.send` queued; a daemon
thread reads and calls the handlers, always in the order connect, receive ...,
disconnect. A peer that sends too fast waits: the coordinator stops reading, and gRPC's
flow control reaches the peer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc

from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol import messages
from diloco_jax.wire import bulk, errors
from diloco_jax.wire.bulk import QUEUED_CONTROL_BYTES, decoded
from diloco_jax.wire.errors import Busy, Refused, RemoteProtocolError, WireError
from diloco_jax.wire.peers import (
    HELLO_BYTES,
    ByteQueue,
    IdleWatch,
    Principal,
    QueueClosed,
    Quota,
    RateLimitedLog,
    island,
    require,
)

logger = logging.getLogger(__name__)

Identify = Callable[[], Principal | None]


class Session:
    """One island's control stream, as the coordinator sees it."""

    hello: messages.Hello
    """The first message; set before `Handlers.connect` is called."""
    connected = False
    """True once a handler has accepted the hello."""

    def __init__(
        self,
        number: int,
        context: Any,
        handlers: Handlers,
        identify: Identify,
        quota: Quota,
        log: RateLimitedLog,
    ) -> None:
        """identify: returns who the peer is, None without TLS; raises Refused
        once its certificate is revoked. quota: the peer's, over all of its streams."""
        self.id = number
        self.peer: str = context.peer()
        self._context, self._handlers, self._identify = context, handlers, identify
        self._quota, self._lines = quota, log
        self._outbox = ByteQueue(QUEUED_CONTROL_BYTES)

    def send(self, message: messages.FromCoordinator) -> None:
        """Queue a message and return at once; do nothing on a closed session.

        A peer that leaves more than `QUEUED_CONTROL_BYTES` unread is too slow: its
        session ends, and it may come back.
        """
        try:
            stored = self._outbox.put(bulk.encode(message))
        except QueueClosed:
            return
        if not stored:
            logger.warning(
                "%s: more than %d bytes of control messages unread; the session ends",
                self,
                QUEUED_CONTROL_BYTES,
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
        self, requests: Iterator[bytes], watch: IdleWatch, deadlines: Deadlines
    ) -> Iterator[bytes]:
        """Yield the stream's answers until the session ends."""
        if not self._context.add_callback(self._outbox.close):
            return
        reader = threading.Thread(
            target=self._read,
            args=(requests, watch, deadlines.connect_s),
            name=f"diloco-session-{self.id}",
            daemon=True,
        )
        try:
            reader.start()
        except RuntimeError as none:  # "can't start new thread"
            errors.abort(self._context, Busy(f"no thread for this stream: {none}"))
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

    def take(self, raw: bytes) -> None:
        """Hand the peer's next message to the handlers; the first is its hello.

        Raises RemoteProtocolError if it cannot be understood or is out of order,
        Refused or SecurityError if the peer may not say it, and what a handler raises.
        """
        if len(raw) > bulk.MAX_CONTROL_BYTES:
            raise RemoteProtocolError(
                f"message of {len(raw)} bytes from {self.peer}, the limit is "
                f"{bulk.MAX_CONTROL_BYTES}; send it in parts"
            )
        message: messages.FromIsland = decoded(bulk.from_island, raw, self.peer)
        who = self._identify()
        if self.connected:
            if isinstance(message, messages.Hello):
                raise RemoteProtocolError(
                    f"{self.peer} sent a second Hello; open a new stream for it"
                )
            self._handlers.receive(self, message)
            return
        if not isinstance(message, messages.Hello):
            raise RemoteProtocolError(
                f"first message from {self.peer} is {type(message).__name__}, "
                f"expected Hello"
            )
        require(who, island(message.island))
        self.hello = message
        self._handlers.connect(message, self)
        self.connected = True

    def _read(
        self, requests: Iterator[bytes], watch: IdleWatch, connect_s: float
    ) -> None:
        silent = RemoteProtocolError(
            f"{self.peer} opened a control stream and sent no Hello within "
            f"{connect_s:g} s"
        )
        try:
            with watch.guard(connect_s, lambda: self.fail(silent)):
                first = next(requests, None)
            if first is None:
                return
            self._keep_pace(max(len(first), HELLO_BYTES))
            self.take(first)
            for raw in requests:
                self._keep_pace(len(raw))
                self.take(raw)
        except grpc.RpcError:
            self._log(logging.INFO, "the connection is gone")
        except Refused as refused:
            self._log(logging.INFO, f"refused ({refused.code}): {refused.message}")
            self.close(refused)
        except Exception as error:
            level, telling = errors.told(error)
            self._log(max(level, logging.WARNING), str(error))
            self.fail(telling)
        finally:
            self.close()
            if self.connected:
                self._handlers.disconnect(self)

    def _log(self, level: int, text: str) -> None:
        log_about(self._lines, logger, level, self._identify, f"{self}: {text}")

    def _keep_pace(self, nbytes: int) -> None:
        if wait_s := self._quota.wait_s(nbytes):
            time.sleep(wait_s)

    def __str__(self) -> str:
        hello = getattr(self, "hello", None)
        who = f"island {hello.island}" if hello else "no hello yet"
        return f"session {self.id} ({who}, {self.peer})"


def log_about(
    log: RateLimitedLog,
    logger: logging.Logger,
    level: int,
    identify: Identify,
    text: str,
) -> None:
    """Log a line about whoever calls. A failure of this end brings its trace."""
    who = None
    with contextlib.suppress(WireError):
        who = identify()
    log.log(logger, level, who, text, trace=level >= logging.ERROR)


class Handlers:
    """The answers of one process to calls. Many threads call the methods at once.

    A process overrides those that it answers. The others refuse.
    """

    def refuse(self) -> NoReturn:
        """Answer a call that is not answered here."""
        raise Refused(
            "elsewhere",
            "this process does not answer such calls; ask the coordinator, and check "
            "the address",
        )

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Handle a peer's hello; every answer goes through `session.send`.

        May raise Refused or Busy; then neither `receive` nor `disconnect` is called.
        """
        self.refuse()

    def receive(self, session: Session, message: messages.AfterHello) -> None:
        """Handle the peer's next message."""

    def disconnect(self, session: Session) -> None:
        """Handle the end of the session, which either end may have caused. Called
        once."""

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the memory into which this stripe is received, `start.length` bytes;
        or a shorter place if the stripe has arrived before, and its bytes go nowhere.

        Bytes are written there as they arrive, before their checksum is compared. The
        server releases the place at the end, whatever that is. May raise Refused, Busy
        or RemoteProtocolError.
        """
        self.refuse()

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a received and checked stripe; return True if it completes the delta.
        `place` is the memory that `upload_begin` returned.
        """
        self.refuse()

    def fetch(self, request: bulk.FetchRequest) -> bulk.FetchSource:
        """Return the payload of which a stripe is asked for. May raise Refused, Busy,
        VersionGone or RemoteProtocolError.
        """
        self.refuse()

    def kept(self, cycle: int, name: str) -> memoryview:
        """Return the bytes of a file of a kept cycle; may raise Refused or Busy."""
        self.refuse()

    def keep(self, cycle: int) -> dict[str, Any]:
        """Have a cycle kept; see `Client.keep`. May raise Refused or Busy."""
        self.refuse()

    def steer(self, order: messages.Steer) -> dict[str, Any]:
        """Change who takes part; see `Client.steer`. May raise Refused or Busy."""
        self.refuse()

    def profile(self, order: messages.ProfileOrder) -> dict[str, Any]:
        """Have steps traced; see `Client.profile`. May raise Refused or Busy."""
        self.refuse()

    def status(self) -> dict[str, Any]:
        """Return JSON-compatible state for `diloco status`."""
        self.refuse()
