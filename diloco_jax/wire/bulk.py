"""Messages of the bulk port: requests, what answers them, and what is fetched.

Chunks of a payload follow those that announce one (`frames.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from diloco_jax.core.payload import Part
from diloco_jax.protocol.messages import Identifier, Message, Name
from diloco_jax.protocol.values import Count, CountOrNone, Version
from diloco_jax.wire.errors import Failure


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
    full: bool
    """True: A_v in f32; False: `count` encoded publishes, oldest first."""
    count: int
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
    full: bool
    """True: A_v in f32; False: `count` encoded publishes, oldest first."""
    count: int
    buffers: Sequence[Payload]
    total: int
    """Bytes of the payload: the sum of the buffers'."""


def source_of(
    version: Version, boxes: Sequence[npt.NDArray[Any]], *, count: int
) -> FetchSource:
    """Return the payload of these boxes: `count` publishes, or for 0 an anchor."""
    return FetchSource(
        version=version,
        full=count == 0,
        count=count,
        buffers=[block.data for box in boxes for block in _blocks(box)],
        total=sum(box.nbytes for box in boxes),
    )


def _blocks(box: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Cut an array that is scattered in memory, so that the copy of each block, made
    when it is sent, is small."""
    if box.flags.c_contiguous or not box.size:
        return [box]
    rows = max(1, BLOCK_BYTES * len(box) // box.nbytes)
    return [box[start : start + rows] for start in range(0, len(box), rows)]
