"""Merge the deltas of one piece: their weights, the rules, and the sums by blocks.

Deltas are summed in the given order. Callers sort them by island name, so the order of
arrival does not matter. Sums go block by block over the tiles, and decode no more than
a block at a time. With `Passes` they are those of the merge route "native", else of
"xla"; the bits are the same. The result lies in the order of the tiles.

A weight follows from a delta's tokens and inner steps, with a cap on one island's
share. A rule combines the deltas of several islands into one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.core.changes import tile_squares
from diloco_jax.core.codecs import Codec, compiled
from diloco_jax.core.families import (
    Elementwise,
    MergeRule,
    Shape,
    State,
    WeightedSum,
    Weighting,
    Whole,
)
from diloco_jax.core.fragments import Piece
from diloco_jax.core.tiles import BLOCK_ELEMENTS, ArrayLike, Passes, TileGrid, blocks


def weight(weighting: Weighting, tokens: int, steps: int) -> float:
    """Return the weight of a delta of that many tokens and inner steps; 0 if empty."""
    return weighting(tokens, steps) if steps > 0 and tokens > 0 else 0.0


def tokens(tokens: int, steps: int) -> float:
    """Return the delta's tokens."""
    return float(tokens)


def tokens_times_rate(tokens: int, steps: int) -> float:
    """Return tokens * (tokens / steps), quantity times quality, as in Decoupled DiLoCo
    (arXiv 2604.21428)."""
    return tokens * (tokens / steps)


def uniform(tokens: int, steps: int) -> float:
    """Return the same weight for every delta."""
    return 1.0


def capped(
    weights: Sequence[float] | npt.NDArray[np.float64], most: float
) -> npt.NDArray[np.float64]:
    """Return the weights, f64[M] or f64[M, rows], with none above the share `most` of
    the sum of its row; what is above it goes to the others in proportion to theirs. All
    are the same in a row that has too few.

    weights: finite and at least 0. most: above 0 and at most 1.
    """
    own = np.asarray(weights, np.float64)
    held = own > most * own.sum(axis=0)
    while True:
        rest = np.where(held, 0.0, own).sum(axis=0)
        free = 1 - most * held.sum(axis=0)
        # With too few others nobody can be held to that share.
        few = held.any(axis=0) & ((rest <= 0) | (free <= 0))
        limit = np.full(rest.shape, np.inf)
        np.divide(most * rest, free, out=limit, where=held.any(axis=0) & ~few)
        above = held | (own > limit)
        if (above == held).all():
            return np.where(few, own > 0, np.where(held, limit, own))
        held = above


class Mean(WeightedSum):
    """The weighted mean of the deltas."""

    by_element = True

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return the weights."""
        return weights

    def scale(
        self, weights: Sequence[float], squares: Sequence[float], square: float
    ) -> float:
        """Return 1: the sum is the mean."""
        return 1.0

    def direction_square(self, square: float) -> None:
        """Return None: the sum has the deltas' lengths."""


MEAN = Mean()


CANCELLED = 1e-5
"""A sum of unit vectors shorter than this share of its weights is rounding error."""


