"""The outer optimizer: what a merged delta does to the global parameters.

One fragment at a time, a tuple of f32 piece arrays. The merged delta plays the
gradient. With momentum mu and learning rate lr (Nesterov SGD, as in DiLoCo, arXiv
2311.08105, and Decoupled DiLoCo, arXiv 2604.21428):

    b' = mu b + d;    Theta' = Theta - lr (d + mu b')
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diloco_jax.core.choices import MergeRule, OuterName

Arrays = tuple[jax.Array, ...]
"""One f32 array per piece of a fragment."""

GUARD_AFTER_MERGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """An outer optimizer, all values resolved. Raises ValueError if they are unfit."""

    optimizer: OuterName
    learning_rate: float
    momentum: float = 0.0
    """Of "nesterov"; "sgd" ignores it."""
    warmup_merges: int = 0
    """Merges before the first one at the full learning rate; it rises in a line."""
    norm_guard: float = 0.0
    """Longest merged delta, in running means of their norms; 0 = any."""

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "nesterov"):
            raise ValueError(
                f"outer.optimizer = {self.optimizer!r}; choose 'sgd' or 'nesterov'"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"outer.momentum = {self.momentum}; choose 0 <= momentum < 1"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"outer.learning_rate = {self.learning_rate}; it must be above 0 and "
                f"finite"
            )
        if self.warmup_merges < 0 or not 0 <= self.norm_guard < math.inf:
            raise ValueError(
                f"outer.warmup_merges = {self.warmup_merges}, outer.norm_guard = "
                f"{self.norm_guard}; they must not be negative; 0 = none"
            )


class OuterPreset(NamedTuple):
    """What an `OuterConfig` that leaves them open gets."""

    optimizer: OuterName
    learning_rate: float
    momentum: float


SHORT = OuterPreset("sgd", 1.0, 0.0)
"""Runs of few merges, in which momentum was no better, or worse."""

GENTLE = OuterPreset("nesterov", 0.4, 0.6)
GENTLE_FROM_MERGES = 80.0
"""Momentum that goes as far as the islands went, 0.4 / (1 - 0.6), and no further. Over
none, 8 islands, RDA, AdamW inside (docs/results/quality.md), by merges per fragment:
81: -0.7, -2.8 and -1.7 % of the loss; 143: -2.3, -3.4, -1.4 and -3.1 %; 163: -3.2, -1.0
and -2.6 %; 326: -2.6, -1.4 and -0.8 %; with a quarter of the tokens 10 to 122: +1.6 to
-0.5 %. 0.4 / 0.9, published for one island, was behind it in three pairs of three at
326 merges (1.5, 1.6 and 0.1 %)."""
GENTLE_FROM_MERGES_OF = {"muon": 160.0}
"""With Muon inside momentum was worse in nine pairs of nine with 41 to 151 merges (+0.3
to +2.8 %), and better in three of three with 163 and more tokens (0.9, 2.1, 1.4 %)."""

PUBLISHED_MOMENTUM = 0.9
PUBLISHED_RATES = ((1, 0.4), (4, 0.6), (math.inf, 0.8))
"""Up to so many islands, of the plain mean (arXiv 2503.09799, H = 30). A mean of M
deltas, which are nearly orthogonal, is shorter than one of them; RDA is as long, and at
H = 24 and 326 merges 0.8 / 0.9 is 5.7 % worse than no momentum with it."""
PUBLISHED_FROM_MERGES = 200.0
PUBLISHED_FROM_STEPS = 24
"""Of a cycle. The shorter it is, the more alike successive deltas should be, which
momentum adds up to several times the way that the islands went: 0.7 / 0.9 is 9 % worse
than none at H = 12 and 163 merges, 72 % at H = 4 and 490."""


def preset(
    *,
    merges_per_fragment: float,
    steps_per_cycle: int,
    islands: int,
    merge: MergeRule,
    inner: str,
) -> OuterPreset:
    """The outer optimizer for a run like that. inner: the optimizer's name."""
    if merges_per_fragment < GENTLE_FROM_MERGES_OF.get(inner, GENTLE_FROM_MERGES):
        return SHORT
    if (
        merge == "rda"
        or merges_per_fragment < PUBLISHED_FROM_MERGES
        or steps_per_cycle < PUBLISHED_FROM_STEPS
    ):
        return GENTLE
    rate = next(rate for up_to, rate in PUBLISHED_RATES if islands <= up_to)
    return OuterPreset("nesterov", rate, PUBLISHED_MOMENTUM)


