"""The outer step, which applies a merged delta to the global parameters; and the
package's outer optimizers.

A step takes one fragment, a tuple of f32 piece arrays. The merged delta is the gradient
of an optimizer of the family, after a guard of its length and before a learning rate.
`native_step` is the step of one piece, ready for the merge route "native".
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.core import inner
from diloco_jax.core.changes import tile_squares
from diloco_jax.core.codecs import compiled
from diloco_jax.core.families import OUTER_OPTIMIZERS, Arrays, OuterOptimizer
from diloco_jax.core.tiles import Empty, Step, StepKind, TileGrid, Values, blocks


class Sgd:
    """A step along the merged delta: Theta' = Theta - lr d."""

    elementwise = True
    native_step: StepKind = "sgd"

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """Make the optimizer; the momentum is ignored."""
        return optax.scale(-1.0)

    def delta_of(self, updates: Arrays, state: Any, momentum: float) -> Arrays:
        """Return d = -u."""
        deltas: Arrays = jax.tree.map(lambda u: -u, updates)
        return deltas


SGD = Sgd()


class Nesterov:
    """SGD with Nesterov momentum, as in DiLoCo (arXiv 2311.08105) and Decoupled DiLoCo
    (arXiv 2604.21428). With momentum mu and learning rate lr:

        b' = mu b + d;    Theta' = Theta - lr (d + mu b')
    """

    elementwise = True
    native_step: StepKind = "nesterov"

    def __call__(self, momentum: float) -> optax.GradientTransformation:
        """Make the optimizer, whose state is b."""
        trace = optax.trace(momentum, nesterov=True)
        return optax.chain(trace, optax.scale(-1.0))

    def delta_of(self, updates: Arrays, state: Any, momentum: float) -> Arrays:
        """Return d = (-u - mu^2 b) / (1 + mu)."""
        mu, trace = momentum, state[0].trace
        deltas: Arrays = jax.tree.map(
            lambda u, b: (-u - mu**2 * b) / (1 + mu), updates, trace
        )
        return deltas


NESTEROV = Nesterov()


MOMENTA = ("momentum", "b1")


def find_outer(name: str) -> OuterOptimizer:
    """Find an optimizer of optax. `outer.momentum` is its `momentum` or its `b1`; other
    arguments keep optax's defaults.

    Raises:
      ValueError: optax has none of that name that takes a learning rate.
    """
    function = inner.find_in_optax(name, OUTER_OPTIMIZERS)
    takes = inspect.signature(function).parameters

    def make(momentum: float) -> optax.GradientTransformation:
        own = {n: momentum for n in MOMENTA if n in takes}
        return function(**{inner.RATE: 1.0, **own})

    return functools.wraps(function)(make)


GUARD_AFTER_MERGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """An outer optimizer, all values resolved and within the config's bounds."""

    optimizer: str
    """Name of a member of the family."""
    learning_rate: float
    momentum: float = 0.0
    """Ignored by optimizers that have none."""
    warmup_merges: int = 0
    """Merges before the first at the full learning rate, which rises linearly."""
    norm_guard: float = 0.0
    """Longest merged delta, in running means of their norms; 0 = any."""


@functools.cache
def make_outer(settings: OuterSettings) -> optax.GradientTransformationExtraArgs:
    """Return the optax transformation. Equal settings give the same object, so jitted
    functions that take it as a static argument compile once.

    Its state is a dict: "guard" if there is one, "optimizer" and "rate". An update
    takes `norm`, the length of the fragment's merged delta, where it is given a part.
    """
    optimizer = OUTER_OPTIMIZERS.find(settings.optimizer)
    links = [("optimizer", optimizer(settings.momentum)), ("rate", _rate(settings))]
    if settings.norm_guard:
        links.insert(0, ("guard", norm_guard(settings.norm_guard)))
    chain: optax.GradientTransformationExtraArgs = optax.named_chain(*links)
    return chain


@compiled(0)
def outer_step(
    tx: optax.GradientTransformationExtraArgs,
    theta: Any,
    state: Any,
    merged: Any,
    norm: Any = None,
) -> tuple[Arrays, Any]:
    """Apply one merge of one fragment, or of a part of it where the optimizer goes
    element by element (`is_elementwise`); return (Theta', state').

    Args:
      tx: from `make_outer`, static.
      theta: the fragment's global parameters.
      state: `tx.init(theta)` at first.
      merged: the merged delta, shapes as in theta.
      norm: the length of the whole fragment's merged delta; None: of `merged`.
    """
    updates, state = tx.update(merged, state, theta, norm=norm)
    return tuple(t + u for t, u in zip(theta, updates, strict=True)), state


@compiled()
def flush_step(theta: Any, mean_delta: Any) -> Arrays:
    """Apply the last merge of a run: learning rate 1, no momentum."""
    return tuple(t - d for t, d in zip(theta, mean_delta, strict=True))