class Rda(WeightedSum):
    """Radial-directional averaging (Decoupled DiLoCo, arXiv 2604.21428), which averages
    lengths and directions apart:

        RDA = (sum w |d| / sum w) * unit(sum w unit(d)),    unit(0) = 0

    Deltas of different islands are close to orthogonal, so a mean of M of them shrinks
    like 1 / sqrt(M); RDA keeps the length.

    Deviations from the paper: RDA is per piece (the paper does not say), and where the
    directions cancel, the result is the weighted mean.
    """

    keeps_length = True

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return w / |d|; 0 for a delta without a direction."""
        return [
            w / math.sqrt(square) if square > 0 else 0.0
            for w, square in zip(weights, squares, strict=True)
        ]

    def scale(
        self, weights: Sequence[float], squares: Sequence[float], square: float
    ) -> float | None:
        """Return the mean length of the deltas over the length of the sum.

        None if all deltas are zero, or if their directions cancel.
        """
        pairs = list(zip(weights, squares, strict=True))
        directed = math.fsum(w for w, own in pairs if own > 0)
        if math.sqrt(square) <= CANCELLED * directed:
            return None
        return math.fsum(w * math.sqrt(own) for w, own in pairs) / math.sqrt(square)

    def direction_square(self, square: float) -> float:
        """Return `square`: the factors w / |d| make the sum one of unit deltas."""
        return square


RDA = Rda()


class ClippedMean(WeightedSum):
    """The weighted mean of deltas, with long ones shortened.

    A delta that is longer than the weighted median length is shortened to it, piece by
    piece (Karimireddy et al., arXiv 2012.10333, clip around the last momentum instead).
    So no island moves the parameters further than its share of the weights, whatever it
    sends.
    """

    embeddings_by_mean = False
    flush_by_mean = False

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return the weights, less where a delta is long."""
        lengths = [math.sqrt(square) for square in squares]
        most = _median(weights, lengths)
        return [
            w * min(1.0, most / length) if length > 0 else w
            for w, length in zip(weights, lengths, strict=True)
        ]


def _median(weights: Sequence[float], lengths: Sequence[float]) -> float:
    """Return the shortest length up to which lie half of the weights."""
    half, below = sum(weights) / 2, 0.0
    for length, weight in sorted(zip(lengths, weights, strict=True)):
        below += weight
        if below >= half:
            return length
    return max(lengths)


CLIPPED_MEAN = ClippedMean()


TRIMMED = 4
"""Number of deltas per delta left out at each end."""
FEWEST = 3


