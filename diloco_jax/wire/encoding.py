"""Convert messages to bytes and back: MessagePack of tagged structs.

Unknown tags, missing fields and wrong types are refused with the field's path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from diloco_jax.protocol.messages import (
    FromCoordinator,
    FromIsland,
    ProfileOrder,
    Steer,
)
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import RemoteProtocolError

MAX_CONTROL_BYTES = 256 << 10
MAX_ANSWER_BYTES = 4 << 20
"""Most bytes of a message that gRPC carries: the answer to `diloco status`."""
SIZE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
)
QUEUED_CONTROL_BYTES = 16 << 20
"""Bytes of messages that may wait at either end of a stream."""

Decoded = TypeVar("Decoded")

encode = msgspec.msgpack.Encoder().encode
from_island = msgspec.msgpack.Decoder(FromIsland).decode
from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode
steer = msgspec.msgpack.Decoder(Steer).decode
profile_order = msgspec.msgpack.Decoder(ProfileOrder).decode
cycle_request = msgspec.msgpack.Decoder(bulk.CycleRequest).decode
bulk_request = msgspec.msgpack.Decoder(bulk.Request).decode
bulk_reply = msgspec.msgpack.Decoder(bulk.Reply).decode


def decoded(decode: Callable[[bytes], Decoded], raw: bytes, peer: str) -> Decoded:
    """Return `decode(raw)`; raise RemoteProtocolError if it is not what the decoder
    expects."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(
            f"message of {len(raw)} bytes from {peer} cannot be understood: {error}; "
            f"both ends must run the same version of diloco"
        ) from error
