"""The first message of an upload or a fetch; raw chunks follow it (`frames.py`)."""

from __future__ import annotations

from diloco_jax.core.payload import Part
from diloco_jax.protocol.messages import Identifier, Message, Name
from diloco_jax.protocol.values import Count, Version


class UploadStart(Message, frozen=True, kw_only=True, tag=True):
    """Announces a contiguous stripe of one delta, or of one host's part of it."""

    run_id: Identifier
    island: Name
    incarnation: Count
    session: Identifier
    fragment: int
    tick: int
    offset: int
    """First byte of this stripe in the part's bytes."""
    length: int
    total: int
    """Bytes of the whole part."""
    part: Part = ()
    """Which tiles of the fragment's payload are sent; empty: all of it."""
    version: Version | None = None
    """None: a delta. Else it is the island's anchor, of this version, in f32."""


class FetchRequest(Message, frozen=True, kw_only=True, tag=True):
    """Asks for a stripe of a fragment: encoded publishes since `have`, or all of A."""

    run_id: Identifier
    island: Name
    incarnation: Count
    session: Identifier
    fragment: int
    want: Version
    have: Version | None
    """None: send the anchor (f32)."""
    offset: int = 0
    length: int = -1
    """-1: to the end."""
    part: Part = ()
    """Which tiles are wanted, of each publish or of the anchor; empty: all."""


class FetchStart(Message, frozen=True, kw_only=True, tag=True):
    """First frame of a fetch: what follows is bytes `offset` on of `total`."""

    version: Version
    full: bool
    """True: A_v in f32; False: `count` encoded publishes, oldest first."""
    count: int
    total: int
    offset: int
    length: int


class UploadDone(Message, frozen=True, kw_only=True, tag=True):
    """The stripe is stored; `complete` if it was the delta's last one."""

    complete: bool
