"""A fragment at the coordinator, the merge of its deltas, and the measures of a merge.

All arrays of a piece lie in the order of its tiles, f32[tiles, elements], as deltas and
publishes do on the wire. A merge goes over the tiles twice, a block at a time: it sums
the deltas, and with the length of the sum it takes the outer step and encodes the
publish. Its results are new arrays; the state that it was given stays as it was.

Measures are the agreement of the deltas, of a mixture's islands that of their routers
and of what these chose, and the length of the step. They cost no pass over a fragment
and no copy of it. Lengths and, where the rule has it, |sum w unit(d)|^2 come from the
merge itself. All else is computed from a fixed 1/64 of the tiles, at least one per
piece; where odd extents make tiles that are too large for that, from a fixed part of
their elements.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from diloco_jax.core import merging, outer
from diloco_jax.core.changes import apply_to_tiles, publish_tiles
from diloco_jax.core.codecs import Codec, decode_uses
from diloco_jax.core.families import MergeRule
from diloco_jax.core.fragments import Buffer, PayloadLayout, Piece
from diloco_jax.core.merging import Encoded, MergedPiece, merge_piece, rule_for
from diloco_jax.core.outer import OuterSettings, native_step
from diloco_jax.core.tiles import (
    MOST_ELEMENTS,
    ArrayLike,
    Empty,
    Passes,
    Step,
    TileGrid,
    blocks,
    digest_arrays,
    named,
)

SAMPLED = 64
"""Number of a piece's tiles per sampled tile."""
FEWEST_DIRECTIONS = 3
"""Deltas of which each is compared with the others; of two, `pairwise_cosine` tells as
much."""

Sample = npt.NDArray[np.float32]
"""f32[rows, elements]: what is looked at of a piece, by sampled tile."""


class MergeMeasures(NamedTuple):
    """Measures of one merge of one fragment. None: the measure does not exist."""

    pairwise_cosine: float | None = None
    """Mean cosine of two islands' deltas, weighted by both weights; by piece, averaged
    by size. None for fewer than two deltas."""
    cosine_to_last: float | None = None
    """Cosine of the merged delta and the fragment's previous one; None for the first
    merge that a process computes."""
    length_ratio: float | None = None
    """Length of the merged delta over the weighted mean of the deltas' lengths."""
    step_ratio: float | None = None
    """Length of the outer step over that of the merged delta."""


def measure(
    deltas: Sequence[Encoded],
    merged: Sequence[MergedPiece],
    weights: Sequence[float],
    samples: Sequence[Sample],
    last: Sequence[Sample],
    steps: Sequence[Sample],
) -> tuple[MergeMeasures, tuple[float | None, ...]]:
    """Return the measures of a merge, and the cosine of each delta with the weighted
    sum of the others, in their order; none if there are fewer than `FEWEST_DIRECTIONS`.

    Args:
      deltas, merged: by piece.
      weights: of the deltas.
      samples: `sample` of the merged delta, by piece.
      last: that of the fragment's previous merge; empty if unknown.
      steps: `sample` of the outer step.
    """
    shares = np.array(weights) / math.fsum(weights)
    squares, products = np.zeros(len(shares)), np.zeros((len(shares),) * 2)
    cosines, sizes = [], []
    for of_piece, piece in zip(deltas, merged, strict=True):
        lengths, here = np.array(of_piece.squares), _products(of_piece)
        squares, products = squares + lengths, products + here
        present = np.where(lengths > 0, shares, 0.0)
        alone = float(np.square(present).sum())
        pairs = float(present.sum()) ** 2 - alone
        if pairs <= 0 or np.count_nonzero(present) < 2:
            continue
        if (square := piece.direction_square) is None:
            norms = np.sqrt(np.diag(here))
            unit = present / np.where(norms > 0, norms, math.inf)
            square = float(unit @ here @ unit)
        cosines.append((square - alone) / pairs * piece.total.size)
        sizes.append(piece.total.size)
    directions: tuple[float | None, ...] = ()
    if len(shares) >= FEWEST_DIRECTIONS:
        own, along = np.diag(products), products @ shares
        rest = shares @ products @ shares - shares * (2 * along - shares * own)
        lengths = np.sqrt(own * np.maximum(rest, 0.0))
        directions = tuple(map(_ratio, along - shares * own, lengths))
    length, before = _length(samples), _length(last)
    mean_length = float(shares @ np.sqrt(squares))
    measures = MergeMeasures(
        pairwise_cosine=_ratio(sum(cosines), sum(sizes)),
        cosine_to_last=_ratio(math.fsum(map(np.vdot, samples, last)), length * before),
        length_ratio=_ratio(norm_of(merged), mean_length),
        step_ratio=_ratio(_length(steps), length),
    )
    return measures, directions


