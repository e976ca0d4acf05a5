"""An island's end of one control stream."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import grpc

from diloco_jax.protocol import messages
from diloco_jax.wire import encoding, errors
from diloco_jax.wire.encoding import decoded
from diloco_jax.wire.errors import (
    ConnectionLost,
    LocalProtocolError,
    Refused,
    RemoteProtocolError,
    WireError,
)
from diloco_jax.wire.threads import ByteQueue, QueueClosed

logger = logging.getLogger(__name__)

OUTBOX_BYTES = encoding.QUEUED_CONTROL_BYTES
INBOX_BYTES = encoding.QUEUED_CONTROL_BYTES
"""Bytes of waiting messages beyond which the stream is not read on. The coordinator's
queue fills then."""


class ControlStream:
    """Exchange messages with the coordinator. `send` never blocks; `receive` has a
    deadline."""

    welcome: messages.Welcome
    """The coordinator's first message."""

    def __init__(self, method: Any, peer: str, hello: messages.Hello) -> None:
        self._peer = peer
        self._outbox = ByteQueue(OUTBOX_BYTES)
        self.send(hello)
        self._inbox = ByteQueue(INBOX_BYTES)
        self._call = method(self._outbox.items())
        if not self._call.add_callback(self._outbox.close):
            self._outbox.close()
        self._reader = threading.Thread(
            target=self._read, name="diloco-control", daemon=True
        )
        self._reader.start()

    def await_welcome(self, connect_s: float) -> None:
        """Wait at most `connect_s` for the answer to the hello.

        Raises Refused, Busy, ConnectionLost or ProtocolError, and closes the stream.
        """
        try:
            first = self.receive(connect_s)
            if first is None:
                raise errors.NoAnswer(
                    f"{self._peer} did not answer a Hello within {connect_s:g} s; is "
                    f"it a diloco coordinator, and is it running?"
                )
            if not isinstance(first, messages.Welcome):
                raise RemoteProtocolError(
                    f"first message from {self._peer} is {type(first).__name__}, "
                    f"expected Welcome or Refused"
                )
            self.welcome = first
        except WireError:
            self.cancel()
            raise

    def send(self, message: messages.FromIsland) -> None:
        """Queue a message and return at once.

        Raises LocalProtocolError if it is too large; ConnectionLost if the stream is
        dead, or if the queue is full because the coordinator reads too slowly.
        """
        raw = encoding.encode(message)
        if len(raw) > encoding.MAX_CONTROL_BYTES:
            raise LocalProtocolError(
                f"{type(message).__name__} to {self._peer} has {len(raw)} bytes, the "
                f"limit is {encoding.MAX_CONTROL_BYTES}; send it in parts"
            )
        try:
            stored = self._outbox.put(raw)
        except QueueClosed:
            raise self._dead() from None
        if not stored:
            self.cancel()
            raise ConnectionLost(
                f"{self._peer} left {OUTBOX_BYTES} bytes of control messages unread; "
                f"connect again"
            )

    def receive(self, timeout_s: float) -> messages.FromCoordinator | None:
        """Return the next message, or None after `timeout_s`.

        Raises Refused if the coordinator refused this island. Once the stream is dead
        and all that came is read, raises ConnectionLost or the error that ended it.
        """
        try:
            raw = self._inbox.get(timeout_s)
        except QueueClosed as closed:
            raise closed.error or self._dead() from None
        if raw is None:
            return None
        message: messages.FromCoordinator = decoded(
            encoding.from_coordinator, raw, self._peer
        )
        if isinstance(message, messages.Refused):
            raise Refused(message.code, message.message)
        return message

    @property
    def alive(self) -> bool:
        """Tell if the stream is still open."""
        return self._reader.is_alive()

    def close(self, timeout_s: float) -> None:
        """Send what is queued, then end the stream; cut it off at `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._outbox.close()
        # Nothing may be reading any more, and a full inbox would hold up the end.
        self._inbox.close(discard=True)
        self._reader.join(max(0.0, deadline - time.monotonic()))
        self.cancel()

    def cancel(self) -> None:
        """End the stream at once."""
        self._outbox.close(discard=True)
        self._inbox.close(discard=True)
        self._call.cancel()

    def _read(self) -> None:
        error: WireError = self._dead()
        try:
            for raw in self._call:
                self._inbox.put(raw, wait=True)
        except QueueClosed:
            self._drain()
        except grpc.RpcError as rpc_error:
            error = errors.from_rpc(rpc_error, self._peer)
        finally:
            self._outbox.close()
            self._inbox.close(error)

    def _drain(self) -> None:
        """Read on without keeping anything, until the coordinator ends the stream."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as error:
            logger.debug("%s: while closing: %s", self._peer, error)

    def _dead(self) -> ConnectionLost:
        return ConnectionLost(f"the control stream to {self._peer} has ended")
