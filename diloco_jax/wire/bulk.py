"""The bulk port: its messages, how they become bytes, and the connections for them.

`encode` and `decode` serve control as well: MessagePack of tagged structs. Unknown
tags, missing fields and wrong types are refused with the field's path.

Chunks of a payload follow the message that announces one. A message is a header of 8
bytes (magic, length u32) and MessagePack of at most 1 MiB. A chunk is a header of 24
bytes (magic, XXH3-64 of the payload, offset in the whole payload u64, length u32;
little-endian) and at most 1 MiB of payload. It is XXH3 because a CRC-32 of every byte
at both ends took a quarter of a transfer's CPU time. The last digit of either magic is
the version of the frames.

Payloads go from and to the caller's memory; nothing copies them in between but the
kernel and OpenSSL. The socket, TCP or TLS, blocks without a deadline of its own:
whoever uses it sets a guard of an `IdleWatch` that calls `cut`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import select
import selectors
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from diloco_jax.config.placement import Deadlines
from diloco_jax.core.fragments import Part
from diloco_jax.protocol.messages import (
    Count,
    CountOrNone,
    FromCoordinator,
    FromIsland,
    Identifier,
    Message,
    Name,
    ProfileOrder,
    Steer,
    Version,
)
from diloco_jax.wire.errors import (
    ConnectionLost,
    Failure,
    LocalProtocolError,
    RemoteProtocolError,
)
from diloco_jax.wire.peers import Guard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of an island's process, on every upload and fetch. `session` is drawn
    once per process; the launcher counts `incarnation`."""

    run_id: str
    island: str
    incarnation: int
    session: str

    def fields(self) -> dict[str, Any]:
        """Return keyword arguments of `UploadStart` and others."""
        return dataclasses.asdict(self)


class IslandCall(Message, frozen=True, kw_only=True):
    """Fields that an island's process sends with each call for a fragment."""

    run_id: Identifier
    island: Name
    incarnation: Count
    session: Identifier
    fragment: Count


