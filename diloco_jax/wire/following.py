"""A standby's end of its stream from the primary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import grpc

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire import addresses, errors, follow
from diloco_jax.wire.client import channel_options
from diloco_jax.wire.encoding import decoded, encode
from diloco_jax.wire.errors import ConnectionLost
from diloco_jax.wire.server import SERVICE
from diloco_jax.wire.threads import ByteQueue, QueueClosed
from diloco_jax.wire.tls import TlsFiles

ANSWERS_BYTES = 1 << 20


class FollowStream:
    """One stream: `run` on one thread; `answer` and `cancel` from any."""

    def __init__(
        self,
        address: str,
        request: follow.FollowRequest,
        *,
        tls: TlsFiles | None,
        insecure: bool,
        deadlines: Deadlines,
    ) -> None:
        """Raise ConfigError if the address must not go without TLS."""
        addresses.require_tls(address, tls=tls is not None, insecure=insecure)
        options = channel_options(deadlines)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            credentials = tls.channel_credentials()
            self._channel = grpc.secure_channel(address, credentials, options)
        self._address = address
        self._outbox = ByteQueue(ANSWERS_BYTES)
        self._outbox.put(encode(request))
        self._call: Any = self._channel.stream_stream(f"/{SERVICE}/Follow")(
            self._outbox.items()
        )

    def run(self, got: Callable[[follow.FromPrimary], None]) -> None:
        """Call the function with each message, in order, until the stream ends. Raises
        the reason, and what the function raises."""
        try:
            for raw in self._call:
                got(decoded(follow.from_primary, raw, self._address))
        except grpc.RpcError as broken:
            raise errors.from_rpc(broken, self._address) from broken
        finally:
            self.cancel()
            self._channel.close()
        raise ConnectionLost(f"{self._address} ended the stream")

    def answer(self, number: int) -> None:
        """Tell the primary what is durable here. A full queue is left as it is: the
        primary finds this standby silent."""
        with contextlib.suppress(QueueClosed):
            self._outbox.put(encode(follow.Answered(number=number)))

    def cancel(self) -> None:
        """End the stream."""
        self._outbox.close(discard=True)
        self._call.cancel()
