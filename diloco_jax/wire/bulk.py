"""Messages of the bulk port: requests, and what answers them.

Chunks of a payload follow those that announce one (`frames.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec

from diloco_jax.core.payload import Part
from diloco_jax.protocol.messages import Identifier, Message, Name
from diloco_jax.protocol.values import Count, CountOrNone, Version
from diloco_jax.wire.errors import Failure

Serial = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,40}$")]
"""Serial number of a certificate, in hex."""


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


class UploadStart(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Announce a contiguous stripe of one delta, or of one host's part of it."""

    run_id: Identifier
    island: Name
    incarnation: Count
    session: Identifier
    fragment: Count
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

    @property
    def what(self) -> str:
        """The name of the payload, for people."""
        return f"fragment {self.fragment}"


class FetchRequest(Message, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Ask for a stripe of a fragment: encoded publishes since `have`, or all of A."""

    run_id: Identifier
    island: Name
    incarnation: Count
    session: Identifier
    fragment: Count
    want: Version
    have: Version | None
    """None: send the anchor (f32)."""
    offset: Count = 0
    length: CountOrNone = -1
    """Bytes of the stripe; -1: to the end."""
    part: Part = ()
    """Tiles that are wanted, of each publish or of the anchor; empty: all of them."""
    digests: bool = False
    """Send the digests of the anchor's tiles (`core/tiles.py`) in their
    place."""
    theta: bool = False
    """Send Theta in the place of A, f32: to a coordinator, by its worker."""


class FetchStart(Message, frozen=True, kw_only=True, tag=True):
    """First frame of a fetch: the bytes from `offset` on, of `total`, follow it."""

    version: Version
    full: bool
    """True: A_v in f32; False: `count` encoded publishes, oldest first."""
    count: int
    total: int
    offset: int
    length: int


class HoldingsRequest(Message, frozen=True, kw_only=True, tag=True):
    """Ask a host of another island what it has of a fragment's anchor."""

    run_id: Identifier
    island: Name
    fragment: Count


class Holdings(Message, frozen=True, kw_only=True, tag=True):
    """Answer to it."""

    version: Version
    part: Part
    """Tiles that a `FetchRequest` may ask for."""


class RevocationRequest(Message, frozen=True, kw_only=True, tag=True):
    """Ask the coordinator whether a certificate is revoked."""

    serial: Serial
    """Its serial number, in hex."""


class Revocation(Message, frozen=True, kw_only=True, tag=True):
    """Answer to it."""

    revoked: bool
    """True if nobody is to be served by it."""


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


Question = HoldingsRequest | RevocationRequest
"""Requests that a message answers, without a payload."""

Request = (
    UploadStart | FetchRequest | HoldingsRequest | RevocationRequest | CycleRequest
)
Reply = UploadDone | FetchStart | Holdings | Revocation | KeptStart | Failure
