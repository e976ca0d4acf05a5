"""The pieces of a fragment as an island holds them: apart, or small ones in stacks.

A boundary costs its thread a program for each piece, and an array for each result,
whatever their size. A loop of hundreds of small tensors would pay for these alone. So
small whole tensors of a fragment that are of one kind share their anchor, base and
residual, stacked, and one program. What comes and goes stays apart, piece by piece: the
bytes of messages and checkpoints do not depend on it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diloco_jax.config import AnchorMemory, SyncConfig
from diloco_jax.core.fragments import FragmentPlan, Params, Piece
from diloco_jax.island.device.kinds import Index, Kind, alike, index_of, kind_of
from diloco_jax.island.device.leaves import Leaves, Listed, leaf_of
from diloco_jax.island.device.placing import abstract, in_turn, zeros

SMALL = 2**16
"""Elements of the largest tensor that is stacked. An adoption makes such a leaf anew
instead of changing it in place."""
ROWS_MAX = 64
SPARE = 8
"""At most one row in so many is spare, over all stacks of a kind."""


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
        for number, piece in enumerate(pieces):
            found[key(piece, number)].append(number)
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
