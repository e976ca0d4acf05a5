"""Messages between a primary and the standby that follows it, over one gRPC stream.

The primary sends a copy of its files, then every byte that it appends to one and every
file that it makes. `number` counts what is appended. Paths are relative to the workdir.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from diloco_jax.protocol.messages import Identifier, Message
from diloco_jax.protocol.values import Count, CountOrNone

CHUNK_BYTES = 1 << 20
MOST_FILES = 20_000
RelativePath = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class FollowRequest(Message, frozen=True, kw_only=True, tag=True):
    """First message of a standby."""

    node: Identifier
    """Its name, which the mandate may say."""
    fingerprint: Identifier
    """Fingerprint of its `RunConfig`."""
    sealed: Annotated[
        dict[RelativePath, Identifier], msgspec.Meta(max_length=MOST_FILES)
    ] = msgspec.field(default_factory=dict)
    """The sealed files that it has from an earlier copy, with their seals."""


class Answered(Message, frozen=True, kw_only=True, tag=True):
    """Everything up to this number is durable at the standby; -1 before its copy is
    whole. Sent upon every sign of life."""

    number: CountOrNone
    """That of the last record, or -1."""


class CopyBegins(Message, frozen=True, kw_only=True, tag=True):
    """A copy of all files follows. Nothing that the standby has counts any more but
    these files, which are the same here."""

    run_id: Identifier
    """The run that is copied; the standby's workdir may hold no other."""
    keep: tuple[RelativePath, ...] = ()
    """The files that are the same."""


class FileChunk(Message, frozen=True, kw_only=True, tag=True):
    """The next bytes of a file that is sent whole."""

    path: RelativePath
    """Path of the file, below the workdir."""
    first: bool
    """The file begins with these bytes."""
    last: bool
    """The file is complete with them."""
    data: bytes
    """At most 1 MiB of it."""


class CopyWhole(Message, frozen=True, kw_only=True, tag=True):
    """All files of the copy were sent; they hold what was appended up to this
    number."""

    number: Count
    """Number of what was appended last."""


class AppendedTo(Message, frozen=True, kw_only=True, tag=True):
    """Bytes were appended to a file."""

    number: Count
    """Rises by one with each."""
    path: RelativePath
    """Path of the file, below the workdir."""
    sync: bool
    """They are durable at the primary, and have to be here."""
    data: bytes
    """The bytes."""


class PutAside(Message, frozen=True, kw_only=True, tag=True):
    """A file of JSON lines was put aside (`observability/tape.py`)."""

    number: Count
    """Counted with what is appended."""
    path: RelativePath
    """Path of the file that was put aside, below the workdir."""


class PrimaryAlive(Message, frozen=True, kw_only=True, tag=True):
    """A sign of life, if there is nothing else to say."""


FromStandby = FollowRequest | Answered
FromPrimary = CopyBegins | FileChunk | CopyWhole | AppendedTo | PutAside | PrimaryAlive

from_standby = msgspec.msgpack.Decoder(FromStandby).decode
from_primary = msgspec.msgpack.Decoder(FromPrimary).decode
