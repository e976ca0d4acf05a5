"""The coordinator's end of one control stream.

A session has two threads. gRPC's thread sends what `Session.send` queued; a daemon
thread reads and calls the handlers, always in the order connect, receive ...,
disconnect.
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
from diloco_jax.wire.errors import (
    Busy,
    Refused,
    RemoteProtocolError,
    WireError,
)
from diloco_jax.wire.few_lines import FewLines
from diloco_jax.wire.principal import Principal, require_island
from diloco_jax.wire.quota import HELLO_BYTES, Quota
from diloco_jax.wire.threads import ByteQueue, IdleWatch, QueueClosed

logger = logging.getLogger(__name__)

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
