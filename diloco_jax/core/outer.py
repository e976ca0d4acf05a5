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

from diloco_jax.core.choices import OuterName

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
