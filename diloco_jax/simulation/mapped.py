"""Arrays of all seeds and islands of a laboratory, and the programs that change them.

An island's programs and the merge are those of `island/device/` and `core/`, mapped
over two more axes: `S` seeds, `M` islands. Pieces of the coordinator lie in the order
of their tiles: `n` tiles with `e` elements. Programs work on one device.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.coordinator.holding.store import merges_of, params_of, weights_by
from diloco_jax.core.changes import halved_squares, publish_fragment
from diloco_jax.core.codecs import Codec, decode_piece
from diloco_jax.core.families import MergeRule
from diloco_jax.core.fragment_merge import FragmentState, is_fit, length
from diloco_jax.core.fragments import FragmentPlan, Params, get_piece
from diloco_jax.core.merging import MEAN, merge_stacked, rule_for
from diloco_jax.core.outer import fragment_step
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.device.exchange import ByPiece, Exchange
from diloco_jax.island.device.programs import PiecePrograms
from diloco_jax.island.device.step import Trainer
from diloco_jax.protocol.holding import Merge
from diloco_jax.simulation.bodies import NOTED

HELD = ("anchor", "base", "residual", "before")
"""What an exchange holds of each piece."""


def over_runs(function: Any, islands: Any = 0, seeds: Any = 0) -> Any:
    """Map a function over [S, M]. islands, seeds: `in_axes` of each."""
    return jax.vmap(jax.vmap(function, in_axes=islands), in_axes=seeds)


class MappedExchange(Exchange):
    """Takes and adoptions of all islands and seeds."""

    def begin(self, anchors: Sequence[Any], shape: tuple[int, int]) -> None:
        """Begin at these anchors, by fragment and piece, f32[S, n, e]. shape: (S,
        M)."""
        for pieces, states, values in zip(
            self._plan.fragments, self._states, anchors, strict=True
        ):
            own = [
                jax.vmap(piece.grid.from_tiles)(value)
                for piece, value in zip(pieces, values, strict=True)
            ]
            for state in states:
                some = state.of(own)
                value = some[0] if state.programs.rows == 1 else jnp.stack(some, 1)
                every = (*shape, *value.shape[1:])
                state.anchor = jnp.array(jnp.broadcast_to(value[:, None], every))
                if state.residual is not None:
                    state.residual = jnp.zeros(every, value.dtype)
                programs: Any = _programs(state.programs)
                state.programs = programs

    def arrays(self) -> list[list[Any]]:
        """Return what is held of each piece, `HELD`; None where there is none."""
        return [[getattr(state, name) for name in HELD] for state in self._all()]

    def restore(self, arrays: Sequence[Sequence[Any]]) -> None:
        """Go on with what `arrays` returned."""
        for state, held in zip(self._all(), arrays, strict=True):
            for name, value in zip(HELD, held, strict=True):
                setattr(state, name, None if value is None else placed(value))


class MappedPrograms:
    """`PiecePrograms` of all islands and seeds; a publish is that of a seed."""

    def __init__(self, own: PiecePrograms) -> None:
        self.rows = own.rows
        kept = (0,) if own.rows == 1 else ()

        def mapped(name: str, *islands: Any, seeds: Any = None, donates: bool) -> Any:
            function = over_runs(getattr(own, name), islands, seeds or islands)
            return jax.jit(function, donate_argnums=kept if donates else ())

        self.take = mapped("take", 0, None, 0, 0, donates=False)
        self.arrive = mapped(
            "arrive",
            *(0, None, 0, 0, None, None),
            seeds=(0, None, 0, 0, 0, None),
            donates=True,
        )
        self.advance = mapped("advance", 0, None, seeds=(0, 0), donates=False)
        self.move = mapped("move", 0, 0, 0, donates=False)
        self.put = mapped("put", 0, None, 0, donates=True)

    def gathered(self, landed: Any) -> Any:
        """Return a publish, which is where it is needed."""
        return landed


_programs = functools.lru_cache(maxsize=256)(MappedPrograms)


@functools.lru_cache(maxsize=32)
def compiled_steps(trainer: Trainer) -> Any:
    """Compile steps of all islands and seeds, one after the other."""

    def steps(state: Any, batches: Any, rates: Any, frozen: Any) -> Any:
        update = over_runs(trainer.update, (0, 0, 0, None), (0, 0, None, None))

        def step(state: Any, given: Any) -> Any:
            state, metrics = update(state, *given, frozen)
            return state, jnp.stack([metrics[name] for name in NOTED])

        return jax.lax.scan(step, state, (batches, rates))

    return jax.jit(steps, donate_argnums=0)


class Taken(NamedTuple):
    """Deltas of a take, by piece."""

    deltas: list[jax.Array]
    """f32[S, M, n, e]."""
    squares: list[Any]
    """`_halved` of them: nobody waits for them before the merge."""


class MappedMerges:
    """The coordinator's fragments, of all seeds."""

    def __init__(
        self,
        run: RunConfig,
        plan: FragmentPlan,
        islands: Sequence[str],
        seeds: Sequence[int],
        firsts: Sequence[Params],
    ) -> None:
        """islands: their names, sorted. firsts: first parameters of each seed."""
        self._plan, self._merges = plan, merges_of(run, plan)
        self._weights, self._bound = weights_by(run.sync), run.sync.delta_bound
        self._names, self._seeds = islands, seeds
        begun = [
            [
                merge.begin([get_piece(own, p) for p in merge.pieces])
                for merge in self._merges
            ]
            for own in firsts
        ]
        self.fragments: list[FragmentState] = jax.tree.map(
            lambda *each: jnp.asarray(np.stack(each)), *begun
        )
        """Arrays with a leading axis S."""
        self.taken: dict[int, Taken] = {}
        """Last take, by fragment."""
        self.published: dict[int, dict[int, ByPiece]] = {
            fragment: {} for fragment in range(len(plan.fragments))
        }
        """Publishes that are not adopted, by fragment and version."""
        self.norms: list[list[float]] = []
        """Lengths of merged deltas by merge and seed."""

    def receive(self, fragment: int, encoded: Sequence[jax.Array]) -> None:
        """Take in the deltas of all islands, by piece."""
        merge = self._merges[fragment]
        deltas = [
            _decoded(merge.up, piece.grid, octets)
            for piece, octets in zip(merge.pieces, encoded, strict=True)
        ]
        self.taken[fragment] = Taken(deltas, list(map(_halved, deltas)))

    def fetch(self, fragment: int, version: int) -> tuple[ByPiece, ...]:
        """Return the publishes up to a version, oldest first; once."""
        waiting = self.published[fragment]
        return tuple(waiting.pop(v) for v in sorted(waiting) if v <= version)

    def params(self, seed: int) -> Params:
        """Return Theta of a seed, by its index."""
        thetas = [
            tuple(np.asarray(piece[seed]) for piece in state.theta)
            for state in self.fragments
        ]
        return params_of(self._plan, thetas)

    def merge(self, order: Merge) -> None:
        """Sum the deltas as the rule has it, take the outer step and publish."""
        fragment, merge = order.fragment, self._merges[order.fragment]
        before, seeds = self.fragments[fragment], range(len(self._seeds))
        weights = self._weights(order.contributions, order.final)
        shares = [weight / math.fsum(weights) for weight in weights]
        of = [rule_for(piece, merge.rule, final=order.final) for piece in merge.pieces]
        squares = self._squares(fragment)
        totals, rules = [], []
        for index, rule in enumerate(of):
            numbers = [
                rule.factors(shares, own[index]) if rule.needs == "sum" else shares
                for own in squares
            ]
            kept = before.rules[index]
            total, after = self._total(order, index, rule, numbers, kept)
            totals.append(total)
            rules.append(kept if order.final else after)
        found = list(map(_halved, totals))
        factors = np.ones((len(of), len(seeds)), np.float32)
        lengths = np.zeros(factors.shape)
        for index, rule in enumerate(of):
            for seed, square in enumerate(_sums(found[index], (len(seeds),)).tolist()):
                factor = 1.0  # Other rules have counted the share themselves.
                if rule.needs == "sum":
                    factor = order.share
                    scale = rule.scale(shares, squares[seed][index], square)
                    if scale is None:
                        rows = [shares] * len(seeds)
                        mean, _ = self._total(order, index, MEAN, rows, ())
                        totals[index] = totals[index].at[seed].set(mean[seed])
                        square = float(_sums(_halved(mean[seed]), ()))
                    else:
                        factor *= scale
                factors[index, seed] = factor
                lengths[index, seed] = abs(factor) * math.sqrt(square)
        norms = [math.hypot(*own) for own in lengths.T]
        theta, anchor, outer, encoded = _finished(
            (merge.settings, merge.down, tuple(p.grid for p in merge.pieces)),
            order.final,
            (before.theta, before.anchor, before.outer, tuple(totals)),
            tuple(factors),
            np.array(norms, np.float32),
        )
        self.fragments[fragment] = FragmentState(theta, anchor, outer, tuple(rules))
        self.published[fragment][order.version.number] = encoded
        self.norms.append(norms)

    def _total(
        self, order: Merge, index: int, rule: Any, numbers: Any, state: Any
    ) -> tuple[jax.Array, Any]:
        """Return `merge_stacked` of a piece, by seed."""
        deltas = self.taken[order.fragment].deltas[index]
        grid = self._merges[order.fragment].pieces[index].grid
        given = np.array(numbers, np.float32), np.float32(order.share)
        found: tuple[jax.Array, Any] = _total(rule, grid, deltas, *given, state)
        return found

    def _squares(self, fragment: int) -> list[list[list[float]]]:
        """Return |d|^2 by seed, piece and island; ConfigError if a run might refuse a
        delta."""
        shape = (len(self._seeds), len(self._names))
        halved = self.taken[fragment].squares
        by_piece = [_sums(own, shape).tolist() for own in halved]
        by_seed = [[own[index] for own in by_piece] for index in range(shape[0])]
        for seed, own in zip(self._seeds, by_seed, strict=True):
            islands = list(zip(*own, strict=True))
            lengths = [length(squares) for squares in islands]
            for name, squares, here in zip(self._names, islands, lengths, strict=True):
                usual = statistics.median_high(lengths)
                most = self._bound * usual or math.inf
                if not is_fit(squares) or here > most:
                    raise ConfigError(
                        f"seed {seed}: a delta of islands.{name} for fragment "
                        f"{fragment} has length {here:g}, the median is {usual:g} and "
                        f"sync.delta_bound {self._bound:g}, so a run may "
                        f"refuse it; lower inner.learning_rate, or use emulate"
                    )
        return by_seed

    # ---- to be kept -----------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all arrays that change; of the fragments their leaves, since a rule's
        state may be of a kind of its own."""
        return {
            "fragments": jax.tree.leaves(self.fragments),
            "taken": self.taken,
            "published": self.published,
            "norms": np.array(self.norms),
        }

    def restore(self, found: dict[str, Any]) -> None:
        """Go on with what `state` returned: sequences may be lists, and keys texts.
        Sums of squares stay in f64 on the host."""
        self.norms = found["norms"].tolist()
        self.fragments = placed(found["fragments"], self.fragments)
        self.published = {
            int(f): {int(v): tuple(map(placed, own)) for v, own in versions.items()}
            for f, versions in found["published"].items()
        }
        self.taken = {
            int(f): Taken(placed(deltas), squares)
            for f, (deltas, squares) in found["taken"].items()
        }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decoded(codec: Codec, grid: TileGrid, encoded: jax.Array) -> jax.Array:
    found: jax.Array = over_runs(functools.partial(decode_piece, codec, grid))(encoded)
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _total(
    rule: MergeRule, grid: TileGrid, deltas: Any, numbers: Any, share: Any, state: Any
) -> Any:
    total = functools.partial(merge_stacked, rule, grid)
    return jax.vmap(total, in_axes=(0, 0, None, 0))(deltas, numbers, share, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _finished(kind: Any, final: bool, arrays: Any, factors: Any, norms: Any) -> Any:
    """Return Theta, anchor, state of the outer optimizer and publish."""
    settings, codec, grids = kind

    def finish(arrays: Any, factors: Any, norm: Any) -> Any:
        theta, anchor, state, totals = arrays
        merged = tuple(x * f for x, f in zip(totals, factors, strict=True))
        theta, state = fragment_step(
            settings, grids, theta, state, merged, norm, final=final
        )
        encoded, anchor = publish_fragment(codec, grids, theta, anchor)
        return theta, anchor, state, encoded

    return jax.vmap(finish)(arrays, factors, norms)


def _halved(arrays: jax.Array) -> jax.Array:
    """Return the squares of [..., n, e], added up as far as a device does it, in
    f64."""
    *shape, tiles, elements = arrays.shape
    with jax.enable_x64(True):
        found: jax.Array = halved_squares(arrays.reshape(-1, elements))
        return found.reshape(*shape, tiles, -1)


def _sums(halved: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return the sums of squares, f64[shape], of `_halved`."""
    tiles = np.asarray(halved).sum(axis=-1).reshape(math.prod(shape), -1)
    return np.array([math.fsum(row) for row in tiles]).reshape(shape)


def placed(tree: Any, like: Any = None) -> Any:
    """Return copies of host arrays on the device; with the structure of `like`, if it
    is given."""
    if like is not None:
        tree = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
