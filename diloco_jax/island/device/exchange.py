"""Takes and adoptions on the device: the island's end of the data's path.

Per piece it holds the anchor, the base, and with error feedback the residual. The base
is a copy of the local values at a take; it is kept until a version takes the delta's
place. The residual is kept before and after an outstanding take. All of them lie as the
piece does, in device or host memory. Parameters are donated to an adoption, which
changes them in place.

A boundary costs its thread a program for each piece, and an array for each result,
whatever their size. A loop of hundreds of small tensors would pay for these alone. So
small whole tensors of a fragment that are of one kind share their anchor, base and
residual, stacked, and one program (`Held`). What comes and goes stays apart, piece by
piece: the bytes of messages and checkpoints do not depend on it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from diloco_jax.config import AnchorMemory, SyncConfig
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import FragmentPlan, Params, Piece
from diloco_jax.core.payload import Box, Buffer, Part, PayloadLayout
from diloco_jax.island.device.kinds import (
    Index,
    Kind,
    alike,
    bits_shape,
    index_of,
    kind_of,
    number,
)
from diloco_jax.island.device.mesh import abstract, in_turn, land, zeros
from diloco_jax.island.device.spread import Spreads, Tiles, parts_by_host
from diloco_jax.island.mailbox import Arrival

SMALL = 2**16
"""Elements of the largest tensor that is stacked. An adoption makes such a leaf anew
instead of changing it in place."""
ROWS_MAX = 64
SPARE = 8
"""At most one row in so many is spare, over all stacks of a kind."""

Path = tuple[str, ...]
Leaves = dict[Path, jax.Array]


class Listed(NamedTuple):
    """Parameters of a loop that joined: the leaves of its own tree, in order. A
    boundary reads and writes few of them, and builds no structure from all."""

    leaves: list[Any]
    places: Mapping[Path, int]
    """Number of the leaf at each path."""


Lent = TypeVar("Lent", Params, Listed)
"""The local parameters as a boundary has them."""


def leaf_of(params: Params | Listed, path: Path) -> Any:
    """Return the leaf at a path."""
    if isinstance(params, Listed):
        return params.leaves[params.places[path]]
    node: Any = params
    for key in path:
        node = node[key]
    return node


def with_leaves(params: Lent, leaves: Leaves) -> Lent:
    """Return the parameters with these leaves in place of others; `params` stays."""
    if isinstance(params, Listed):
        listed = list(params.leaves)
        for path, leaf in leaves.items():
            listed[params.places[path]] = leaf
        return Listed(listed, params.places)
    # Each dict on a path is copied once.
    copied: dict[Path, Params] = {(): dict(params)}
    for path, leaf in leaves.items():
        for depth in range(1, len(path)):
            above, here = copied[path[: depth - 1]], path[:depth]
            if here not in copied:
                copied[here] = above[here[-1]] = dict(above[here[-1]])
        copied[path[:-1]][path[-1]] = leaf
    return copied[()]


@dataclasses.dataclass(slots=True)
class Held:
    """A piece, or a stack of small ones: arrays, and what programs are called with."""

    fragment: int
    pieces: tuple[Piece, ...]
    """By row. If the fragment has too few, the last one is repeated: all stacks of a
    kind are alike, and compiled once."""
    numbers: tuple[int, ...]
    """Their places in the fragment."""
    kind: Kind
    index: Index
    anchor: Any = None
    base: Any = None
    """None: the anchor."""
    residual: Any = None
    """None without error feedback."""
    before: Any = None
    """Residual before the outstanding take."""

    @property
    def settled(self) -> Any:
        """Residual as if no take were outstanding."""
        return self.residual if self.before is None else self.before

    def drop(self) -> None:
        """Return to the residual before the outstanding take, if there is one."""
        if self.before is not None:
            self.residual, self.before = self.before, None

    def zeros(self) -> jax.Array:
        """Return zeros that lie as its arrays do."""
        return zeros(self.kind.layout.values_shape, np.float32, self.kind.piece)

    def like(self) -> Any:
        """Return abstract arrays like those of `apart`."""
        layout = self.kind.layout
        where = self.kind.piece if layout.rows == 1 else layout.leaf
        return layout.together(abstract(layout.shape, np.float32, where))

    def apart(self, array: Any) -> Any:
        """Return one of its arrays by piece, in f32: itself, or copies of the rows of a
        stack, which lie as leaves."""
        if self.kind.layout.rows == 1:
            return array
        return in_turn(self.kind.reset(array, np.dtype(np.float32)))

    def together(self, by_piece: Any) -> jax.Array:
        """Return `apart`'s argument from its result."""
        if self.kind.layout.rows == 1:
            array: jax.Array = by_piece
        else:
            array = in_turn(self.kind.read(by_piece, self.index))
        return array

    def first(self, params: Params | Listed) -> Any:
        """Return a leaf of its kind."""
        return leaf_of(params, self.pieces[0].path)

    def leaf(self, params: Params | Listed, written: Mapping[Any, Any] = {}) -> Any:
        """Return the leaf, or the leaves of a stack; those in `written` replace the
        parameters'."""
        if len(self.pieces) > 1:  # Whole leaves, which nobody else writes.
            return tuple([leaf_of(params, piece.path) for piece in self.pieces])
        path = self.pieces[0].path
        leaf = written.get(path)
        return leaf_of(params, path) if leaf is None else leaf

    def write(self, leaf: Any, written: Leaves) -> None:
        """Note what `leaf` is to be replaced by."""
        if len(self.pieces) == 1:
            written[self.pieces[0].path] = leaf
        else:
            written.update(zip((p.path for p in self.pieces), leaf, strict=True))

    def pick(self, by_piece: Sequence[Any]) -> Any:
        """Return this object's own part of values by piece."""
        if len(self.numbers) == 1:
            return by_piece[self.numbers[0]]
        return tuple([by_piece[number] for number in self.numbers])

    def give(self, values: Any, by_piece: list[Any]) -> None:
        """Put this object's values where `pick` finds them."""
        if len(self.numbers) == 1:
            by_piece[self.numbers[0]] = values
        else:
            for number, value in zip(self.numbers, values, strict=True):
                by_piece[number] = value