class UploadStart(IslandCall, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Announce a contiguous stripe of one delta, or of one host's part of it."""

    tick: CountOrNone
    offset: Count
    """First byte of this stripe in the part's bytes."""
    length: Count
    total: Count
    """Bytes of the whole part."""
    part: Part = ()
    """Tiles of the fragment's payload that are sent; empty: all of them."""
    version: Version | None = None
    """None: a delta. Otherwise the f32 anchor of the island at this version."""
    sample: Count = 0
    """Not 0: a ballot of that anchor, with the sample drawn so (`tiles.ballot_of`)."""


class FetchRequest(IslandCall, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Ask for a stripe of a fragment: encoded publishes since `have`, or all of A."""

    want: Version
    have: Version | None
    """None: send the anchor (f32)."""
    offset: Count = 0
    length: CountOrNone = -1
    """Bytes of the stripe; -1: to the end."""
    part: Part = ()
    """Tiles that are wanted, of each publish or of the anchor; empty: all of them."""
    theta: bool = False
    """Send Theta in the place of A, f32: to a coordinator, by its worker."""


class FetchStart(Message, frozen=True, kw_only=True, tag=True):
    """First frame of a fetch: the bytes from `offset` on, of `total`, follow it."""

    version: Version
    count: int
    """Number of encoded publishes, oldest first; 0: A_v in f32."""
    total: int
    offset: int
    length: int


class CycleRequest(Message, frozen=True, kw_only=True, tag=True):
    """Ask for a cycle to be kept, or for a file of a kept one."""

    cycle: Count
    """0: the next one that can be kept."""
    name: Identifier = ""


class UploadDone(Message, frozen=True, kw_only=True, tag=True):
    """Answer to an upload: the stripe is stored; `complete` if it was the last one of
    its delta."""

    complete: bool


class KeptStart(Message, frozen=True, kw_only=True, tag=True):
    """Answer to a request for a file: its bytes follow."""

    total: int


Request = UploadStart | FetchRequest | CycleRequest
Reply = UploadDone | FetchStart | KeptStart | Failure

Payload = bytes | bytearray | memoryview
BLOCK_BYTES = 4 << 20
"""Bytes that a fetch copies at a time, of parts that lie scattered in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchSource:
    """The payload that a fetch is served from: `buffers`, row-major, laid end to
    end.
    """

    version: Version
    count: int
    """Number of encoded publishes, oldest first; 0: A_v in f32."""
    buffers: Sequence[Payload]
    sent: Callable[[int], None] = lambda length: None
    """Called with the bytes of a stripe once it is sent."""

    @property
    def full(self) -> bool:
        """True if it is an anchor."""
        return self.count == 0

    @functools.cached_property
    def total(self) -> int:
        """Bytes of the payload."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


def source_of(
    version: Version, boxes: Sequence[npt.NDArray[Any]], *, count: int
) -> FetchSource:
    """Return the payload of these boxes: `count` publishes, or for 0 an anchor."""
    return FetchSource(
        version=version,
        count=count,
        buffers=[block.data for box in boxes for block in _as_blocks(box)],
    )


def part_name(part: Part) -> str:
    """Return a name by which both ends know a part of a payload; empty: the whole."""
    return hashlib.sha256(repr(part).encode()).hexdigest()[:16] if part else ""


def _as_blocks(box: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Cut an array that is scattered in memory, so that the copy of each block, made
    when it is sent, is small."""
    if box.flags.c_contiguous or not box.size:
        return [box]
    rows = max(1, BLOCK_BYTES * len(box) // box.nbytes)
    return [box[start : start + rows] for start in range(0, len(box), rows)]


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
cycle_request = msgspec.msgpack.Decoder(CycleRequest).decode
bulk_request = msgspec.msgpack.Decoder(Request).decode
bulk_reply = msgspec.msgpack.Decoder(Reply).decode


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


MESSAGE_MAGIC = b"DLM1"
_MESSAGE = struct.Struct("<4sI")
MESSAGE_HEADER_BYTES = _MESSAGE.size
MAX_MESSAGE_BYTES = 1 << 20

CHUNK_BYTES = 1 << 20
MAGIC = b"DLC2"
_HEADER = struct.Struct("<4sQQI")
HEADER_BYTES = _HEADER.size


def message_header(length: int) -> bytes:
    """Return the header of a message of that many bytes."""
    return _MESSAGE.pack(MESSAGE_MAGIC, length)


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


PROGRESS_BYTES = 64 << 10
"""Bytes after which a transfer counts as moving. Stripes of one link share its rate, so
a chunk each would take longer than the budget on a slow one."""
UNSENT_BYTES = 128 << 10
"""Bytes that the kernel takes beyond those that are under way. More of them would count
as moved when they are not, and the last ones leave while the answer is awaited."""


class BulkConnection:
    """A connection whose transfers follow one another. One thread uses it at a time;
    any may `cut` it."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.sent_bytes = self.received_bytes = 0
        """Bytes of frames so far, without those of TLS and TCP."""
        self.between = True
        """True: no transfer is under way, and the next one may begin."""
        self.parted = False
        """True: the last word is said, and the peer is waited for to hang up."""
        self._socket = connection
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def shake_hands(self) -> int:
        """Go on with a handshake that does not block. Return the selector's event that
        it waits for; 0 once it is done, and without TLS. Raises OSError."""
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        self._socket.settimeout(None)
        return 0

    @functools.cached_property
    def certificate(self) -> bytes:
        """The peer's certificate, PEM; empty without TLS."""
        found = None
        if isinstance(self._socket, ssl.SSLSocket):
            found = self._socket.getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(found).encode() if found else b""

    def send(self, message: Any) -> None:
        """Send a message. Raises ConnectionLost; LocalProtocolError if it is too
        large."""
        raw = encode(message)
        if len(raw) > MAX_MESSAGE_BYTES:
            raise LocalProtocolError(
                f"{type(message).__name__} to {self.peer} has {len(raw)} bytes, the "
                f"limit is {MAX_MESSAGE_BYTES}; raise sync.fragments"
            )
        self.between = False
        self._send(message_header(len(raw)) + raw)

    def receive(self, decode: Callable[[bytes], Decoded]) -> Decoded:
        """Return the next message. Raises ConnectionLost, RemoteProtocolError."""
        head = self._head[:MESSAGE_HEADER_BYTES]
        self._receive(head)
        magic, length = _MESSAGE.unpack(head)
        if magic != MESSAGE_MAGIC:
            raise RemoteProtocolError(
                f"message from {self.peer} begins with {magic!r}, expected "
                f"{MESSAGE_MAGIC!r}; both ends must run the same version of diloco"
            )
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise RemoteProtocolError(
                f"message from {self.peer} announces {length} bytes, expected 1 to "
                f"{MAX_MESSAGE_BYTES}; both ends must run the same version of diloco"
            )
        self.between = False
        raw = bytearray(length)
        self._receive(memoryview(raw))
        return decoded(decode, bytes(raw), self.peer)

    def send_payload(
        self,
        buffers: Sequence[Payload],
        offset: int,
        length: int,
        guard: Guard,
        begin: int = 0,
    ) -> bool:
        """Send `length` bytes of a payload, from `offset` on. Return False if the peer
        sent something meanwhile: it does so only to end the transfer.

        buffers: the payload from byte `begin` on, laid end to end.
        """
        for header, part in chunks(buffers, offset, length, begin):
            if self.spoken():
                return False
            self._send(header)
            for block in _blocks(part):
                self._send(block)
                guard.touch()
        return True

    def receive_chunk(self, place: memoryview, offset: int, guard: Guard) -> int:
        """Receive one checked chunk to the beginning of a place; return its length.

        offset: that of the chunk in the payload. Bytes of a damaged chunk are in the
        place, too, when RemoteProtocolError is raised.
        """
        self._receive(self._head)
        magic, checksum, found_offset, length = _HEADER.unpack(self._head)
        limit = min(len(place), CHUNK_BYTES)
        chunk = f"chunk from {self.peer} at byte {offset}"
        if magic != MAGIC:
            raise RemoteProtocolError(
                f"{chunk} begins with {magic!r}, expected {MAGIC!r}; both ends must "
                f"run the same version of diloco"
            )
        if found_offset != offset or not 0 < length <= limit:
            raise RemoteProtocolError(
                f"{chunk} has offset {found_offset}, expected {offset}, and announces "
                f"{length} bytes, expected 1 to {limit}; send the transfer again"
            )
        part = place[:length]
        for block in _blocks(part):
            self._receive(block)
            guard.touch()
        if (found := xxh3_64_intdigest(part)) != checksum:
            raise RemoteProtocolError(
                f"{chunk} is damaged: checksum {found:016x}, expected "
                f"{checksum:016x}; send the transfer again"
            )
        return int(length)

    def spoken(self) -> bool:
        """Tell if the peer sent something, or closed the connection."""
        return bool(self._poll.poll(0))

    def pending(self) -> bool:
        """Tell if OpenSSL holds bytes that it has read from the socket, so that a
        selector on the socket alone would not notice them.
        """
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def part(self, message: Any = None) -> None:
        """Say the last word, as far as the kernel takes it at once; None: it is said.
        `drain` then waits for the peer to hang up.

        If this end closed the connection earlier, the kernel would reset it, and the
        peer could lose that word.
        """
        self.between, self.parted = False, True
        with contextlib.suppress(OSError):
            self._socket.settimeout(0.0)
            if message is not None:
                raw = encode(message)
                self._socket.sendall(message_header(len(raw)) + raw)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def drain(self, place: bytearray) -> bool:
        """Discard what has come since `part`, at most as much as the place holds;
        return False once the peer has hung up."""
        try:
            # From the socket beneath TLS: nothing need be deciphered.
            return socket.socket.recv_into(self._socket, place) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def end(self) -> socket.socket:
        """The socket, for what is no bulk."""
        return self._socket

    def detach(self) -> socket.socket:
        """Return the socket; it is the caller's from now on."""
        taken, self._socket = self._socket, socket.socket()
        return taken

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    def cut(self) -> None:
        """End what another thread is sending or receiving; it gets ConnectionLost."""
        with contextlib.suppress(OSError):
            # Not TLS's own, which does not suit two threads.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> None:
        with self._lost():
            self._socket.sendall(data)
        self.sent_bytes += len(data)

    def _receive(self, place: memoryview) -> None:
        filled, size = 0, len(place)
        with self._lost():
            receive = self._socket.recv_into
            while filled < size:
                got = receive(place[filled:])
                if not got:
                    raise ConnectionLost(f"{self.peer} ended the connection")
                filled += got
        self.received_bytes += size

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConnectionLost(f"{self.peer}: {error.strerror or error}") from error


def _blocks(part: memoryview) -> Iterator[memoryview]:
    """Cut a part where progress is noted."""
    for start in range(0, len(part), PROGRESS_BYTES):
        yield part[start : start + PROGRESS_BYTES]


def prepare(connection: socket.socket, deadlines: Deadlines) -> None:
    """Set a TCP socket up: small frames leave at once, and a peer that is gone is
    noticed within the time budget."""
    half_budget_s = max(1, int(deadlines.budget_s / 2))
    for level, name, value in (
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", UNSENT_BYTES),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", half_budget_s),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", half_budget_s),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 2),
    ):
        if hasattr(socket, name):  # Not every system has all of them.
            connection.setsockopt(level, getattr(socket, name), value)
