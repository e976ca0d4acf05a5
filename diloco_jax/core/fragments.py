"""Fragments: the parts of the parameters that are merged together, and their payload.

A *piece* is one tensor, one layer of a stacked tensor, or a band of a large one. A
*fragment* is a set of pieces that is merged at the same tick. Fragments are balanced by
size, since peak bandwidth follows from the largest (Decoupled DiLoCo, arXiv 2604.21428,
"balanced tensor fragmentation"); pieces of one layer or of one tensor may be kept
together. Embeddings are dealt into fragments like all other pieces, but are merged by a
rule of their own.

*Bands* are the parts of a tensor that is larger than a fragment. Its longest axis is
divided into equal stripes, and every band has the same rows of each:

    rows of the axis, two stripes:   0 0 1 1 2 2 | 0 0 1 1 2 2   (band of each row)

So a mesh axis that cuts the tensor cuts every band alike, wherever it does so between
stripes: each device holds a part of every band. Bands depend on the tensor and the size
of a fragment alone, never on a mesh (docs/design/pieces.md).

Parameters are a nested dict of arrays. `P` is the number of fragments.

A fragment's *payload* is its encoded pieces, one after the other, without padding; in
a delta the counts of use follow, of those pieces that have any, a tile each. A message
carries all of it or a part. A part is boxes of tiles, as a shard of an aligned mesh is;
its bytes are its boxes' bytes, one after the other, each row-major over the box. A
full anchor travels as the f32 values of the same boxes of tiles.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.core.tiles import USE_BYTES, TileGrid, ballot_bytes

if TYPE_CHECKING:
    from diloco_jax.core.codecs import Codec
    from diloco_jax.core.tiles import ArrayLike

MOST_STRIPES = 256
ALIGNED = (8, 128)
"""Rows of an axis that a TPU keeps together: of the last axis 128, of others 8. Stripes
and bands end there where they can."""


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Bands:
    """The division of a tensor into bands."""

    axis: int
    """The axis that is cut, counted from the end: -1 is the last."""
    stripes: int
    rows: int
    """Rows of a stripe that a band has; the last band may have fewer."""

    @staticmethod
    def of(shape: tuple[int, ...], limit: float, groups: int = 1) -> Bands:
        """Return the division into bands of at most `limit` elements, if a row has no
        more. A band has a power of two of rows, so that its tiles fit many meshes.

        groups: as of a piece. A band has whole ones if they are no larger than the
        limit, else the same rows of every one."""
        whole = groups > 1 and math.prod(shape) // groups <= limit
        places = (0,) if whole else range(groups > 1, len(shape))
        axis = max(places, key=lambda a: (shape[a], -a)) - len(shape)
        aligned = 1 if whole else ALIGNED[axis == -1]
        extent = shape[axis]
        wanted = max(1.0, limit / (math.prod(shape) // extent))
        rows = 2 ** int(math.log2(wanted))
        stripes = 1
        while (
            stripes < MOST_STRIPES
            and rows % (2 * stripes * aligned) == 0
            and extent % (2 * stripes * aligned) == 0
        ):
            stripes *= 2
        return Bands(axis=axis, stripes=stripes, rows=rows // stripes)

    def shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the shape of each band of a tensor."""
        own, at = list(shape), len(shape) + self.axis
        of_stripe = shape[at] // self.stripes
        for start in range(0, of_stripe, self.rows):
            own[at] = self.stripes * min(self.rows, of_stripe - start)
            yield tuple(own)

    def striped(self, x: Any) -> Any:
        """Split the axis of a tensor or a band: [..., rows of all stripes, ...] ->
        [..., stripes, rows of one, ...]."""
        at = x.ndim + self.axis
        return x.reshape(*x.shape[:at], self.stripes, -1, *x.shape[at + 1 :])

    def joined(self, x: Any) -> Any:
        """Join the axis again: the inverse of `striped`."""
        at = x.ndim + self.axis
        return x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])

    def index(self, band: int) -> tuple[Any, ...]:
        """Return the index of a band in a striped tensor."""
        rows = slice(band * self.rows, (band + 1) * self.rows)
        return (..., rows, *(slice(None),) * (-self.axis - 1))

    def concatenate(self, bands: Sequence[ArrayLike]) -> ArrayLike:
        """Return the tensor of all its bands, in their order; numpy's of numpy's."""
        parts = [self.striped(x) for x in bands]
        whole: ArrayLike = self.joined(_numpy_of(bands).concatenate(parts, self.axis))
        return whole