class Routing(NamedTuple):
    """How alike the islands of a merge route, by the fragment's routers and experts."""

    measures: dict[str, float]
    """Those that exist: "router_distance", the mean distance of two islands' routers,
    weighted by both weights, over the length of the routers, if both began with the
    same; "overlap", the part of two islands' choices that is the same, weighted alike,
    "entropy" of all choices, over that of equal ones, both means over tensors; and
    "busiest", the largest load."""
    loads: dict[str, tuple[float, ...]]
    """Tokens of each expert over the mean of all, by the first of a layer's tensors."""


def measure_routing(
    pieces: Sequence[Piece],
    deltas: Sequence[Encoded],
    uses: Sequence[npt.NDArray[np.float64] | None],
    weights: Sequence[float],
    theta: Sequence[npt.NDArray[np.float32]],
) -> Routing:
    """Return the measures of a merge of these pieces.

    Args:
      deltas, theta: by piece; theta before the merge.
      uses: f64[M, rows] of pieces that weigh by use, per token; None for others.
      weights: of the deltas.
    """
    shares = np.array(weights) / math.fsum(weights)
    pairs = np.outer(shares, shares)
    np.fill_diagonal(pairs, 0.0)
    least = np.finfo(np.float64).tiny
    pairs /= max(float(pairs.sum()), least)
    several, apart, length = bool(pairs.any()), np.zeros_like(pairs), 0.0
    overlaps, entropies = [], []
    loads: dict[tuple[Any, ...], tuple[str, npt.NDArray[np.float64]]] = {}
    for piece, own, used, old in zip(pieces, deltas, uses, theta, strict=True):
        if piece.router and several:
            products = _products(own)
            squares = np.diag(products)
            apart += squares[:, None] + squares - 2 * products
            length += _length([sample(old)]) ** 2
        layer = piece.path[:-1], piece.layer, piece.band
        if not piece.expert or used is None or not used.any() or layer in loads:
            continue
        total = shares @ used
        loads[layer] = piece.name, total / total.mean()
        chosen = total[total > 0] / total.sum()
        if len(total) > 1:
            entropies.append(float(chosen @ -np.log(chosen)) / math.log(len(total)))
        odds = used / np.maximum(used.sum(axis=1, keepdims=True), least)
        if several:
            both = [np.minimum(own, odds).sum(axis=1) for own in odds]
            overlaps.append(float((pairs * np.stack(both)).sum()))
    distance = float((pairs * np.sqrt(np.maximum(apart, 0.0))).sum())
    found = {
        "router_distance": _ratio(distance, math.sqrt(length)),
        "overlap": _ratio(sum(overlaps), len(overlaps)),
        "entropy": _ratio(sum(entropies), len(entropies)),
        "busiest": max((float(load.max()) for _, load in loads.values()), default=None),
    }
    return Routing(
        {name: value for name, value in found.items() if value is not None},
        {name: tuple(load.round(3).tolist()) for name, load in loads.values()},
    )


def norm_of(merged: Sequence[MergedPiece]) -> float:
    """Return the length of a merged delta, given by piece."""
    return math.hypot(*(math.sqrt(piece.square) for piece in merged))