def held_of(
    plan: FragmentPlan, sync: SyncConfig, params: Params | Listed, memory: AnchorMemory
) -> list[list[Held]]:
    """Return what the island holds, by fragment, without arrays. All its hosts get the
    same."""

    def key(piece: Piece, number: int) -> Hashable:
        leaf = leaf_of(params, piece.path)
        whole = piece.layer < 0 and piece.bands is None
        alone = None if whole and piece.size <= SMALL else number
        return (leaf.shape, leaf.sharding, alone, *alike(piece))

    def hold(fragment: int, numbers: Sequence[int], rows: int) -> Held:
        spare = (numbers[-1],) * (rows - len(numbers))
        filled = (*numbers, *spare)
        pieces = tuple(plan.fragments[fragment][number] for number in filled)
        leaf = leaf_of(params, pieces[0].path)
        kind = kind_of(sync, pieces[0], leaf, memory, rows)
        return Held(fragment, pieces, filled, kind, index_of(pieces[0], kind))

    groups: list[dict[Hashable, list[int]]] = []
    sizes: dict[Hashable, list[int]] = collections.defaultdict(list)
    for pieces in plan.fragments:
        found: dict[Hashable, list[int]] = collections.defaultdict(list)
        for place, piece in enumerate(pieces):
            found[key(piece, place)].append(place)
        groups.append(found)
        for of, numbers in found.items():
            sizes[of].append(len(numbers))
    rows = {of: rows_of(counts) for of, counts in sizes.items()}
    return [
        [
            hold(fragment, numbers[start : start + rows[of]], rows[of])
            for of, numbers in found.items()
            for start in range(0, len(numbers), rows[of])
        ]
        for fragment, found in enumerate(groups)
    ]


def rows_of(counts: Sequence[int]) -> int:
    """Return the rows of a kind's stacks: the most that leave few of them spare; 1: no
    stacks. counts: the kind's pieces by fragment."""
    total = sum(counts)
    for rows in range(min(max(counts), ROWS_MAX), 1, -1):
        if SPARE * sum(-count % rows for count in counts) <= total:
            return rows
    return 1


