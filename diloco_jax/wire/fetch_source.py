"""The payload of a fetch, as the server of it has it in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from diloco_jax.protocol.values import Version
from diloco_jax.wire.frames import Payload

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