def advance(
    settings: OuterSettings, states: Sequence[Any], changes: Sequence[Any]
) -> list[Any]:
    """Return the states after a merge of which only the published change is known.

    After a crash Theta = A for the merges since the snapshot, and their deltas are
    gone. The rule: take the published change, A_v - A_{v-1}, as the optimizer's step,
    solve that step for its delta, and advance the optimizer, the merge count and the
    norm guard by it. This is exact except for the change that codec and downward error
    feedback moved between publishes. If the optimizer's step cannot be solved
    (`is_invertible`), only the merge count advances.

    Args:
      states: before the merge: one of the whole fragment, or one for each piece if the
        optimizer goes element by element.
      changes: A_v - A_{v-1} of each state's pieces, a tuple of f32 arrays; those of
        single pieces lie as f32[tiles, elements].
    """
    if not is_invertible(settings):
        rates = [state["rate"] for state in states]
        return [
            {**state, "rate": rate._replace(count=rate.count + 1)}
            for state, rate in zip(states, rates, strict=True)
        ]
    deltas = [_inferred(settings, *of) for of in zip(states, changes, strict=True)]
    norm = None
    if settings.norm_guard and is_elementwise(settings.optimizer):
        squares = (
            s for parts in deltas for delta in parts for s in tile_squares(delta)
        )
        norm = np.float32(math.sqrt(math.fsum(squares)))
    return [
        _updated(settings, state, delta, norm)
        for state, delta in zip(states, deltas, strict=True)
    ]


@compiled(0)
def _inferred(settings: OuterSettings, state: Any, change: Any) -> Arrays:
    """Return the delta that made this change."""
    invertible: Any = OUTER_OPTIMIZERS.find(settings.optimizer)
    lr = _learning_rate(settings)(state["rate"].count)
    updates = jax.tree.map(lambda c: c / lr, change)
    delta: Arrays = invertible.delta_of(updates, state["optimizer"], settings.momentum)
    return delta


@compiled(0)
def _updated(settings: OuterSettings, state: Any, delta: Any, norm: Any) -> Any:
    return make_outer(settings).update(delta, state, norm=norm)[1]


def is_elementwise(optimizer: str) -> bool:
    """Tell whether the named optimizer treats each element by itself, so that a
    fragment can be cut as one likes."""
    return bool(getattr(OUTER_OPTIMIZERS.find(optimizer), "elementwise", False))


def is_invertible(settings: OuterSettings) -> bool:
    """Tell whether the optimizer's state can be advanced by a published change."""
    return hasattr(OUTER_OPTIMIZERS.find(settings.optimizer), "delta_of")


class GuardState(NamedTuple):
    """State of `norm_guard`: merges seen, and the mean norm of its outputs."""

    merges: jax.Array
    mean_norm: jax.Array


