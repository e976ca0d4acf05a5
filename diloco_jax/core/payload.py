"""A fragment's payload: its encoded pieces, one after the other, without padding.

A message carries the whole payload or a part. A part is boxes of tiles, as a shard of
an aligned mesh is; its bytes are its boxes' bytes, one after the other, each row-major
over the box. A full anchor travels as the f32 values of the same boxes of tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.core.codecs import Codec
from diloco_jax.core.fragments import Piece
from diloco_jax.core.tiles import TileGrid, ballot_bytes

Buffer = bytes | bytearray | memoryview


class Box(NamedTuple):
    """Tiles [start, stop), axis by axis of its grid, of the layout's piece `piece`; it
    may be empty."""

    piece: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


Part = tuple[Box, ...]
"""Boxes of a payload on one host. Empty: the whole payload."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """Place of one encoded piece in the payload (bytes)."""

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
        """Return the layout of these pieces, in this order."""
        return cls._of(pieces, [codec.encoded_shape(p.shape) for p in pieces])

    @classmethod
    def of_ballots(cls, pieces: Sequence[Piece]) -> PayloadLayout:
        """Return the layout of ballots about these pieces; see `tiles.ballot_of`."""
        grids = [TileGrid.of(piece.shape) for piece in pieces]
        shapes = [(*grid.grid, ballot_bytes(grid.elements)) for grid in grids]
        return cls._of(pieces, shapes)

    @classmethod
    def _of(
        cls, pieces: Sequence[Piece], shapes: Sequence[tuple[int, ...]]
    ) -> PayloadLayout:
        placed, offset = [], 0
        for piece, shape in zip(pieces, shapes, strict=True):
            placed.append(Placed(piece, offset, math.prod(shape), shape))
            offset += placed[-1].nbytes
        return cls(tuple(placed))

    @property
    def total_bytes(self) -> int:
        """Length of the payload."""
        return self.placed[-1].offset + self.placed[-1].nbytes if self.placed else 0

    def pack(self, arrays: Sequence[Any]) -> bytearray:
        """Pack the encoded arrays, uint8[*grid, tile_bytes] each, into one payload.

        Raises:
          ValueError: a wrong number of arrays, or an array of the wrong shape.
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
        """Return views of the payload, uint8[*grid, tile_bytes] each; copy nothing.

        Raises:
          ValueError: the payload and the layout differ in length.
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

    def boxes(self, part: Part) -> Part:
        """Return the boxes of a part; if it is the whole, one box per piece."""
        grids = (placed.encoded_shape[:-1] for placed in self.placed)
        return part or tuple(
            Box(number, (0,) * len(grid), grid) for number, grid in enumerate(grids)
        )

    def part_bytes(self, part: Part) -> int:
        """Return the bytes of a part.

        Raises:
          ValueError: a box is not in its piece's grid.
        """
        return sum(map(math.prod, self._shapes(part)))

    def values_bytes(self, part: Part) -> int:
        """Return the bytes of the values in a part; ValueError as `part_bytes`."""
        return self._values.part_bytes(part)

    def cut(self, payload: Buffer, part: Part) -> list[npt.NDArray[np.uint8]]:
        """Return views of a part's bytes in the whole payload, box by box, or one view
        if the part is the whole.

        Raises:
          ValueError: as `part_bytes` and `unpack`.
        """
        views = self.unpack(payload)
        if not part:
            return [np.frombuffer(payload, np.uint8)]
        self._shapes(part)
        return [views[box.piece][tiles_of(box)] for box in part]

    def cut_values(
        self, arrays: Sequence[npt.NDArray[Any]], part: Part
    ) -> list[npt.NDArray[Any]]:
        """Return views of a part's values in the pieces' values, [tiles, elements]
        each, box by box: [*box, elements]. ValueError as `part_bytes`."""
        self._shapes(part)
        grids = [placed.encoded_shape[:-1] for placed in self.placed]
        return [
            arrays[box.piece].reshape(*grids[box.piece], -1)[tiles_of(box)]
            for box in self.boxes(part)
        ]

    def split(
        self, octets: Buffer, part: Part
    ) -> list[tuple[Box, npt.NDArray[np.uint8]]]:
        """Return the boxes of a part, with views of their tiles in its bytes.

        Raises:
          ValueError: `octets` has another length than the part.
        """
        flat, expected = np.frombuffer(octets, np.uint8), self.part_bytes(part)
        if flat.size != expected:
            raise ValueError(
                f"a part of {expected} bytes came with {flat.size}; sender and "
                f"receiver disagree on the fragment or its codec"
            )
        found, start = [], 0
        for box, shape in zip(self.boxes(part), self._shapes(part), strict=True):
            stop = start + math.prod(shape)
            found.append((box, flat[start:stop].reshape(shape)))
            start = stop
        return found

    def split_values(
        self, octets: Buffer, part: Part
    ) -> list[tuple[Box, npt.NDArray[np.float32]]]:
        """Return the boxes of a part, with views of their tiles in its values,
        f32[*box, elements].

        Raises:
          ValueError: `octets` and the part's values differ in length.
        """
        found = self._values.split(octets, part)
        return [(box, tiles.view("<f4")) for box, tiles in found]

    def scatter(self, payload: Buffer, part: Part, octets: Buffer) -> None:
        """Copy the bytes of a part to their places in the whole payload.

        Raises:
          ValueError: `octets` has another length than the part.
        """
        views = self.unpack(payload)
        for box, tiles in self.split(octets, part):
            views[box.piece][tiles_of(box)] = tiles

    def _shapes(self, part: Part) -> list[tuple[int, ...]]:
        """Return (*tiles, tile_bytes) of every box."""
        return [
            (*self._box_shape(box), self.placed[box.piece].tile_bytes)
            for box in self.boxes(part)
        ]

    @functools.cached_property
    def _values(self) -> PayloadLayout:
        """Layout of the values, which travel as the codec f32 has them."""
        return PayloadLayout.of(Codec("f32"), [p.piece for p in self.placed])

    def _box_shape(self, box: Box) -> tuple[int, ...]:
        grid: tuple[int, ...] = ()
        if 0 <= box.piece < len(self.placed):
            grid = self.placed[box.piece].encoded_shape[:-1]
            if len(box.start) == len(box.stop) == len(grid) and all(
                0 <= low <= high <= end
                for low, high, end in zip(box.start, box.stop, grid, strict=True)
            ):
                return tuple(map(operator.sub, box.stop, box.start))
        raise ValueError(
            f"{box} is not in a fragment of {len(self.placed)} pieces, where that "
            f"piece has the grid {grid or None}; do both sides have one config?"
        )


class Coverage:
    """The tiles of a payload that have arrived."""

    def __init__(self, layout: PayloadLayout) -> None:
        self._here = [np.zeros(p.encoded_shape[:-1], np.bool_) for p in layout.placed]

    def add(self, part: Part) -> None:
        """Note that the tiles of this part have arrived."""
        for box in part:
            self._here[box.piece][tiles_of(box)] = True
        if not part:
            for here in self._here:
                here[...] = True

    def remove(self, part: Part) -> None:
        """Note that the tiles of this part are missing again."""
        for box in part:
            self._here[box.piece][tiles_of(box)] = False
        if not part:
            for here in self._here:
                here[...] = False

    @property
    def complete(self) -> bool:
        """True if all tiles have arrived."""
        return all(bool(here.all()) for here in self._here)


def tiles_of(box: Box) -> tuple[slice, ...]:
    """Return the tiles of a box, as an index into its piece's grid."""
    return tuple(map(slice, box.start, box.stop))
