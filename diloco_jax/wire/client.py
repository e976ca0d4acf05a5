"""An island's end of the wire: one control stream, several bulk connections.

On a long link one connection gets a fraction of the bandwidth, so payloads are cut
into contiguous stripes, one per bulk channel, to the port after that of control.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol import messages
from diloco_jax.wire import addresses, bulk, errors
from diloco_jax.wire.bulk import QUEUED_CONTROL_BYTES, CycleRequest, decoded, encode
from diloco_jax.wire.errors import (
    ConnectionLost,
    LocalProtocolError,
    Refused,
    RemoteProtocolError,
    WireError,
)
from diloco_jax.wire.peers import ByteQueue, IdleWatch, QueueClosed, worker
from diloco_jax.wire.server import SERVICE, keepalive_options
from diloco_jax.wire.tls import Renewed, TlsFiles, explain, large_lost
from diloco_jax.wire.transfers import Connections, Transfers


class ControlStream:
    """Exchange messages with the coordinator, once it has answered the hello. `send`
    never blocks; `receive` has a deadline."""

    welcome: messages.Welcome
    """The coordinator's first message."""

    def __init__(
        self, method: Any, peer: str, hello: messages.Hello, connect_s: float
    ) -> None:
        """Say hello; wait at most `connect_s` for the Welcome.

        Raises Refused, Busy, ConnectionLost or ProtocolError, and closes the stream.
        """
        self._peer = peer
        self._outbox = ByteQueue(QUEUED_CONTROL_BYTES)
        self.send(hello)
        self._inbox = ByteQueue(QUEUED_CONTROL_BYTES)
        # Beyond that it is not read on, and the coordinator's queue fills.
        self._call = method(self._outbox.items())
        if not self._call.add_callback(self._outbox.close):
            self._outbox.close()
        self._reader = threading.Thread(
            target=self._read, name="diloco-control", daemon=True
        )
        self._reader.start()
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
        except WireError:
            self.cancel()
            raise
        self.welcome = first

    def send(self, message: messages.FromIsland) -> None:
        """Queue a message and return at once.

        Raises LocalProtocolError if it is too large; ConnectionLost if the stream is
        dead, or if the queue is full because the coordinator reads too slowly.
        """
        raw = bulk.encode(message)
        if len(raw) > bulk.MAX_CONTROL_BYTES:
            raise LocalProtocolError(
                f"{type(message).__name__} to {self._peer} has {len(raw)} bytes, the "
                f"limit is {bulk.MAX_CONTROL_BYTES}; send it in parts"
            )
        try:
            stored = self._outbox.put(raw)
        except QueueClosed:
            raise self._dead() from None
        if not stored:
            self.cancel()
            raise ConnectionLost(
                f"{self._peer} left {QUEUED_CONTROL_BYTES} bytes of control messages "
                f"unread; connect again"
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
            bulk.from_coordinator, raw, self._peer
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
        except QueueClosed:  # Nothing is kept any more, until the coordinator ends it.
            with contextlib.suppress(grpc.RpcError):
                collections.deque(self._call, maxlen=0)
        except grpc.RpcError as rpc_error:
            error = errors.from_rpc(rpc_error, self._peer)
        finally:
            self._outbox.close()
            self._inbox.close(error)

    def _dead(self) -> ConnectionLost:
        return ConnectionLost(f"the control stream to {self._peer} has ended")


class Client:
    """Connect to a coordinator when needed; every call is bounded in time."""

    def __init__(
        self,
        address: str,
        *,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        bulk_channels: int,
        insecure: bool = False,
    ) -> None:
        """Raise ConfigError if `address` is malformed or must not go without TLS."""
        addresses.require_tls(address, tls=tls is not None, insecure=insecure)
        self.address = address
        self._tls, self._deadlines = tls, deadlines
        self._control: list[Any] = []
        """Channels of control: the newest one, and at most one of older certificates,
        on which a stream may still be open."""
        self._secured = Renewed(tls, self._channel) if tls is not None else None
        if tls is None:
            self._channel(None)
        self._watch = IdleWatch("diloco-client-watch")
        self._channels, self._insecure = bulk_channels, insecure
        self._lock = threading.Lock()
        self._streams: list[ControlStream] = []
        self._transfers: dict[tuple[str, int | None], Transfers] = {}
        self.transfers = self.transfers_at(addresses.bulk_address(address))
        """Uploads and fetches."""

    def transfers_at(self, address: str, number: int | None = None) -> Transfers:
        """Return the uploads and fetches at another bulk port, with connections and
        threads of their own. number: of the worker that has to answer there. Raises
        ConfigError if it must not go without TLS."""
        addresses.require_tls(
            address, tls=self._tls is not None, insecure=self._insecure
        )
        whose = () if number is None else (worker(number),)
        field = "placement.advertise" if whose else "the coordinator's address"
        with self._lock:
            found = self._transfers.get((address, number))
            if found is None:
                connections = Connections(
                    address,
                    self._tls,
                    self._deadlines,
                    2 * max(self._channels, 1),  # As many for either direction.
                    *whose,
                    field=field,
                )
                found = self._transfers[address, number] = Transfers(
                    connections, self._channels, self._deadlines, self._watch
                )
        return found

    def leave_others(self, addresses_kept: tuple[str, ...]) -> None:
        """End the transfers at all bulk ports but the coordinator's and these."""
        with self._lock:
            left = {
                whose: transfers
                for whose, transfers in self._transfers.items()
                if whose[0] not in addresses_kept and transfers is not self.transfers
            }
            for whose in left:
                del self._transfers[whose]
        for transfers in left.values():
            transfers.cancel()
            transfers.close(0.0)

    def open_control(self, hello: messages.Hello) -> ControlStream:
        """Say hello; return when the Welcome has arrived, within about `connect_s`.

        Raises Refused, Busy, ConnectionLost, SecurityError or ProtocolError.
        """
        method = self._control_channel().stream_stream(f"/{SERVICE}/Control")
        connect_s = self._deadlines.connect_s
        try:
            stream = ControlStream(method, self.address, hello, connect_s)
        except ConnectionLost as error:
            raise self._explained(error) from error
        with self._lock:
            self._streams = [s for s in self._streams if s.alive] + [stream]
        return stream

    def status(self, timeout_s: float) -> dict[str, Any]:
        """Return the coordinator's state, as its handlers give it."""
        return self._ask("Status", timeout_s)

    def config(self, timeout_s: float) -> dict[str, Any]:
        """Return the run's config, as builtins."""
        return self._ask("Config", timeout_s)

    def keep(self, cycle: int, timeout_s: float) -> dict[str, Any]:
        """Have a cycle kept: the given one or, for 0, the next one that can be.

        Returns its number (`cycle`), the names of its files (`files`) and, while there
        are none yet, the share that is kept (`share`). Raises Refused for a cycle that
        is not kept and can no longer be.
        """
        return self._ask("Keep", timeout_s, encode(CycleRequest(cycle=cycle)))

    def steer(self, order: messages.Steer, timeout_s: float) -> dict[str, Any]:
        """Change who takes part in the run; durable when this returns.

        Returns the islands that operators have let in (`admitted`) and those in
        quarantine (`quarantined`). Raises Refused if it cannot be done.
        """
        return self._ask("Steer", timeout_s, encode(order))

    def profile(self, order: messages.ProfileOrder, timeout_s: float) -> dict[str, Any]:
        """Have an island trace some steps into its own folder.

        Returns the `folder`, relative to that of the island's process. Raises Refused
        if it cannot be done.
        """
        return self._ask("Profile", timeout_s, encode(order))

    def kept(self, cycle: int, name: str) -> Iterator[memoryview]:
        """Yield the checked bytes of a file of a kept cycle.

        Raises Refused if it is not kept any more; ConnectionLost."""
        return self.transfers.kept(CycleRequest(cycle=cycle, name=name))

    def _ask(self, what: str, timeout_s: float, request: bytes = b"") -> dict[str, Any]:
        method = self._control_channel().unary_unary(f"/{SERVICE}/{what}")
        try:
            raw = method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._explained(errors.from_rpc(error, self.address)) from error
        try:
            answer = json.loads(raw)
            if not isinstance(answer, dict):
                raise ValueError(f"it is a {type(answer).__name__}")
        except ValueError as error:
            raise RemoteProtocolError(
                f"{self.address} sent a {what.lower()} that is no object of JSON: "
                f"{error}; is it a coordinator of this version of diloco?"
            ) from error
        return answer

    def close(self) -> None:
        """End streams and transfers and close all channels, within `stop_s`."""
        deadline = time.monotonic() + self._deadlines.stop_s
        with self._lock:
            streams, self._streams = self._streams, []
            transfers = list(self._transfers.values())
        for stream in streams:
            # Half of the time left, so that the transfers' threads get the other half.
            stream.close(max(0.0, deadline - time.monotonic()) / 2)
        for each in transfers:
            each.cancel()
        for channel in self._control:
            channel.close()
        for each in transfers:
            each.close(max(0.0, deadline - time.monotonic()))
        self._watch.close(1.0)

    def _explained(self, error: WireError) -> WireError:
        """Return the error, or a better one if the socket knows more."""
        if not isinstance(error, ConnectionLost):
            return error
        # Kept short: the caller has waited already, and a socket answers at once or
        # never.
        files = self._secured.files if self._secured is not None else None
        cause = explain(self.address, files, self._deadlines.connect_s / 4)
        if cause is None and isinstance(error, errors.NoAnswer):
            return ConnectionLost(
                f"{error}; it can be connected to, so {large_lost(self.address)}"
            )
        return cause or error

    def _control_channel(self) -> Any:
        """Return a channel with the newest certificates."""
        return (
            self._secured.current() if self._secured is not None else self._control[0]
        )

    def _channel(self, files: TlsFiles | None) -> Any:
        options = channel_options(self._deadlines)
        if files is None:
            channel = grpc.insecure_channel(self.address, options)
        else:
            credentials = files.channel_credentials()
            channel = grpc.secure_channel(self.address, credentials, options)
        while len(self._control) > 1:
            self._control.pop(0).close()
        self._control.append(channel)
        return channel


def channel_options(deadlines: Deadlines) -> list[tuple[str, Any]]:
    """Return gRPC's options: a connection of its own, sizes, reconnection and
    keepalive."""
    retry_ms = int(deadlines.retry_min_s * 1000)
    return [
        *keepalive_options(deadlines),
        ("grpc.use_local_subchannel_pool", 1),
        # Islands dial the advertised address itself.
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", retry_ms),
        ("grpc.min_reconnect_backoff_ms", int(deadlines.connect_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(deadlines.retry_max_s * 1000)),
        # A name may move to another address; gRPC would believe the old one for 30 s.
        ("grpc.dns_min_time_between_resolutions_ms", retry_ms),
    ]