def _numpy_of(arrays: Sequence[ArrayLike]) -> Any:
    """Return numpy if all are its arrays, or else jax's: whoever has no others needs no
    jax, which takes as long to import as all the rest of a command."""
    if all(isinstance(x, np.ndarray) for x in arrays):
        return np
    import jax.numpy

    return jax.numpy


Params = dict[str, Any]
"""Nested dicts with string keys and arrays at the leaves."""

WAYS = ("size", "layer", "tensor")

LAYERS = "layers"
VOCAB = "vocab"
EXPERT = "expert"
ROUTER = "router"

EVEN = 1.15
"""Size of the largest fragment over the mean, up to which fragments count as even."""
CUTS = ((1, 3), (3, 6))
"""(a, b): tensors above 1 / a of the mean size of a fragment are cut into bands of up
to 1 / b of it. The second one is for fragments that the first leaves uneven: meshes of
many devices cut small pieces inside their tiles, so bands are no smaller than needed.
"""


@dataclasses.dataclass(frozen=True, order=True)
class Piece:
    """One tensor, one layer of a stacked one, or a band of either. Pieces sort by path,
    layer and band."""

    path: tuple[str, ...]
    """Keys that lead to the leaf."""
    layer: int
    """Index along the leaf's leading axis; -1: the whole leaf."""
    band: int = dataclasses.field(default=-1, kw_only=True)
    """Number of the band; -1: the whole tensor or layer."""
    bands: Bands | None = dataclasses.field(default=None, kw_only=True)
    """The division that the band is one of."""
    shape: tuple[int, ...]
    """Shape of the piece, without the layer axis."""
    embedding: bool
    """True if it has a vocabulary axis: most rules merge it by weighted mean."""
    expert: bool = dataclasses.field(default=False, kw_only=True)
    """True if its first axis, or that of the tensor that it is a band of, is one of
    experts: most rules merge it by weighted mean, however many it has."""
    router: bool = dataclasses.field(default=False, kw_only=True)
    """True if one of its axes is that of a router's choices: a merge measures how far
    the islands' are apart."""
    groups: int = dataclasses.field(default=1, kw_only=True)
    """Parts along the first axis, a row each, that have nothing in common: experts. No
    tile has two of them."""
    by_use: float = dataclasses.field(default=0, kw_only=True)
    """Not 0: a delta says how often each row of the first axis was used, which weighs
    it. A token uses so many rows at most."""
    as_one: bool = dataclasses.field(default=False, kw_only=True)
    """True if it is used as a whole: its delta has one count, of all rows."""

    @property
    def name(self) -> str:
        """The path joined by "/", then layer and band: "blocks/attn/wq/3",
        "embedding/band-0"."""
        layer = () if self.layer < 0 else (str(self.layer),)
        band = () if self.band < 0 else (f"band-{self.band}",)
        return "/".join(self.path + layer + band)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def grid(self) -> TileGrid:
        """Its tiles."""
        return TileGrid.of(self.shape, self.groups)

    @property
    def counts(self) -> int:
        """Number of counts of use in its delta."""
        return 1 if self.as_one else self.shape[0] if self.by_use else 0

    def uses_of(self, counts: Any) -> Any:
        """Return its counts, out of those of its tensor: [rows], [layers, rows], or [1]
        if it is used as a whole."""
        if self.as_one:
            return counts
        own = counts if self.layer < 0 else counts[self.layer]
        if self.bands is None or self.bands.axis > -len(self.shape):
            return own
        rows = dataclasses.replace(self.bands, axis=-1)
        return rows.joined(rows.striped(own)[rows.index(self.band)])