def norm_guard(factor: float) -> optax.GradientTransformationExtraArgs:
    """Shorten an update longer than factor * the mean norm of earlier updates.

    The norm is over the whole fragment; an update of a part is given it as `norm`. The
    first `GUARD_AFTER_MERGES` updates pass unchanged; a shortened update enters the
    mean with its shortened norm.
    """

    def init(params: Any) -> GuardState:
        del params
        return GuardState(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(
        updates: Any,
        state: GuardState,
        params: Any = None,
        *,
        norm: Any = None,
        **extra: Any,
    ) -> tuple[Any, GuardState]:
        del params, extra
        norm = optax.tree.norm(updates) if norm is None else norm
        limit = factor * state.mean_norm
        active = (state.merges >= GUARD_AFTER_MERGES) & (norm > limit)
        scale = jnp.where(active, limit / jnp.where(active, norm, 1.0), 1.0)
        merges = state.merges + 1
        mean = state.mean_norm + (norm * scale - state.mean_norm) / merges
        return jax.tree.map(lambda u: u * scale, updates), GuardState(merges, mean)

    return optax.GradientTransformationExtraArgs(init, update)


def _rate(settings: OuterSettings) -> optax.GradientTransformation:
    return optax.scale_by_schedule(_learning_rate(settings))


def _learning_rate(settings: OuterSettings) -> optax.Schedule:
    first = settings.learning_rate / (settings.warmup_merges + 1)
    return optax.linear_schedule(
        first, settings.learning_rate, max(settings.warmup_merges, 1)
    )


def native_kind(settings: OuterSettings) -> StepKind | None:
    """Return the optimizer's step in C; None if it has none."""
    optimizer = OUTER_OPTIMIZERS.find(settings.optimizer)
    kind: StepKind | None = getattr(optimizer, "native_step", None)
    return kind


def native_step(
    settings: OuterSettings, state: Any, factor: float, norm: np.float32, empty: Empty
) -> tuple[Step, Any]:
    """Return the outer step of a piece by the merge route "native", and the state of
    the optimizer after it, which holds the place of the new momentum.

    Args:
      settings: the outer optimizer, which has a `native_kind`.
      state: its state for the piece, in the order of the tiles.
      factor: multiplies the sum of the deltas.
      norm: length of the whole fragment's merged delta.
      empty: makes the array of the new momentum.
    """
    kind = native_kind(settings)
    assert kind is not None
    kept, structure = jax.tree.flatten(state["optimizer"])
    scalars = {name: own for name, own in state.items() if name != "optimizer"}
    guard, rate, moved = jax.tree.map(np.asarray, _scalars(settings, scalars, norm))
    after = state.copy()
    after.update(moved)
    # The sum of momentum and a delta that the guard scaled is rounded otherwise.
    guarded = kind == "nesterov" and settings.norm_guard > 0
    trace = kept[0] if kept else None
    new_trace = None if trace is None else empty(trace.shape, np.float32)
    if kept:
        after["optimizer"] = jax.tree.unflatten(structure, [new_trace])
    step = Step(
        kind="guarded_nesterov" if guarded else kind,
        factor=factor,
        guard=float(guard),
        momentum=settings.momentum,
        rate=float(rate),
        trace=trace,
        new_trace=new_trace,
    )
    return step, after


@compiled(0)
def _scalars(settings: OuterSettings, state: Any, norm: Any) -> Any:
    """Return the factors that guard and learning rate apply to an update, and their
    next state.

    It finds the factors by passing the number one through both.
    """
    one = jnp.ones((), jnp.float32)
    rate, after = _rate(settings).update(one, state["rate"])
    found = {"rate": after}
    guard = one
    if settings.norm_guard:
        guarding = norm_guard(settings.norm_guard)
        guard, found["guard"] = guarding.update(one, state["guard"], norm=norm)
    return guard, rate, found


def piece_step(
    settings: OuterSettings,
    state: Any,
    theta: Values,
    total: Values,
    factor: float,
    norm: np.float32,
    empty: Empty,
    *,
    final: bool,
    out: Values,
) -> Any:
    """Take the outer step of a piece, a block of tiles at a time, into `out`; return
    the next state of the optimizer, which goes element by element.

    Args:
      settings: the outer optimizer.
      state: its state for the piece, in the order of the tiles.
      theta, total: f32[n, e]; the merged delta is `factor` times the total, which may
        be where the result will be.
      norm: length of the whole fragment's merged delta.
      empty: makes the arrays of the new state.
      final: the flush, which leaves the state as it is.
    """
    tx, shape, kept = make_outer(settings), theta.shape, jax.tree.leaves(state)
    made = [empty(x.shape, x.dtype) if x.shape == shape else x for x in kept]
    structure = jax.tree.structure(state)
    for rows in blocks(*shape):
        old, delta = (theta[rows],), (total[rows] * np.float32(factor),)
        if final:
            (out[rows],) = flush_step(old, delta)
            continue
        parts = [x[rows] if x.shape == shape else x for x in kept]
        here = jax.tree.unflatten(structure, parts)
        (out[rows],), after = outer_step(tx, old, here, delta, norm)
        for n, new in enumerate(jax.tree.leaves(after)):
            if made[n].shape == shape:
                made[n][rows] = new
            else:
                made[n] = np.asarray(new)
    return state if final else jax.tree.unflatten(structure, made)


def fragment_step(
    settings: OuterSettings,
    grids: Sequence[TileGrid],
    theta: Arrays,
    state: Any,
    merged: Arrays,
    norm: Any,
    *,
    final: bool,
) -> tuple[Arrays, Any]:
    """Take the outer step of a fragment; return (Theta', the optimizer's next state).

    Args:
      settings: the outer optimizer.
      grids: of the pieces.
      theta, merged: by piece, f32[n, e].
      state: as `fragment_merge.FragmentState.outer`.
      norm: length of the fragment's merged delta.
      final: the flush, which leaves the state as it is.
    """
    if final:
        return flush_step(theta, merged), state
    tx = make_outer(settings)
    if is_elementwise(settings.optimizer):
        steps = [
            outer_step(tx, (own,), kept, (delta,), norm)
            for own, kept, delta in zip(theta, state, merged, strict=True)
        ]
        return tuple(new for (new,), _ in steps), tuple(kept for _, kept in steps)
    whole, deltas = (
        tuple(grid.from_tiles(x) for grid, x in zip(grids, arrays, strict=True))
        for arrays in (theta, merged)
    )
    after, state = outer_step(tx, whole, state, deltas)
    return tuple(g.to_tiles(x) for g, x in zip(grids, after, strict=True)), state
