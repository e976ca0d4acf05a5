"""Bytes from a peer -> messages, or a RemoteProtocolError that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from diloco_jax.wire import messages
from diloco_jax.wire.errors import RemoteProtocolError

Decoded = TypeVar("Decoded")

upload_start = msgspec.msgpack.Decoder(messages.UploadStart).decode
upload_done = msgspec.msgpack.Decoder(messages.UploadDone).decode
fetch_request = msgspec.msgpack.Decoder(messages.FetchRequest).decode
fetch_start = msgspec.msgpack.Decoder(messages.FetchStart).decode


def decoded(decode: Callable[[bytes], Decoded], raw: bytes, peer: str) -> Decoded:
    """`decode(raw)`; RemoteProtocolError if it is not what the decoder expects."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(
            f"message of {len(raw)} bytes from {peer} cannot be understood: {error}; "
            f"both ends must run the same version of diloco"
        ) from error