class Exchange:
    """Anchors, bases and residuals of all fragments of one island.

    params: the local parameters, or arrays that lie like them: nested dict of f32 on
    the island's mesh, or `Listed` ones. memory: where anchors, bases and residuals lie.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        sync: SyncConfig,
        params: Params | Listed,
        memory: AnchorMemory = "device",
    ) -> None:
        self._plan = plan
        self._sync = sync
        self.layouts_up = _layouts(plan, sync.codec_up)
        self.layouts_down = _layouts(plan, sync.codec_down)
        self.layouts_whole = _layouts(plan, "f32")
        self._held = held_of(plan, sync, params, memory)
        self._alpha = number(np.float32(sync.blend_alpha), self._held[0][0].kind)
        if self.feeds_back:
            for held in self._all():
                held.residual = held.zeros()

    # ---- the path of the data ---------------------------------------------------

    def take(self, fragment: int, params: Params | Listed) -> tuple[jax.Array, ...]:
        """Return the fragment's encoded delta by piece.

        Only one take of a fragment may be without `settle`, `reopen` or `drop`.
        """
        encoded = self._by_piece(fragment)
        for held in self._held[fragment]:
            before = held.residual
            sent, held.residual, held.base = in_turn(
                held.kind.take(held.leaf(params), held.index, held.anchor, before)
            )
            held.before = before
            held.give(sent, encoded)
        return tuple(encoded)

    def part_down(self, fragment: int) -> Part:
        """Return the part that this host fetches of a publish of the fragment, and of
        its anchor."""
        parts = parts_by_host(self.spreads(fragment))
        return parts[jax.process_index()] if len(parts) > 1 else ()

    def spreads(self, fragment: int) -> Spreads:
        """Return how the fragment's pieces are spread over the island's hosts."""
        spreads = self._by_piece(fragment)
        for held in self._held[fragment]:
            kind = held.kind
            held.give(kind.layout.together((kind.spread, kind.layout.shape)), spreads)
        return spreads

    def put_publish(self, fragment: int, octets: Buffer) -> tuple[jax.Array, ...]:
        """Put this host's part of one encoded publish on its devices, by piece. Any
        thread may call it: `adopt` moves the tiles to the devices that need them.

        octets: the bytes of `part_down`.
        """
        layout = self.layouts_down[fragment]
        boxes = layout.split(octets, self.part_down(fragment))
        shapes = [placed.encoded_shape for placed in layout.placed]
        return self._land(fragment, boxes, shapes, np.uint8)

    def put_anchor(self, fragment: int, octets: Buffer) -> tuple[jax.Array, ...]:
        """Put this host's part of A_v in full on its devices, by piece, as the bits of
        f32 tiles. Any thread may call it, as `put_publish`.

        octets: the f32 tiles of `part_down`, box by box.

        Raises:
          ValueError: they have another length.
        """
        layout = self.layouts_down[fragment]
        boxes = [
            (box, tiles.view(np.uint32))
            for box, tiles in layout.split_values(octets, self.part_down(fragment))
        ]
        shapes = [bits_shape(placed.piece.shape) for placed in layout.placed]
        return self._land(fragment, boxes, shapes, np.uint32)

    def _land(
        self,
        fragment: int,
        boxes: Sequence[tuple[Box, npt.NDArray[Any]]],
        shapes: Sequence[tuple[int, ...]],
        dtype: npt.DTypeLike,
    ) -> tuple[jax.Array, ...]:
        spreads, host = self.spreads(fragment), jax.process_index()
        found: list[dict[tuple[int, Tiles], npt.NDArray[Any]]] = [{} for _ in spreads]
        for box, value in boxes:
            if value.size:
                tiles = (box.start, box.stop)
                spread, _ = spreads[box.piece]
                row = spread.row_of(host, tiles) if spread.moved else 0
                found[box.piece][row, tiles] = value
        return tuple(
            land(spread, shape, dtype, here)
            for (spread, _), shape, here in zip(spreads, shapes, found, strict=True)
        )

    def anchor_bytes(self, fragment: int) -> int:
        """Return the length in bytes that `put_anchor` takes."""
        return self.layouts_down[fragment].values_bytes(self.part_down(fragment))

    def adopt(self, arrival: Arrival, params: Lent, *, keep: bool = False) -> Lent:
        """Return the parameters with the arrived version adopted. `params` is donated.

        keep: the last take is not in that version, and stays in the parameters.
        """
        in_turn(params)
        written: Leaves = {}
        for held in self._held[arrival.fragment]:
            before, base = held.anchor, held.base
            publishes = [held.pick(publish) for publish in arrival.publishes]
            whole = None if arrival.anchor is None else held.pick(arrival.anchor)
            old = before if keep or base is None else base
            leaf = held.leaf(params, written)
            leaf, held.anchor = self._arrive(held, leaf, old, whole, publishes)
            held.write(leaf, written)
            held.base = None
            if keep and base is not None:
                held.base = held.kind.move(base, before, held.anchor)
        return with_leaves(params, written)

    def _arrive(
        self, held: Held, leaf: Any, base: jax.Array, whole: Any, publishes: list[Any]
    ) -> tuple[Any, jax.Array]:
        """Return a leaf, which is donated, with one piece adopted, and its anchor."""
        kind, anchor = held.kind, held.anchor
        if whole is not None:
            anchor = in_turn(kind.gather_anchor(whole))
        if not publishes:
            return kind.adopt(leaf, held.index, base, anchor, self._alpha), anchor
        *earlier, last = publishes
        for publish in earlier:
            anchor = in_turn(kind.advance(anchor, kind.gathered(publish)))
        encoded = kind.gathered(last)
        arrived: tuple[Any, jax.Array] = in_turn(
            kind.arrive(leaf, held.index, base, anchor, encoded, self._alpha)
        )
        return arrived

    # ---- what becomes of a take -------------------------------------------------

    def settle(self, fragment: int) -> None:
        """Settle a merged take: what its encoding lost is in the residual for good."""
        for held in self._held[fragment]:
            held.before = None

    def drop(self, fragment: int) -> None:
        """Drop a lost take: the residual is again the one from before the take."""
        for held in self._held[fragment]:
            held.drop()

    def reopen(self, fragment: int) -> None:
        """Undo a take: the fragment's base is the old anchor again."""
        for held in self._held[fragment]:
            held.drop()
            held.base = None

    def reset(self, fragment: int, params: Lent) -> Lent:
        """Drop a lost take, and reset the local values to the anchor. `params` is
        donated."""
        self.reopen(fragment)
        return self.at_anchor(fragment, params)

    def at_anchor(self, fragment: int, params: Lent) -> Lent:
        """Return the parameters with the fragment at its anchor. `params` is
        donated."""
        return _written(params, ((h, h.anchor) for h in self._held[fragment]))

    # ---- for a coordinator that lost its state ----------------------------------

    def anchor(self, fragment: int) -> tuple[jax.Array, ...]:
        """Return the fragment's anchor by piece, in f32 tiles."""
        tiles = self._by_piece(fragment)
        for held in self._held[fragment]:
            held.give(in_turn(held.kind.whole(held.anchor)), tiles)
        return tuple(tiles)

    # ---- joining ----------------------------------------------------------------

    def gather(
        self, fragment: int, anchor: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Return an anchor of `put_anchor` as it is held. All hosts call it, for
        fragment after fragment in one order."""
        return tuple(
            in_turn(held.kind.gather_anchor(held.pick(anchor)))
            for held in self._held[fragment]
        )

    def start(
        self,
        anchors: dict[int, tuple[jax.Array, ...]],
        residuals: Mapping[int, tuple[jax.Array, ...]] | None = None,
    ) -> None:
        """Start with these anchors of `put_anchor`, by fragment, and with residuals by
        fragment, as they are held, where these are not zero.

        All hosts call it. `anchors` is emptied, so that no anchor is there twice.
        """
        for fragment in sorted(anchors):
            gathered = self.gather(fragment, anchors.pop(fragment))
            for held, anchor in zip(self._held[fragment], gathered, strict=True):
                held.anchor = anchor
        for fragment, arrays in (residuals or {}).items():
            for held, residual in zip(self._held[fragment], arrays, strict=True):
                held.residual = residual

    def start_from(self, params: Params | Listed) -> None:
        """Start with anchors of these values, which are copied: the run's first ones.
        All hosts call it."""
        for held in self._all():
            held.anchor = in_turn(held.kind.read(held.leaf(params), held.index))

    # ---- checkpoints ------------------------------------------------------------

    def trees(self) -> dict[str, list[tuple[jax.Array, ...]]]:
        """Return the anchors, and with error feedback the residuals as if no take were
        outstanding, by fragment and piece; not to be donated."""
        trees = {"anchors": self._pieces(lambda held: held.apart(held.anchor))}
        if self.feeds_back:
            trees["residuals"] = self._pieces(lambda held: held.apart(held.settled))
        return trees

    def _pieces(self, by_piece: Callable[[Held], Any]) -> list[tuple[Any, ...]]:
        """Return what the function has by piece, fragment by fragment."""
        trees = []
        for fragment, held_here in enumerate(self._held):
            pieces = self._by_piece(fragment)
            for held in held_here:
                held.give(by_piece(held), pieces)
            trees.append(tuple(pieces))
        return trees

    @property
    def feeds_back(self) -> bool:
        """True if there are residuals."""
        return self._sync.error_feedback

    def residuals(self, params: Lent) -> Lent:
        """Return the residuals of `trees`, laid out and arranged as the parameters are;
        `params`, laid out alike, are donated.
        """
        return _written(params, ((held, held.settled) for held in self._all()))

    def like_residuals(self) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """Return abstract arrays like the residuals of `trees`."""
        return self._pieces(Held.like)

    def together(
        self, fragment: int, pieces: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Return arrays of `like_residuals` as they are held. All hosts call it."""
        return tuple(held.together(held.pick(pieces)) for held in self._held[fragment])

    def anchors(self) -> dict[str, jax.Array]:
        """Return the anchors by piece name; not to be donated."""
        pieces = itertools.chain.from_iterable(self.trees()["anchors"])
        return {p.name: a for p, a in zip(self._plan.pieces, pieces, strict=True)}

    def warm(self, params: Lent, *, seldom: bool = True) -> Lent:
        """Compile everything on `params`, which is donated and comes back unchanged.

        It leaves no anchors behind: call `start` afterwards. seldom: if False, what an
        island runs only after it was away, or was late, is left to be compiled.
        """
        codec = get_codec(self._sync.codec_down)
        for held in self.one_of_each(params):
            kind, index, layout = held.kind, held.index, held.kind.layout
            leaf, anchor = held.leaf(params), held.zeros()
            shape = codec.encoded_shape(layout.shape)
            published = layout.together(zeros(shape, np.uint8, kind.encoded))
            _, _, local = in_turn(kind.take(leaf, index, anchor, held.residual))
            landing, landed = kind.spread.landing, kind.spread.landed_shape
            kind.gathered(layout.together(zeros(landed(shape), np.uint8, landing)))
            bits = zeros(landed(bits_shape(layout.shape)), np.uint32, landing)
            in_turn(kind.gather_anchor(layout.together(bits)))
            leaf, _ = in_turn(
                kind.arrive(leaf, index, anchor, anchor, published, self._alpha)
            )
            if seldom:
                in_turn(kind.advance(anchor, published))
                in_turn(kind.whole(anchor))
                kind.move(anchor, anchor, anchor)
                leaf = kind.adopt(leaf, index, anchor, anchor, self._alpha)
            leaf = kind.put(leaf, index, local)
            jax.block_until_ready(leaf)  # type: ignore[no-untyped-call]
            written: Leaves = {}
            held.write(leaf, written)
            params = with_leaves(params, written)
        return params

    def lower_all(self, params: Params | Listed) -> Iterator[jax.stages.Lowered]:
        """Lower what `warm` executes, one after the other, without arrays, to be
        compiled; `params` stay, and may be abstract."""
        for held in self.one_of_each(params):
            leaf, piece = held.first(params), held.pieces[0]
            assert isinstance(leaf.sharding, NamedSharding)
            like = abstract(leaf.shape, leaf.dtype, leaf.sharding)
            yield from held.kind.lower(self._sync, piece, like).values()
            yield from held.kind.lower_whole(piece).values()

    def held(self, fragment: int) -> Sequence[Held]:
        """Return what is held of the fragment; the caller changes nothing in it."""
        return self._held[fragment]

    def one_of_each(self, params: Params | Listed) -> list[Held]:
        """Return one of each kind of piece or stack."""
        found: dict[tuple[Any, ...], Held] = {}
        for held in self._all():
            leaf, rows = held.first(params), held.kind.layout.rows
            key = (leaf.shape, leaf.sharding, rows, *alike(held.pieces[0]))
            found.setdefault(key, held)
        return list(found.values())

    def _by_piece(self, fragment: int) -> list[Any]:
        return [None] * len(self._plan.fragments[fragment])

    def _all(self) -> Iterator[Held]:
        return itertools.chain.from_iterable(self._held)


def _written(params: Lent, values: Iterable[tuple[Held, Any]]) -> Lent:
    """Return the parameters, which are donated, with pieces set to these values."""
    written: Leaves = {}
    for held, value in values:
        leaf = held.leaf(params, written)
        held.write(held.kind.put(leaf, held.index, value), written)
    return with_leaves(params, written)


def _layouts(plan: FragmentPlan, codec: str) -> tuple[PayloadLayout, ...]:
    return tuple(PayloadLayout.of(get_codec(codec), p) for p in plan.fragments)
