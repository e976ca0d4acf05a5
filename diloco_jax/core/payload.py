"""A fragment's payload: its encoded pieces, one after the other, no padding.

Messages carry any byte range of it; a layout says which tiles of which pieces that is.
Tiles of a piece are numbered row-major over its grid.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.core.codec import Codec
from diloco_jax.core.fragments import Piece

Buffer = bytes | bytearray | memoryview


class TileRange(NamedTuple):
    """Tiles [start, stop) of the layout's piece number `piece`."""

    piece: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where one encoded piece lies in the payload (bytes)."""

    piece: Piece
    offset: int
    nbytes: int
    encoded_shape: tuple[int, ...]
    """(*grid, tile_bytes)."""

    @property
    def tile_bytes(self) -> int:
        """Bytes of one encoded tile."""
        return self.encoded_shape[-1]


@dataclasses.dataclass(frozen=True)
class PayloadLayout:
    """The pieces of one fragment under one codec, in the plan's order."""

    placed: tuple[Placed, ...]

    @classmethod
    def of(cls, codec: Codec, pieces: Sequence[Piece]) -> PayloadLayout:
        """The layout of these pieces, in this order."""
        placed, offset = [], 0
        for piece in pieces:
            shape = codec.encoded_shape(piece.shape)
            placed.append(Placed(piece, offset, math.prod(shape), shape))
            offset += placed[-1].nbytes
        return cls(tuple(placed))

    @property
    def total_bytes(self) -> int:
        """Length of the payload."""
        return self.placed[-1].offset + self.placed[-1].nbytes if self.placed else 0

    def pack(self, arrays: Sequence[Any]) -> bytearray:
        """One payload from the encoded arrays, uint8[*grid, tile_bytes] each.

        Raises:
          ValueError: another number of arrays, or an array of another shape.
        """
        if len(arrays) != len(self.placed):
            raise ValueError(
                f"{len(arrays)} arrays for a payload of {len(self.placed)} pieces; "
                f"encode every piece of the fragment"
            )
        payload = bytearray(self.total_bytes)
        for view, array, placed in zip(
            self.unpack(payload), arrays, self.placed, strict=True
        ):
            if array.shape != placed.encoded_shape:
                raise ValueError(
                    f"{placed.piece.name} is encoded as {array.shape}; this layout "
                    f"has {placed.encoded_shape}: use the codec that made the layout"
                )
            view[...] = np.asarray(array)
        return payload

    def unpack(self, payload: Buffer) -> list[npt.NDArray[np.uint8]]:
        """Views of the payload, uint8[*grid, tile_bytes] each; nothing is copied.

        Raises:
          ValueError: the payload has another length than the layout.
        """
        length = memoryview(payload).nbytes
        if length != self.total_bytes:
            raise ValueError(
                f"payload of {length} bytes, the layout has {self.total_bytes}; "
                f"sender and receiver disagree on the fragment or its codec"
            )
        flat = np.frombuffer(payload, np.uint8)
        return [
            flat[p.offset : p.offset + p.nbytes].reshape(p.encoded_shape)
            for p in self.placed
        ]

    def tiles_in(self, start: int, stop: int) -> list[TileRange]:
        """The tiles that bytes [start, stop) touch, cut ones included.

        Raises:
          ValueError: the range is not inside the payload.
        """
        if not 0 <= start <= stop <= self.total_bytes:
            raise ValueError(
                f"bytes [{start}, {stop}) are not in a payload of {self.total_bytes}"
            )
        found = []
        first = bisect.bisect_right(self.placed, start, key=lambda p: p.offset) - 1
        for index in range(max(first, 0), len(self.placed)):
            placed = self.placed[index]
            low = max(start, placed.offset)
            high = min(stop, placed.offset + placed.nbytes)
            if low >= high:
                break
            width = placed.tile_bytes
            begin, end = low - placed.offset, high - placed.offset
            found.append(TileRange(index, begin // width, -(-end // width)))
        return found

    def byte_range(self, tiles: TileRange) -> tuple[int, int]:
        """Bytes [start, stop) of the payload that these tiles fill.

        Raises:
          IndexError: there is no such piece.
          ValueError: the piece has no such tiles.
        """
        placed = self.placed[tiles.piece]
        count = placed.nbytes // placed.tile_bytes
        if not 0 <= tiles.start <= tiles.stop <= count:
            raise ValueError(
                f"tiles [{tiles.start}, {tiles.stop}) of {placed.piece.name}, which "
                f"has {count}"
            )
        start = placed.offset + tiles.start * placed.tile_bytes
        return start, placed.offset + tiles.stop * placed.tile_bytes
