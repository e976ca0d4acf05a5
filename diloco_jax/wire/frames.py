"""Frames of the bulk port: messages, and chunks of payloads, on a plain byte stream.

A message is a header of 8 bytes (magic, length u32) and MessagePack of at most 1 MiB.
A chunk is a header of 24 bytes (magic, XXH3-64 of the payload, offset in the whole
payload u64, length u32; little-endian) and at most 1 MiB of payload. It is XXH3 because
a CRC-32 of every byte at both ends took a quarter of a transfer's CPU time. The last
digit of either magic is the version of the frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_intdigest

from diloco_jax.wire.errors import RemoteProtocolError

MESSAGE_MAGIC = b"DLM1"
_MESSAGE = struct.Struct("<4sI")
MESSAGE_HEADER_BYTES = _MESSAGE.size
MAX_MESSAGE_BYTES = 1 << 20

CHUNK_BYTES = 1 << 20
MAGIC = b"DLC2"
_HEADER = struct.Struct("<4sQQI")
HEADER_BYTES = _HEADER.size

Payload = bytes | bytearray | memoryview


def message_header(length: int) -> bytes:
    """Return the header of a message of that many bytes."""
    return _MESSAGE.pack(MESSAGE_MAGIC, length)


def message_length(header: memoryview, peer: str) -> int:
    """Return the length of the message behind a header. Raises RemoteProtocolError if
    the header is not one, or if the message is too long.
    """
    magic, length = _MESSAGE.unpack(header)
    if magic != MESSAGE_MAGIC:
        raise RemoteProtocolError(
            f"message from {peer} begins with {magic!r}, expected {MESSAGE_MAGIC!r}; "
            f"both ends must run the same version of diloco"
        )
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"message from {peer} announces {length} bytes, expected 1 to "
            f"{MAX_MESSAGE_BYTES}; both ends must run the same version of diloco"
        )
    return int(length)


def chunks(
    buffers: Sequence[Payload], offset: int, length: int, begin: int = 0
) -> Iterator[tuple[bytes, memoryview]]:
    """Cut bytes `offset` to `offset + length` of a payload; yield header and bytes of
    each chunk. Contiguous buffers are not copied.

    Args:
      buffers: the payload from byte `begin` on, laid end to end. `offset` counts from
        there; the headers give places in the whole payload.
    """
    shift, begin, end = begin, 0, offset + length
    for buffer in buffers:
        view = memoryview(buffer)
        low, high = max(offset - begin, 0), min(end - begin, view.nbytes)
        if low < high:
            whole = memoryview(view if view.c_contiguous else view.tobytes()).cast("B")
            for start in range(low, high, CHUNK_BYTES):
                part = whole[start : min(start + CHUNK_BYTES, high)]
                yield chunk_header(part, shift + begin + start), part
        begin += view.nbytes


def chunk_header(payload: memoryview, offset: int) -> bytes:
    """Return the header of one chunk."""
    return _HEADER.pack(MAGIC, xxh3_64_intdigest(payload), offset, len(payload))


def chunk_length(
    header: memoryview, *, offset: int, room: int, peer: str
) -> tuple[int, int]:
    """Return length and checksum of the chunk behind a header; it must begin at
    `offset` and hold 1..`room` bytes.

    Raises RemoteProtocolError naming what was expected and what was found.
    """
    magic, checksum, found_offset, length = _HEADER.unpack(header)
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
    if not 0 < length <= limit:
        raise RemoteProtocolError(
            f"chunk from {peer} at byte {offset} announces {length} bytes, expected 1 "
            f"to {limit}; send the transfer again"
        )
    return length, checksum


def check(payload: memoryview, checksum: int, *, offset: int, peer: str) -> None:
    """Raise RemoteProtocolError if a chunk's bytes are not those that were sent."""
    found = xxh3_64_intdigest(payload)
    if found != checksum:
        raise RemoteProtocolError(
            f"chunk from {peer} at byte {offset} is damaged: checksum {found:016x}, "
            f"expected {checksum:016x}; send the transfer again"
        )