def _products(deltas: Encoded) -> npt.NDArray[np.float64]:
    """Return the products of all deltas with each other, over the sampled tiles."""
    stacked = np.stack([sampled(deltas, n).ravel() for n in range(len(deltas))])
    products: npt.NDArray[np.float64] = (stacked @ stacked.T).astype(np.float64)
    return products


def sample(tiles: npt.NDArray[np.float32]) -> Sample:
    """Copy what is looked at of f32[tiles, elements]."""
    return tiles[::SAMPLED, :: _every(*tiles.shape)].copy()


def sampled(deltas: Encoded, island: int) -> npt.NDArray[np.float32]:
    """Return what is looked at of a delta, f32[rows, elements]; decode those tiles
    alone."""
    every = _every(*deltas.grid.in_order)
    tiles = np.asarray(deltas.tiles(island, slice(None, None, SAMPLED)))
    return tiles[:, ::every].copy() if every > 1 else tiles


def sample_bytes(grid: TileGrid) -> int:
    """Return the bytes of what is looked at of an f32 array with these tiles."""
    tiles, elements = grid.in_order
    return (
        4 * math.ceil(tiles / SAMPLED) * math.ceil(elements / _every(tiles, elements))
    )


def _every(tiles: int, elements: int) -> int:
    """Return the distance of the elements that are looked at in a sampled tile.

    It is 1 unless the tile has more than `MOST_ELEMENTS`; then about that many are
    looked at, or 1/64 of the piece. A power of two shares no factor with odd extents.
    """
    most = min(SAMPLED // tiles, elements // MOST_ELEMENTS)
    return 1 << max(0, most.bit_length() - 1)


def _length(arrays: Sequence[Sample]) -> float:
    return math.hypot(*(float(np.linalg.norm(a.ravel())) for a in arrays))


def _ratio(value: float, of: float) -> float | None:
    ratio = float(value) / float(of) if of > 0 else math.nan
    return ratio if math.isfinite(ratio) else None


Arrays = tuple[npt.NDArray[np.float32], ...]
"""f32[tiles, elements] by piece."""
Squares = tuple[float, ...]
"""The sum of a delta's squares, by piece."""


MOST_USES = 2**62
"""More than any delta's tokens, and an integer that a message holds: codes of counts go
far beyond that."""


class Uses(NamedTuple):
    """The use of the rows of a delta's pieces, as the delta tells it."""

    most: int = 0
    """The tokens behind a piece's counts, of the piece with the most: no more than the
    delta's. At most `MOST_USES`."""
    digest: str = ""
    """Digest of all counts; empty if there are none."""


class FragmentState(NamedTuple):
    """One fragment. Its arrays are never changed in place."""

    theta: Arrays
    anchor: Arrays
    outer: Any
    """State of the outer optimizer: by piece where it goes element by element, else of
    all pieces in their own order."""
    rules: tuple[Any, ...]
    """State of the merge rule, by piece; arrays in their own order."""


class MergeResult(NamedTuple):
    """Everything that a merge computes."""

    state: FragmentState
    payload: memoryview
    """The encoded publish."""
    digest: str
    """`digest_arrays` of the new Theta."""
    norm: float
    """Length of the merged delta."""
    measures: MergeMeasures
    sample: tuple[Sample, ...]
    """Sampled tiles of the merged delta, by piece."""
    directions: tuple[float | None, ...]
    """See `measure`."""
    unused: Mapping[int, bytes] = MappingProxyType({})
    """By number of the piece a bit for each row, set if nobody used it; of pieces that
    have such rows."""
    routing: Routing = Routing({}, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class FragmentMerge:
    """Merges of one fragment."""

    pieces: tuple[Piece, ...]
    up: Codec
    down: Codec
    rule: MergeRule
    settings: OuterSettings
    empty: Empty = np.empty
    """Makes the arrays that a merge fills."""
    passes: Passes | None = None
    """The merge route "native", where codec, rule and optimizer allow it; None: "xla".
    """
    most: float = 1.0
    """Largest share of one delta in what weighs by use, if there are enough others."""

    @functools.cached_property
    def layout_up(self) -> PayloadLayout:
        """Layout of an encoded delta."""
        return PayloadLayout.of_delta(self.up, self.pieces)

    @functools.cached_property
    def layout_down(self) -> PayloadLayout:
        """Layout of an encoded publish."""
        return PayloadLayout.of(self.down, self.pieces)

    def begin(self, values: Iterable[ArrayLike]) -> FragmentState:
        """Return the first state: Theta = A = the pieces' values, f32[shape] each."""
        theta = tuple(
            np.array(p.grid.to_tiles(np.asarray(v)), np.float32, order="C")
            for p, v in zip(self.pieces, values, strict=True)
        )
        first = jax.tree.map(np.asarray, self._first(theta))
        return FragmentState(theta, theta, first.outer, first.rules)

    def like(self) -> FragmentState:
        """Return a state of `jax.ShapeDtypeStruct` without arrays."""
        like: FragmentState = jax.eval_shape(
            lambda: self._first(tuple(jnp.zeros(p.grid.in_order) for p in self.pieces))
        )
        return like

    def squares(self, payload: Buffer) -> Squares:
        """Decode a delta once, tile by tile; return the sum of its squares by piece.

        If a sum is not finite, the delta is not either (`is_fit`).
        """
        arrays = self.layout_up.unpack(payload)[: len(self.pieces)]
        return tuple(
            self._encoded(piece, [array]).squares[0]
            for piece, array in zip(self.pieces, arrays, strict=True)
        )

    def uses(self, payload: Buffer) -> Uses:
        """Return what a delta says of the use of rows."""
        per_token = [piece.by_use for piece in self.pieces if piece.by_use]
        counts = self.layout_up.unpack(payload)[len(self.pieces) :]
        if not counts:
            return Uses()
        sums = [decode_uses(own).sum() for own in counts]
        most = float(max(map(operator.truediv, sums, per_token)))
        # A use may be a part of a token: what is rounded of it is no use more.
        whole = math.ceil(round(most * (1 - 2**-50), 6))
        return Uses(min(whole, MOST_USES), digest_arrays(counts))

    def merge(
        self,
        state: FragmentState,
        payloads: Sequence[Buffer],
        squares: Sequence[Squares],
        weights: Sequence[float],
        *,
        share: float,
        final: bool,
        last: Sequence[Sample],
        tokens: Sequence[int] = (),
    ) -> MergeResult:
        """Merge encoded deltas, take the outer step and encode the publish.

        Args:
          payloads: the deltas, in the order of the sum.
          squares: `squares` of each of them.
          weights: one per delta.
          share: factor of the merged delta.
          final: the flush: weighted mean, learning rate 1, momentum untouched.
          last: `MergeResult.sample` of the merge before; empty if unknown.
          tokens: of each delta, for pieces that are weighed by use.
        """
        encoded = [self.layout_up.unpack(payload) for payload in payloads]
        deltas, merged, samples, used = [], [], [], []
        theta, anchor = self._new(state.theta), self._new(state.anchor)
        for index, piece in enumerate(self.pieces):
            own = self._encoded(
                piece,
                [arrays[index] for arrays in encoded],
                [known[index] for known in squares],
            )
            rule, kept = rule_for(piece, self.rule, final=final), state.rules[index]
            uses = self._uses(index, encoded, tokens) if piece.by_use else None
            found = merge_piece(
                rule, own, weights, share, kept, theta[index], uses, self.most
            )
            deltas.append(own)
            merged.append(found)
            used.append(uses)
            samples.append(sample(found.total) * np.float32(found.factor))
        norm, digest = norm_of(merged), xxh3_128()
        payload = self.empty((self.layout_down.total_bytes,), np.uint8).data
        if self._steps_natively(final=final):
            factors = [float(np.float32(found.factor)) for found in merged]
            made: Sequence[Step] = [Step(kind="flush", factor=f) for f in factors]
            stepped: Any = state.outer
            if not final:
                pairs = zip(state.outer, factors, strict=True)
                native = (self._native_step(*pair, norm, self.empty) for pair in pairs)
                made, stepped = zip(*native, strict=True)
        else:
            made = [Step(kind="keep")] * len(merged)
            stepped = self._step(state, merged, theta, norm, final=final)
        rules = state.rules if final else tuple(piece.state for piece in merged)
        after = FragmentState(theta, anchor, stepped, rules)
        for index, (step, found) in enumerate(zip(made, merged, strict=True)):
            self._publish(index, step, found.unused, state, after, payload, digest)
        steps = [sample(n) - sample(o) for n, o in zip(theta, state.theta, strict=True)]
        measures, directions = measure(deltas, merged, weights, samples, last, steps)
        return MergeResult(
            after,
            payload,
            named(digest),
            norm,
            measures,
            tuple(samples),
            directions,
            {
                index: np.packbits(found.unused).tobytes()
                for index, found in enumerate(merged)
                if found.unused is not None and found.unused.any()
            },
            measure_routing(self.pieces, deltas, used, weights, state.theta),
        )

    def replay(
        self,
        state: FragmentState,
        payload: Buffer,
        *,
        final: bool,
        digest: xxh3_128 | None = None,
        unused: Mapping[int, bytes] = MappingProxyType({}),
    ) -> FragmentState:
        """Apply a logged publish after a crash: Theta = A.

        `outer.advance` advances the outer optimizer's state and `recovered` the
        merge rule's. A publish of the flush advances neither. digest: goes on over the
        new Theta. unused: that of the merge; these rows' momentum rests again, and so
        does the state of the rule.
        """
        anchor, rules = self._new(state.anchor), state.rules
        rests = {
            index: np.unpackbits(
                np.frombuffer(bits, np.uint8), count=self.pieces[index].grid.shape[0]
            ).astype(np.bool_)
            for index, bits in (unused.items() if self._by_block else ())
        }
        momenta = state.outer
        # What did not move has no part in the length of the delta that is inferred.
        state = state._replace(outer=self._without(momenta, rests))
        advanced = momenta
        encoded = self.layout_down.unpack(payload)
        published = [
            e.reshape(len(a), -1) for e, a in zip(encoded, anchor, strict=True)
        ]
        if self._steps_natively(final=False) and not jax.tree.leaves(state.rules):
            advanced = self._native_replay(state, published, anchor, digest, final)
        else:
            for new, old, tiles in zip(anchor, state.anchor, published, strict=True):
                for rows in blocks(*old.shape):
                    new[rows] = apply_to_tiles(self.down, old[rows], tiles[rows])
                    if digest is not None:
                        digest.update(new[rows].data)
            if not final:
                change = tuple(map(np.subtract, anchor, state.anchor))
                advanced, rules = self._advanced(state, change, unused)
        for index, unmoved in rests.items():
            grid = self.pieces[index].grid
            _keep(unmoved, grid, momenta[index], advanced[index])
        return FragmentState(anchor, anchor, advanced, rules)

    def _without(self, momenta: Any, rests: Mapping[int, npt.NDArray[np.bool_]]) -> Any:
        """Return the outer optimizer's state with zeros in these rows of each piece."""
        found = list(momenta) if rests else momenta
        for index, rows in rests.items():
            grid = self.pieces[index].grid
            own = jax.tree.map(
                lambda a, of=grid: a.copy() if a.shape == of.in_order else a,
                momenta[index],
            )
            _keep(rows, grid, jax.tree.map(np.zeros_like, own), own)
            found[index] = own
        return tuple(found) if rests else found

    def _advanced(
        self, state: FragmentState, change: Arrays, unused: Mapping[int, bytes]
    ) -> Any:
        """Return the next states of outer optimizer and rules after a change of the
        anchor, in arrays of their own."""
        each = list(zip(self.pieces, change, strict=True))
        rules = list(state.rules)
        for index, (piece, moved) in enumerate(each):
            # A rule with a state sees whole deltas: nobody used any row, or all count.
            if jax.tree.leaves(rules[index]) and index not in unused:
                rule, own = rule_for(piece, self.rule), piece.grid.from_tiles(moved)
                rules[index] = merging.recovered(rule, rules[index], own)
        if self._by_block:
            alone = [(moved,) for moved in change]
            advanced: Any = tuple(outer.advance(self.settings, state.outer, alone))
        else:
            whole = tuple(p.grid.from_tiles(moved) for p, moved in each)
            (advanced,) = outer.advance(self.settings, [state.outer], [whole])
        return jax.tree.map(np.array, (advanced, tuple(rules)))

    def _uses(
        self, index: int, deltas: Sequence[Sequence[Any]], tokens: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """Return the uses of a piece's rows by delta, per token."""
        place = len(self.pieces) + sum(p.by_use > 0 for p in self.pieces[:index])
        counts = np.stack([decode_uses(arrays[place]) for arrays in deltas])
        counts /= np.array(tokens, np.float64)[:, None]
        return counts

    def _encoded(
        self, piece: Piece, arrays: Sequence[Any], squares: Sequence[float] = ()
    ) -> Encoded:
        return Encoded(self.up, piece.shape, arrays, squares, self.passes, piece.groups)

    @property
    def _native(self) -> Passes | None:
        """The route "native", if it has the codec of publishes."""
        known = self.passes is not None and self.passes.knows(self.down.name)
        return self.passes if known else None

    def _steps_natively(self, *, final: bool) -> bool:
        """Tell if the route "native" has the outer step."""
        known = self._by_block and outer.native_kind(self.settings) is not None
        return self._native is not None and (final or known)

    def _native_replay(
        self,
        state: FragmentState,
        published: Sequence[npt.NDArray[np.uint8]],
        anchor: Arrays,
        digest: xxh3_128 | None,
        final: bool,
    ) -> Any:
        """Apply an encoded publish into the arrays of `anchor`, by the route "native".
        Return the new state of the outer optimizer.

        Its guard depends on the length of the whole delta, which is known at the end,
        and hardly ever cuts one: only then is there a second pass.
        """

        def apply(index: int, step: Step, digest: xxh3_128 | None) -> list[float]:
            assert self.passes is not None
            return self.passes.replay(
                self.down.name,
                step,
                encoded=published[index],
                anchor=state.anchor[index],
                new_anchor=anchor[index],
                digest=digest,
            )

        pieces = range(len(anchor))
        if final:
            for index in pieces:
                apply(index, Step(kind="flush"), digest)
            return state.outer
        made = [self._native_step(kept, 1.0, 0.0, self.empty) for kept in state.outer]
        squares = [s for index in pieces for s in apply(index, made[index][0], digest)]
        if self.settings.norm_guard:
            norm = math.sqrt(math.fsum(squares))
            again: list[Any] = [step.new_trace for step, _ in made]  # The same arrays.
            made = [
                self._native_step(kept, 1.0, norm, lambda *_, n=n: again[n])
                for n, kept in enumerate(state.outer)
            ]
            for index in pieces:
                if made[index][0].guard != 1.0:
                    apply(index, made[index][0], None)
        return tuple(after for _, after in made)

    def _new(self, arrays: Arrays) -> Arrays:
        return tuple(self.empty(array.shape, np.float32) for array in arrays)

    @functools.cached_property
    def _by_block(self) -> bool:
        return outer.is_elementwise(self.settings.optimizer)

    def _first(self, theta: Any) -> FragmentState:
        tx = outer.make_outer(self.settings)
        if self._by_block:
            state: Any = tuple(tx.init((piece,)) for piece in theta)
        else:
            state = tx.init(tuple(jnp.zeros(p.shape, jnp.float32) for p in self.pieces))
        rules = tuple(
            merging.start(rule_for(p, self.rule), p.shape) for p in self.pieces
        )
        return FragmentState(theta, theta, state, rules)

    def _native_step(
        self, kept: Any, factor: float, norm: float, empty: Empty
    ) -> tuple[Step, Any]:
        return native_step(self.settings, kept, factor, np.float32(norm), empty)

    def _step(
        self,
        state: FragmentState,
        merged: Sequence[MergedPiece],
        theta: Arrays,
        norm: float,
        *,
        final: bool,
    ) -> Any:
        """Take the outer step by functions that XLA compiles, into `theta`. Return the
        new state of the outer optimizer."""
        old: Any = state.theta
        length = np.float32(norm)
        if self._by_block:
            pairs = zip(old, state.outer, merged, theta, strict=True)
            after: Any = tuple(
                outer.piece_step(
                    self.settings,
                    kept,
                    own,
                    m.total,
                    m.factor,
                    length,
                    self.empty,
                    final=final,
                    out=place,
                )
                for own, kept, m, place in pairs
            )
        else:
            deltas: Any = tuple(m.total * np.float32(m.factor) for m in merged)
            grids = [m.grid for m in merged]
            stepped, after = outer.fragment_step(
                self.settings, grids, old, state.outer, deltas, length, final=final
            )
            after = jax.tree.map(np.asarray, after)
            for place, new in zip(theta, stepped, strict=True):
                place[...] = new
        for index, found in enumerate(merged):
            _keep(found.unused, found.grid, old[index], theta[index])
            if self._by_block:
                _keep(found.unused, found.grid, state.outer[index], after[index])
        return after

    def _publish(
        self,
        index: int,
        step: Step,
        unused: npt.NDArray[np.bool_] | None,
        before: FragmentState,
        after: FragmentState,
        payload: memoryview,
        digest: xxh3_128,
    ) -> None:
        """Take a step by the route "native", "keep" if it is taken already, and encode
        the publish, into the arrays of `after` and the payload. The digest goes on over
        the new Theta."""
        theta, new_anchor = after.theta[index], after.anchor[index]
        anchor, grid = before.anchor[index], self.pieces[index].grid
        encoded = self.layout_down.unpack(payload)[index].reshape(len(theta), -1)
        if self._native is not None:
            rests = step.kind != "keep" and unused is not None
            self._native.finish(
                self.down.name,
                step,
                old=before.theta[index],
                anchor=anchor,
                theta=theta,
                new_anchor=new_anchor,
                encoded=encoded,
                unused=unused if rests else None,
                grid=grid if rests else None,
                digest=digest,
            )
            return
        for rows in blocks(*theta.shape):
            encoded[rows], new_anchor[rows] = publish_tiles(
                self.down, theta[rows], anchor[rows]
            )
            digest.update(theta[rows].data)


def _keep(
    unused: npt.NDArray[np.bool_] | None, grid: TileGrid, before: Any, after: Any
) -> None:
    """Put old values of rows that nobody used back into all f32[tiles, elements] of a
    new Theta, or of a new state of an optimizer that goes element by element."""
    if unused is None:
        return
    by_tile = grid.by_row(unused, slice(0, grid.tiles))[..., None]
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        if old.shape == grid.in_order and new is not old:
            shape = (*by_tile.shape[:-1], -1)
            np.copyto(new.reshape(shape), old.reshape(shape), where=by_tile)


def length(squares: Squares) -> float:
    """Return the length of a delta with these sums."""
    return math.sqrt(math.fsum(squares))


def is_fit(squares: Squares) -> bool:
    """Tell if a delta is finite and not absurdly long."""
    return math.fsum(squares) <= merging.MOST_SQUARES
