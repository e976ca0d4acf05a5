"""A fragment's payload: its encoded pieces, one after the other, no padding.

A message carries all of it, or a part: boxes of tiles, which is what a shard of an
aligned mesh is. A part's bytes are its boxes' bytes one after the other, each row-major
over the box.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.core.codec import Codec
from diloco_jax.core.fragments import Piece

Buffer = bytes | bytearray | memoryview


class Box(NamedTuple):
    """Tiles [start, stop), axis by axis of its grid, of the layout's piece `piece`."""

    piece: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


Part = tuple[Box, ...]
"""What one host has of a payload. Empty: all of it."""


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

    def part_bytes(self, part: Part) -> int:
        """Bytes of a part.

        Raises:
          ValueError: a box that is not in its piece's grid.
        """
        if not part:
            return self.total_bytes
        total = 0
        for box in part:
            shape = self._box_shape(box)
            total += math.prod(shape) * self.placed[box.piece].tile_bytes
        return total

    def gather(self, payload: Buffer, part: Part) -> Buffer:
        """The bytes of a part; those of the whole payload are not copied."""
        if not part:
            return payload
        gathered = np.empty(self.part_bytes(part), np.uint8)
        for view, place in self._boxes(payload, part, gathered):
            place[...] = view
        return gathered.data

    def scatter(self, payload: Buffer, part: Part, octets: Buffer) -> None:
        """Puts the bytes of a part in their places; the inverse of `gather`.

        Raises:
          ValueError: `octets` has another length than the part.
        """
        expected = self.part_bytes(part)
        flat = np.frombuffer(octets, np.uint8)
        if flat.size != expected:
            raise ValueError(
                f"a part of {expected} bytes came with {flat.size}; sender and "
                f"receiver disagree on the fragment or its codec"
            )
        if not part:
            np.frombuffer(payload, np.uint8)[...] = flat
            return
        for view, place in self._boxes(payload, part, flat):
            view[...] = place

    def _boxes(
        self, payload: Buffer, part: Part, flat: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """By box: its tiles in the payload, and its place among the part's bytes."""
        views, start = self.unpack(payload), 0
        for box in part:
            tiles = tuple(map(slice, box.start, box.stop))
            view = views[box.piece][tiles]
            yield view, flat[start : start + view.size].reshape(view.shape)
            start += view.size

    def _box_shape(self, box: Box) -> tuple[int, ...]:
        grid: tuple[int, ...] = ()
        if 0 <= box.piece < len(self.placed):
            grid = self.placed[box.piece].encoded_shape[:-1]
            if len(box.start) == len(box.stop) == len(grid) and all(
                0 <= low < high <= end
                for low, high, end in zip(box.start, box.stop, grid, strict=True)
            ):
                return tuple(map(operator.sub, box.stop, box.start))
        raise ValueError(
            f"{box} is not in a fragment of {len(self.placed)} pieces, where that "
            f"piece has the grid {grid or None}; do both sides have one config?"
        )


class Coverage:
    """Which tiles of a payload are here already."""

    def __init__(self, layout: PayloadLayout) -> None:
        self._here = [np.zeros(p.encoded_shape[:-1], np.bool_) for p in layout.placed]

    def add(self, part: Part) -> None:
        """The tiles of this part are here."""
        for box in part:
            self._here[box.piece][tuple(map(slice, box.start, box.stop))] = True
        if not part:
            for here in self._here:
                here[...] = True

    @property
    def complete(self) -> bool:
        """Whether all tiles are here."""
        return all(bool(here.all()) for here in self._here)
