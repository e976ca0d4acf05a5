"""Chunks of the bytes of a delta or a published fragment on the wire.

A chunk is a header of 24 bytes (magic, XXH3-64 of the payload, offset in the whole
payload u64, length u32; little-endian) and at most 1 MiB of payload. It is XXH3 because
a CRC-32 of every byte at both ends took a quarter of a transfer's CPU time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from diloco_jax.wire.errors import RemoteProtocolError

CHUNK_BYTES = 1 << 20
MAGIC = b"DLC2"
_HEADER = struct.Struct("<4sQQI")
HEADER_BYTES = _HEADER.size
MAX_MESSAGE_BYTES = 4 << 20
"""Most bytes of a frame, a control message, and the answer to `diloco status`."""
MESSAGE_PREFIX_BYTES = 5
"""Bytes that gRPC adds to every message, counted in `wire_bytes`. HTTP/2 and TLS are
not."""

SIZE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def chunks(payload: memoryview, offset: int = 0) -> Iterator[bytes]:
    """Cut bytes into framed chunks, one copy each; `offset` is that of the first."""
    view = payload.cast("B")
    for start in range(0, len(view), CHUNK_BYTES):
        part = view[start : start + CHUNK_BYTES]
        checksum = xxh3_64_intdigest(part)
        header = _HEADER.pack(MAGIC, checksum, offset + start, len(part))
        yield b"".join((header, part))


def check(frame: bytes, *, offset: int, room: int, peer: str) -> memoryview:
    """Return the payload of a chunk that must begin at `offset` and hold 1..`room`
    bytes.

    Raises RemoteProtocolError naming what was expected and what was found.
    """
    if len(frame) < HEADER_BYTES:
        raise RemoteProtocolError(
            f"chunk from {peer} at byte {offset} has {len(frame)} bytes, less than "
            f"its header of {HEADER_BYTES}; send the transfer again"
        )
    magic, checksum, found_offset, length = _HEADER.unpack_from(frame)
    payload = memoryview(frame)[HEADER_BYTES:]
    limit = min(room, CHUNK_BYTES)
    if magic != MAGIC:
        raise RemoteProtocolError(
            f"chunk from {peer} at byte {offset} begins with {magic!r}, expected "
            f"{MAGIC!r}; both ends must run the same version of diloco"
        )
    if found_offset != offset:
        raise RemoteProtocolError(
            f"chunk from {peer} has offset {found_offset}, expected {offset}; "
            f"send the transfer again"
        )
    if length != len(payload) or not 0 < length <= limit:
        raise RemoteProtocolError(
            f"chunk from {peer} at byte {offset} announces {length} bytes and holds "
            f"{len(payload)}, expected 1 to {limit}; send the transfer again"
        )
    found = xxh3_64_intdigest(payload)
    if found != checksum:
        raise RemoteProtocolError(
            f"chunk from {peer} at byte {offset} is damaged: checksum {found:016x}, "
            f"expected {checksum:016x}; send the transfer again"
        )
    return payload