@functools.cache
def make_outer(settings: OuterSettings) -> optax.GradientTransformation:
    """The optax transformation; equal settings give the same object, so that jitted
    functions that take it as a static argument compile once.

    Its state is a dict: "guard" and "momentum" where there is one, and "rate".
    """
    links = [("rate", optax.scale_by_learning_rate(_learning_rate(settings)))]
    if settings.optimizer == "nesterov":
        links.insert(0, ("momentum", optax.trace(settings.momentum, nesterov=True)))
    if settings.norm_guard:
        links.insert(0, ("guard", norm_guard(settings.norm_guard)))
    chain: optax.GradientTransformation = optax.named_chain(*links)
    return chain


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def outer_step(
    tx: optax.GradientTransformation, theta: Arrays, state: Any, merged: Arrays
) -> tuple[Arrays, Any]:
    """One merge of one fragment: (Theta', state'). Theta and the state are donated.

    Args:
      tx: from `make_outer`, static.
      theta: the fragment's global parameters.
      state: `tx.init(theta)` at first.
      merged: the merged delta, shapes as in theta.
    """
    updates, state = tx.update(merged, state, theta)
    return tuple(t + u for t, u in zip(theta, updates, strict=True)), state


@functools.partial(jax.jit, donate_argnums=0)
def flush_step(theta: Arrays, mean_delta: Arrays) -> Arrays:
    """The last merge of a run: learning rate 1, no momentum. Theta is donated."""
    return tuple(t - d for t, d in zip(theta, mean_delta, strict=True))


def advance_over_publish(settings: OuterSettings, state: Any, change: Arrays) -> Any:
    """The optimizer's state after a merge of which only the published change is known.

    After a crash Theta = A for the merges since the snapshot, and their deltas are
    gone. The rule: take the published change, A_v - A_{v-1}, for the optimizer's step,
    solve that step for its delta, d = (-change / lr - mu^2 b) / (1 + mu), and advance
    momentum, merge count and norm guard by d. Exact but for what the codec and the
    downward error feedback moved between publishes.

    Args:
      settings: those the state belongs to.
      state: before the merge.
      change: A_v - A_{v-1}, one f32 array per piece.
    """
    return _advance(settings, state, change)


class GuardState(NamedTuple):
    """Of `norm_guard`: merges seen, and the mean norm of what it let through."""

    merges: jax.Array
    mean_norm: jax.Array


def norm_guard(factor: float) -> optax.GradientTransformation:
    """Shortens an update longer than factor * the mean norm of those before it.

    The norm is over the whole fragment. The first `GUARD_AFTER_MERGES` updates pass
    as they are; a shortened one enters the mean with its shortened norm.
    """

    def init(params: Any) -> GuardState:
        del params
        return GuardState(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(
        updates: Any, state: GuardState, params: Any = None
    ) -> tuple[Any, GuardState]:
        del params
        norm = optax.tree.norm(updates)
        limit = factor * state.mean_norm
        active = (state.merges >= GUARD_AFTER_MERGES) & (norm > limit)
        scale = jnp.where(active, limit / jnp.where(active, norm, 1.0), 1.0)
        merges = state.merges + 1
        mean = state.mean_norm + (norm * scale - state.mean_norm) / merges
        return jax.tree.map(lambda u: u * scale, updates), GuardState(merges, mean)

    return optax.GradientTransformation(init, update)


@functools.partial(jax.jit, static_argnums=0)
def _advance(settings: OuterSettings, state: Any, change: Arrays) -> Any:
    rate = _learning_rate(settings)(state["rate"].count)
    delta = jax.tree.map(lambda c: -c / rate, change)
    if settings.optimizer == "nesterov":
        mu, trace = settings.momentum, state["momentum"].trace
        delta = jax.tree.map(lambda d, b: (d - mu**2 * b) / (1 + mu), delta, trace)
    return make_outer(settings).update(delta, state)[1]


def _learning_rate(settings: OuterSettings) -> optax.Schedule:
    first = settings.learning_rate / (settings.warmup_merges + 1)
    return optax.linear_schedule(
        first, settings.learning_rate, max(settings.warmup_merges, 1)
    )