class TrimmedMean(Elementwise):
    """A weighted mean without the outermost deltas.

    For each element the largest and smallest quarter of the deltas are left out, with 3
    to 7 deltas one at each end (Yin et al., arXiv 1803.01498, here with weights). Of
    equal elements with unlike weights any may be the ones that are left out.

    It tolerates islands whose deltas are wrong, up to as many as are left out at an
    end, in all pieces and to the last merge; a mean and RDA do not.

    Elements are sorted by a network of comparators: the same few operations for all of
    them, which XLA makes one loop without branches. With a sort of each column by
    itself, merges took twenty times as long (docs/results/raw/merging.md).
    """

    embeddings_by_mean = False
    flush_by_mean = False

    def merge(
        self, deltas: jax.Array, weights: jax.Array, share: jax.Array
    ) -> jax.Array:
        """Return the mean of the elements in the middle."""
        islands = len(weights)
        out = max(1, islands // TRIMMED) if islands >= FEWEST else 0
        values = list(deltas)
        own = [jnp.broadcast_to(weight, values[0].shape) for weight in weights]
        for low, high in comparators(islands if out else 0):
            swap = values[high] < values[low]
            for rows in (values, own):
                rows[low], rows[high] = (
                    jnp.where(swap, rows[high], rows[low]),
                    jnp.where(swap, rows[low], rows[high]),
                )
        values, own = values[out : islands - out], own[out : islands - out]
        total = _sum_tiles(own)
        # Where all remaining elements have weight 0, they count equally.
        own = [jnp.where(total > 0, weight, 1.0) for weight in own]
        return (
            share * _sum_tiles(list(map(operator.mul, own, values))) / _sum_tiles(own)
        )


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of places to be compared, and put in order, in turn: all `count`
    places are sorted then (Batcher's odd-even merge sort; Knuth, volume 3, 5.2.2)."""
    merged = 1
    while merged < count:
        apart = merged
        while apart:
            for first in range(apart % merged, count - apart, 2 * apart):
                for low in range(first, min(first + apart, count - apart)):
                    if low // (2 * merged) == (low + apart) // (2 * merged):
                        yield low, low + apart
            apart //= 2
        merged *= 2


def _sum_tiles(rows: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, rows)


TRIMMED_MEAN = TrimmedMean()


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One piece's deltas by island, as they arrived: uint8[*grid, tile_bytes] each.
    Values are computed on demand, and not kept."""

    codec: Codec
    shape: Shape
    """Shape of each delta."""
    encoded: Sequence[ArrayLike]
    known: Sequence[float] = ()
    """`squares`, if they are known already."""
    passes: Passes | None = None
    """The merge route "native"; None: "xla"."""
    groups: int = 1
    """As `Piece.groups`."""

    @classmethod
    def of(cls, arrays: Sequence[ArrayLike]) -> Encoded:
        """Return these deltas, f32[shape] each, without loss."""
        codec = Codec("f32")
        shape = tuple(arrays[0].shape) if arrays else ()
        return cls(codec, shape, [codec.encode(array) for array in arrays])

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, island: int) -> ArrayLike:
        """Return the island's delta, f32[shape]."""
        return self.codec.decode(self.encoded[island], self.shape, self.groups)

    def tiles(self, island: int, rows: slice) -> ArrayLike:
        """Return these of its tiles, f32[rows, elements], in the order of the grid."""
        return self.codec.decode_tiles(self._in_order(island)[rows], self._elements)

    def weighted_sum(
        self,
        factors: Sequence[float] | npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
    ) -> list[float]:
        """Sum the deltas, each times its factor, into f32[tiles, elements]; return the
        sum of the squares of each tile of that. factors: one a delta, or f32[M, rows],
        one for each row of its first axis."""
        by_row = self.grid if np.ndim(factors) > 1 else None
        if self._native is not None:
            encoded = [self._in_order(island) for island in range(len(self))]
            return self._native.sum(self.codec.name, encoded, factors, out, by_row)
        found: list[float] = []
        for rows in blocks(*out.shape):
            block = jnp.zeros(out[rows].shape, jnp.float32)
            for island, factor in enumerate(factors):
                own = np.float32(factor)
                if by_row is not None:
                    own = by_row.by_row(factor, rows)
                block = added(block, self.tiles(island, rows), own)
                # Otherwise all deltas would be decoded ahead of the sum, into memory.
                jax.block_until_ready(block)  # type: ignore[no-untyped-call]
            out[rows] = block
            found += tile_squares(block)
        return found

    @functools.cached_property
    def squares(self) -> Sequence[float]:
        """The sum of the squares of each delta; inf or NaN if a value is not
        finite."""
        return self.known or [self._square(island) for island in range(len(self))]

    def _square(self, island: int) -> float:
        encoded, elements = self._in_order(island), self._elements
        if self._native is not None:
            name = self.codec.name
            return math.fsum(self._native.tile_squares(name, encoded, elements))
        cut = blocks(len(encoded), elements)
        return math.fsum(
            s for rows in cut for s in tile_squares(self.tiles(island, rows))
        )

    @property
    def grid(self) -> TileGrid:
        """The tiles of each delta."""
        return TileGrid.of(self.shape, self.groups)

    @property
    def _elements(self) -> int:
        return self.grid.elements

    @property
    def _native(self) -> Passes | None:
        if self.passes is not None and self.passes.knows(self.codec.name):
            return self.passes
        return None

    def _in_order(self, island: int) -> Any:
        """Return uint8[tiles, tile_bytes]."""
        encoded = self.encoded[island]
        return encoded.reshape(-1, encoded.shape[-1])


@compiled(donates=(0,))
def added(total: jax.Array, delta: ArrayLike, factor: Any) -> jax.Array:
    """Return a sum with one more delta, f32[n, elements], times its factor, one number
    or [n, rows of a tile]. The sum is donated."""
    shape = (*jnp.shape(factor), -1) if jnp.ndim(factor) else total.shape
    by_row = jnp.expand_dims(factor, -1) if jnp.ndim(factor) else factor
    summed = total.reshape(shape) + by_row * delta.reshape(shape)
    return summed.reshape(total.shape)


MOST_SQUARES = 1e36
"""Largest sum of a delta's squares: f32 results of it are far from overflowing."""


class MergedPiece(NamedTuple):
    """A merged piece: `factor` times `total`."""

    grid: TileGrid
    total: npt.NDArray[np.float32]
    """f32[tiles, elements]."""
    factor: float
    square: float
    """Sum of the squares of the merged delta."""
    state: State
    """The rule's state, for the next merge."""
    direction_square: float | None
    """|sum of w unit(d)|^2, if the rule knows it."""
    unused: npt.NDArray[np.bool_] | None = None
    """bool[rows of the first axis]: no delta used it, so it stays as it is; None: all
    were used."""

    @property
    def delta(self) -> npt.NDArray[np.float32]:
        """The merged delta in its own order, f32[shape]."""
        scaled = self.total * np.float32(self.factor)
        whole: npt.NDArray[np.float32] = self.grid.from_tiles(scaled)
        return whole


def merge_piece(
    rule: MergeRule,
    deltas: Encoded,
    weights: Sequence[float],
    share: float = 1.0,
    state: State = (),
    out: npt.NDArray[np.float32] | None = None,
    uses: npt.NDArray[np.float64] | None = None,
    most: float = 1.0,
) -> MergedPiece:
    """Merge the deltas of one piece.

    Args:
      rule: see `rule_for`.
      deltas: by island in the order of the sum.
      weights: one per delta, finite and >= 0; only their ratios matter.
      share: share of the islands' work in these deltas, above 0 and at most 1.
      state: from the last merge of the piece; `start(rule, shape)` at first.
      out: the place of `MergedPiece.total`; None: a new array.
      uses: f64[M, rows of the first axis], how often each delta's steps used a row, per
        unit of its weight; f64[M, 1]: the piece as a whole; None: all rows alike.
      most: largest share of one delta in a row, if there are enough others.

    Raises:
      ValueError: no deltas, not one weight per delta, weights that are negative or
        not finite or all zero, or a share out of bounds; uses for a rule that sees
        whole deltas.
    """
    total = math.fsum(weights)
    if len(deltas) != len(weights) or not weights:
        raise ValueError(
            f"{len(deltas)} deltas and {len(weights)} weights; give one weight per "
            f"delta, and at least one delta"
        )
    if not (all(w >= 0 for w in weights) and 0 < total < math.inf):
        raise ValueError(
            f"weights {list(weights)} must be finite, not negative and not all zero"
        )
    if not 0 < share <= 1:
        raise ValueError(f"share = {share}; it must be above 0 and at most 1")
    shares = [w / total for w in weights]
    if out is None:
        out = np.empty(deltas.grid.in_order, np.float32)
    by_row = None if uses is None else row_shares(shares, uses, most)
    if by_row is not None and by_row.shape[1] == 1:
        return _as_one(rule, deltas, by_row[:, 0].tolist(), share, state, out)
    if rule.needs == "sum":
        return _sum(rule, deltas, shares, share, out, by_row)
    if rule.needs == "elementwise":
        return _by_blocks(rule, deltas, shares, share, out, by_row)
    require_rows(rule, by_row is not None)
    stacked = jnp.stack([deltas[island] for island in range(len(deltas))])
    merged, after = merge_whole(rule, stacked, jnp.asarray(shares), share, state)
    out[...] = deltas.grid.to_tiles(np.asarray(merged))
    square = math.fsum(tile_squares(out))
    return MergedPiece(deltas.grid, out, 1.0, square, after, None)


def row_shares(
    shares: Sequence[float], uses: npt.NDArray[np.float64], most: float = 1.0
) -> npt.NDArray[np.float64]:
    """Return each delta's share in each row, f64[M, rows]: its own times its use, over
    the sum of all; zeros where nobody used the row. See `merge_piece`."""
    found: npt.NDArray[np.float64] = np.array(shares)[:, None] * uses
    if most < 1:
        found = capped(found, most)
    total = found.sum(axis=0)
    np.divide(found, total, out=found, where=total > 0)
    return found


def _as_one(
    rule: MergeRule,
    deltas: Encoded,
    weights: list[float],
    share: float,
    state: State,
    out: npt.NDArray[np.float32],
) -> MergedPiece:
    """Merge the deltas that used the piece, by these weights, as if there were no
    others; without any, all of its rows are unused."""
    used = [number for number, weight in enumerate(weights) if weight > 0]
    if not used:
        out[...] = 0
        unused = np.ones(deltas.shape[:1], np.bool_)
        return MergedPiece(deltas.grid, out, 1.0, 0.0, state, None, unused)
    own = dataclasses.replace(
        deltas,
        encoded=[deltas.encoded[number] for number in used],
        known=[deltas.squares[number] for number in used],
    )
    found = merge_piece(rule, own, [weights[n] for n in used], share, state, out)
    return found._replace(direction_square=None)


def _unused(
    by_row: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.bool_] | None:
    """Return `MergedPiece.unused`."""
    return None if by_row is None else np.asarray(~by_row.any(axis=0))


def require_rows(rule: MergeRule, by_use: bool) -> None:
    """Raise ValueError if a rule cannot weigh rows by use, and is to."""
    if by_use and rule.needs not in ("sum", "elementwise"):
        raise ValueError(
            f"{type(rule).__name__} sees whole deltas (needs = {rule.needs!r}), and "
            f"weights by use differ from row to row; choose a rule that needs a sum or "
            f"goes element by element, or set sync.weights_by_use = 'parts'"
        )


def rule_for(piece: Piece, rule: MergeRule, *, final: bool = False) -> MergeRule:
    """Return the rule for this piece, in the last merge of a run if `final`."""
    by_mean = (piece.embedding or piece.expert) and rule.embeddings_by_mean
    return MEAN if by_mean or (final and rule.flush_by_mean) else rule


def may_cut(piece: Piece, rule: MergeRule) -> bool:
    """Tell whether the bands of a piece are merged as the whole piece would be."""
    return rule_for(piece, rule).by_element


def start(rule: MergeRule, shape: Shape) -> State:
    """Return the state of a rule before the first merge of a piece."""
    return rule.start(shape) if rule.needs == "whole" else ()


def recovered(rule: MergeRule, state: State, change: ArrayLike) -> State:
    """Return a rule's state after a merge of which only the published change is
    known."""
    return rule.recovered(state, change) if rule.needs == "whole" else state


def state_bytes(rule: MergeRule, shape: Shape) -> int:
    """Return the bytes of a rule's state for a piece."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: start(rule, shape)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def merging_bytes(rule: MergeRule, islands: int, elements: int) -> int:
    """Return the memory for the merge of a piece, without its result."""
    # Each delta by itself, and all of them stacked.
    arrays = 2 * islands if rule.needs == "whole" else 0
    at_once = islands if rule.needs == "elementwise" else 1
    in_hand = 2 * min(BLOCK_ELEMENTS, at_once * elements)
    return 4 * (elements * (arrays + rule.extra_copies) + in_hand)


def _sum(
    rule: WeightedSum,
    deltas: Encoded,
    weights: list[float],
    share: float,
    out: npt.NDArray[np.float32],
    by_row: npt.NDArray[np.float64] | None,
) -> MergedPiece:
    squares = deltas.squares
    factors: Any = rule.factors(weights, squares)
    if by_row is not None:
        # What the rule makes of a delta's weight, it makes of its weight in a row.
        pairs = zip(factors, weights, strict=True)
        each = np.array([f / weight if weight else 0.0 for f, weight in pairs])
        factors = (each[:, None] * by_row).astype(np.float32)
    found = deltas.weighted_sum(factors, out)
    square = math.fsum(found)
    scale = rule.scale(weights, squares, square)
    if scale is None:
        return _sum(MEAN, deltas, weights, share, out, by_row)
    factor = share * scale
    return MergedPiece(
        deltas.grid,
        out,
        factor,
        factor * factor * square,
        (),
        rule.direction_square(square) if by_row is None else None,
        _unused(by_row),
    )


def _by_blocks(
    rule: Elementwise,
    deltas: Encoded,
    weights: list[float],
    share: float,
    out: npt.NDArray[np.float32],
    by_row: npt.NDArray[np.float64] | None,
) -> MergedPiece:
    for rows in blocks(len(out), out.shape[1], arrays=len(deltas)):
        stacked = jnp.stack([deltas.tiles(i, rows) for i in range(len(deltas))])
        if by_row is None:
            out[rows] = merge_block(rule, stacked, jnp.asarray(weights), share)
        else:
            own = jnp.asarray(deltas.grid.by_row(by_row, rows), jnp.float32)
            out[rows] = merge_rows(rule, stacked, own, share)
    square, unused = math.fsum(tile_squares(out)), _unused(by_row)
    return MergedPiece(deltas.grid, out, 1.0, square, (), None, unused)


@compiled(0)
def merge_block(rule: Elementwise, deltas: Any, weights: Any, share: Any) -> jax.Array:
    """Merge the same elements of all deltas, f32[M, ...], f32[M] -> f32[...]."""
    return _required(rule.merge(deltas, weights, share), deltas.shape[1:])


@compiled(0)
def merge_rows(rule: Elementwise, deltas: Any, weights: Any, share: Any) -> jax.Array:
    """Merge the same tiles of all deltas row by row, f32[M, n, elements], f32[M, n,
    rows] -> f32[n, elements]; 0 where all weights of a row are 0. A delta of weight 0
    is 0 in that row: a rule may look at deltas that weigh nothing."""
    rows = weights.reshape(len(weights), -1)
    own = deltas.reshape(*rows.shape, -1)
    own = jnp.where(rows[..., None] > 0, own, 0.0)
    merged = jax.vmap(lambda d, w: rule.merge(d, w, share), 1)(own, rows)
    merged = jnp.where(rows.any(axis=0)[:, None], merged, 0.0)
    return _required(merged.reshape(deltas.shape[1:]), deltas.shape[1:])


@compiled(0)
def merge_whole(
    rule: Whole, deltas: Any, weights: Any, share: Any, state: State
) -> Any:
    """Merge whole deltas, f32[M, *shape], f32[M] -> (f32[shape], next state)."""
    merged, after = rule.merge(deltas, weights, share, state)
    return _required(merged, deltas.shape[1:]), after


def _required(merged: jax.Array, shape: Shape) -> jax.Array:
    """Return a rule's result; ValueError if it is no delta of that shape."""
    if (merged.shape, merged.dtype) != (shape, jnp.float32):
        raise ValueError(
            f"a merge rule made {merged.dtype}{list(merged.shape)} of deltas of float32"
            f"{list(shape)}; a merged delta has their shape and dtype"
        )
    return merged


def merge_stacked(
    rule: MergeRule,
    grid: TileGrid,
    deltas: jax.Array,
    numbers: jax.Array,
    share: Any,
    state: State,
) -> tuple[jax.Array, State]:
    """Merge the deltas of a piece where they lie on a device, f32[M, n, e] -> (f32[n,
    e], the rule's next state), as a function to be compiled and mapped over runs.

    numbers: f32[M], the weights; of a `WeightedSum` its factors, which has then still
    to be scaled. share: as `merge_piece`, of the other kinds.
    """
    if rule.needs == "sum":
        found = jnp.zeros(deltas.shape[1:], deltas.dtype)
        for delta, factor in zip(deltas, numbers, strict=True):
            found = added(found, delta, factor)
        return found, state
    if rule.needs == "elementwise":
        return merge_block(rule, deltas, numbers, share), state
    own = jnp.stack([grid.from_tiles(delta) for delta in deltas])
    merged, after = merge_whole(rule, own, numbers, share, state)
    return grid.to_tiles(merged), after