@dataclasses.dataclass(frozen=True)
class FragmentPlan:
    """Pieces by fragment; the order of both is part of the plan."""

    fragments: tuple[tuple[Piece, ...], ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, fragment by fragment."""
        return tuple(piece for fragment in self.fragments for piece in fragment)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of parameters of each fragment."""
        return tuple(_size(fragment) for fragment in self.fragments)

    @property
    def total(self) -> int:
        """Number of parameters of the model."""
        return sum(self.sizes)

    def digest(self) -> str:
        """Return 16 hex digits over every piece and its place."""
        text = json.dumps(
            [
                [
                    [
                        *(p.name, p.layer, p.shape, p.embedding, p.groups, p.by_use),
                        p.bands and dataclasses.astuple(p.bands),
                        # Groups tell it of all others.
                        *("expert",) * (p.expert and p.groups == 1),
                        *("as one",) * p.as_one,
                    ]
                    for p in fragment
                ]
                for fragment in self.fragments
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_fragments(
    shapes: Mapping[str, Any],
    axes: Mapping[str, Any],
    num_fragments: int,
    by: str = "size",
    may_cut: Callable[[Piece], bool] = lambda piece: False,
    by_use: Mapping[str, float] = MappingProxyType({}),
    as_one: Sequence[str] = (),
) -> FragmentPlan:
    """Deal all pieces out to `num_fragments` fragments of about equal size.

    Each piece, the largest first, goes to the fragment with the fewest parameters so
    far (ties: the lowest index; equally large pieces: by path and layer). So equal
    layers go to the fragments in turn, the strided pattern of Streaming DiLoCo (arXiv
    2501.18512), and even out the larger tensors outside the layers. By size, a tensor
    or layer above the mean size of a fragment is cut into bands where it may be. If the
    fragments are then uneven, smaller tensors are cut as well, into smaller bands.

    Args:
      shapes: nested dict; leaves are tuples of ints or have a `.shape`.
      axes: the same nesting; leaves are tuples with the logical name (or None) of
        every axis. A leading "layers" makes one piece per layer, "expert" first or
        after it makes groups, "vocab" anywhere marks an embedding, and "router" a
        router.
      num_fragments: P.
      by: the unit dealt out. "size": each piece by itself. "layer": all pieces of a
        layer (of one index, in every stack) together, each tensor outside the layers
        by itself. "tensor": all layers of a tensor together.
      may_cut: tells whether the mathematics of a whole piece are those of its bands
        (`core/merging.py: may_cut`).
      by_use: `Piece.by_use` of tensors, by path, joined by "/".
      as_one: paths of those that are used as a whole.

    Raises:
      ValueError: P is below 1 or above the number of units; shapes and axes do not
        match; two pieces have one name; `by` is unknown.
    """
    whole = [
        dataclasses.replace(piece, by_use=by_use.get(path, 0), as_one=path in as_one)
        for piece in _pieces(shapes, axes, ())
        for path in ("/".join(piece.path),)
    ]
    plans = [_deal(whole, num_fragments, by, may_cut, cut) for cut in CUTS]
    even = EVEN * plans[0].total / num_fragments
    return min(plans, key=lambda plan: max(even, *plan.sizes))  # The first of equals.


def groups_of(names: Sequence[str | None], shape: tuple[int, ...]) -> int:
    """Return `Piece.groups` of a tensor, or of a layer, by the names of its axes."""
    return shape[0] if _is_expert(names) else 1


def _is_expert(names: Sequence[str | None]) -> bool:
    return tuple(names[:1]) == (EXPERT,)


def get_piece(params: Mapping[str, Any], piece: Piece) -> Any:
    """Return the piece's values, of shape `piece.shape`; a whole leaf as it is."""
    leaf: Any = params
    for key in piece.path:
        leaf = leaf[key]
    value = leaf if piece.layer < 0 else leaf[piece.layer]
    if piece.bands is None:
        return value
    return piece.bands.joined(piece.bands.striped(value)[piece.bands.index(piece.band)])


def from_pieces(plan: FragmentPlan, arrays: Mapping[str, Any]) -> Params:
    """Build parameters from all their pieces by name; layers are stacked again.

    numpy pieces make numpy leaves, anything else makes jax ones.

    Raises:
      ValueError: pieces are missing or unknown, or one has another shape.
    """
    expected = {piece.name for piece in plan.pieces}
    if expected != set(arrays):
        raise ValueError(
            f"the plan has {len(expected)} pieces and {len(arrays)} were given: "
            f"missing {sorted(expected - set(arrays))}, "
            f"unknown {sorted(set(arrays) - expected)}"
        )
    found: dict[tuple[tuple[str, ...], int], list[Piece]] = {}
    for piece in sorted(plan.pieces):
        value = arrays[piece.name]
        if value.shape != piece.shape:
            raise ValueError(
                f"piece {piece.name} has shape {value.shape}; the plan says "
                f"{piece.shape}"
            )
        found.setdefault((piece.path, piece.layer), []).append(piece)
    params: Params = {}
    for (path, layer), pieces in found.items():
        values, bands = [arrays[piece.name] for piece in pieces], pieces[0].bands
        value = bands.concatenate(values) if bands else values[0]
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        if layer < 0:
            node[path[-1]] = value
        else:
            node.setdefault(path[-1], []).append(value)
    stacked: Params = _stacked(params)
    return stacked


def _deal(
    whole: Sequence[Piece],
    num_fragments: int,
    by: str,
    may_cut: Callable[[Piece], bool],
    cut: tuple[int, int],
) -> FragmentPlan:
    """Deal out the pieces. cut: one of `CUTS`."""

    def units_for(count: int) -> dict[Hashable, list[Piece]]:
        above, limit = (_size(whole) / count / part for part in cut)
        pieces = _in_bands(whole, above, limit, may_cut) if by == "size" else whole
        units: dict[Hashable, list[Piece]] = {}
        for piece in sorted(pieces):
            units.setdefault(_kept_with(piece, by), []).append(piece)
        return units

    units = units_for(most := max(num_fragments, 1))
    while len(units) < most:  # Fewer fragments are larger, and have fewer bands.
        units = units_for(most := len(units))
    pieces = [piece for unit in units.values() for piece in unit]
    if not 1 <= num_fragments <= most:
        raise ValueError(
            f"fragments = {num_fragments}, but by {by} the parameters make at most "
            f"{most} fragments of {len(pieces)} pieces (tensors, stacked ones "
            f"counted by layer); choose fragments between 1 and {most}"
            f"{'' if by == 'size' else ', or deal them out by size'}"
        )
    names = {piece.name for piece in pieces}
    if len(names) < len(pieces):
        raise ValueError(
            f"{len(pieces)} pieces have only {len(names)} names; rename the "
            f"parameters whose keys contain '/' or look like a layer index or a band"
        )
    fragments: list[list[Piece]] = [[] for _ in range(num_fragments)]
    sizes = [0] * num_fragments
    for together in sorted(units.values(), key=lambda own: (-_size(own), own)):
        emptiest = sizes.index(min(sizes))
        fragments[emptiest] += together
        sizes[emptiest] += _size(together)
    return FragmentPlan(tuple(tuple(sorted(pieces)) for pieces in fragments))


def _kept_with(piece: Piece, by: str) -> Hashable:
    """Return a key that is equal for pieces that must share a fragment."""
    match by:
        case "size":
            return piece
        case "layer":
            return piece if piece.layer < 0 else piece.layer
        case "tensor":
            return piece.path
        case _:
            raise ValueError(f"by = {by!r}; choose from {', '.join(WAYS)}")


def _in_bands(
    whole: Sequence[Piece], above: float, limit: float, may_cut: Callable[[Piece], bool]
) -> Iterator[Piece]:
    """Yield the pieces, and of those `above` a size their bands of a limited one."""
    for piece in whole:
        if piece.size <= above or not may_cut(piece):
            yield piece
            continue
        bands = Bands.of(piece.shape, limit, piece.groups)
        for band, shape in enumerate(bands.shapes(piece.shape)):
            groups = min(piece.groups, shape[0])
            yield dataclasses.replace(
                piece, band=band, bands=bands, shape=shape, groups=groups
            )


def _size(pieces: Iterable[Piece]) -> int:
    return sum(piece.size for piece in pieces)


def _pieces(shapes: Any, axes: Any, path: tuple[str, ...]) -> Iterator[Piece]:
    where = "/".join(path) or "the parameters"
    if isinstance(shapes, Mapping):
        if not isinstance(axes, Mapping) or set(shapes) != set(axes):
            found = sorted(axes) if isinstance(axes, Mapping) else axes
            raise ValueError(
                f"{where}: shapes have the keys {sorted(shapes)}, axes have {found}; "
                f"both must be nested alike"
            )
        for key in sorted(shapes):
            yield from _pieces(shapes[key], axes[key], (*path, key))
        return
    shape = tuple(getattr(shapes, "shape", shapes))
    if isinstance(axes, Mapping) or len(axes) != len(shape):
        raise ValueError(
            f"{where}: shape {shape} has {len(shape)} axes, but they are named {axes}; "
            f"give one name (or None) per axis"
        )
    embedding, layered = VOCAB in axes, axes[:1] == (LAYERS,)
    own, expert = shape[layered:], _is_expert(axes[layered:])
    groups = own[0] if expert else 1
    for layer in range(shape[0]) if layered else (-1,):
        yield Piece(
            *(path, layer, own, embedding),
            expert=expert,
            router=ROUTER in axes,
            groups=groups,
        )


def _stacked(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _stacked(value) for key, value in node.items()}
    return _numpy_of(node).stack(node) if isinstance(node, list) else node


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
    def of(
        cls, codec: Codec, pieces: Sequence[Piece], counted: Sequence[Piece] = ()
    ) -> PayloadLayout:
        """Return the layout of these pieces, in this order, and of the counts of use of
        those that are `counted`."""
        shapes = [codec.encoded_shape(p.shape, p.groups) for p in pieces]
        uses = [(1, USE_BYTES * p.counts) for p in counted]
        return cls._of([*pieces, *counted], [*shapes, *uses])

    @classmethod
    def of_delta(cls, codec: Codec, pieces: Sequence[Piece]) -> PayloadLayout:
        """Return the layout of a delta of these pieces, with its counts of use."""
        return cls.of(codec, pieces, [p for p in pieces if p.by_use])

    @classmethod
    def of_ballots(cls, pieces: Sequence[Piece]) -> PayloadLayout:
        """Return the layout of ballots about these pieces; see `tiles.ballot_of`."""
        grids = (piece.grid for piece in pieces)
        return cls._of(pieces, [(*g.grid, ballot_bytes(g.elements)) for g in grids])

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
          ValueError: a box is not in its piece's grid, or the part is no part: it has
            an empty box beside others, more boxes than tiles or more bytes than all.
        """
        return sum(map(math.prod, self._shapes(part)))

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
        tiles = sum(math.prod(p.encoded_shape[:-1]) for p in self.placed)
        if len(part) > tiles:  # Before any is looked at: they may be a peer's.
            raise ValueError(
                f"a part of {len(part)} boxes, of a payload of {tiles} tiles"
            )
        shapes = [
            (*self._box_shape(box), self.placed[box.piece].tile_bytes)
            for box in self.boxes(part)
        ]
        sizes = [math.prod(shape) for shape in shapes]
        if sum(sizes) > self.total_bytes or (len(part) > 1 and 0 in sizes):
            raise ValueError(
                f"a part of {len(part)} boxes and {sum(sizes)} bytes, {sizes.count(0)} "
                f"of them empty, of a payload of {self.total_bytes} bytes; an empty "
                f"box is alone, and none overlap"
            )
        return shapes

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


def tiles_of(box: Box) -> tuple[slice, ...]:
    """Return the tiles of a box, as an index into its piece's grid."""
    return tuple(map(slice, box.start, box.stop))
