"""Deltas of several islands become one, piece by piece.

`mean` is the weighted mean. `rda`, radial-directional averaging (Decoupled DiLoCo,
arXiv 2604.21428), averages lengths and directions apart:

    RDA = (sum w |d| / sum w) * unit(sum w unit(d)),    unit(0) = 0

Deltas of different islands are close to orthogonal, so a mean of M of them shrinks
like 1 / sqrt(M); RDA keeps the length. Both are sums over the islands, taken in the
order given: callers sort by island name, and arrival order does not matter.

Deviations from the paper: RDA is per piece (the paper does not say), and where the
directions cancel, the result is the weighted mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax.core.choices import MergeRule, Weighting
from diloco_jax.core.fragments import Piece
from diloco_jax.core.tiles import ArrayLike

MOST_SQUARES = 1e36
"""Sum of a delta's squares: what is computed of it in f32 is far from overflowing."""
CANCELLED = 1e-5
"""A sum of unit vectors shorter than this share of its weights is rounding error."""


def merge_deltas(
    deltas: Sequence[ArrayLike],
    weights: Sequence[float],
    rule: MergeRule,
    share: float = 1.0,
) -> jax.Array:
    """The merged delta of one piece. Waits for the result under `rda`.

    Args:
      deltas: f32[shape] each, by island in the order of the sum.
      weights: one per delta, finite and >= 0; only their ratios matter.
      rule: see `rule_for`.
      share: of the islands' work that these deltas hold, above 0 and at most 1.

    Returns:
      f32[shape]: `share` times the mean or RDA.

    Raises:
      ValueError: no deltas, not one weight per delta, weights that are negative or
        not finite or all zero, an unknown rule, a share out of bounds.
    """
    total = math.fsum(weights)
    if len(deltas) != len(weights) or not deltas:
        raise ValueError(
            f"{len(deltas)} deltas and {len(weights)} weights; give one weight per "
            f"delta, and at least one delta"
        )
    if not (all(w >= 0 for w in weights) and 0 < total < math.inf):
        raise ValueError(
            f"weights {list(weights)} must be finite, not negative and not all zero"
        )
    if rule not in ("rda", "mean"):
        raise ValueError(f"no merge rule {rule!r}; choose 'rda' or 'mean'")
    if not 0 < share <= 1:
        raise ValueError(f"share = {share}; it must be above 0 and at most 1")
    state = init(deltas[0])
    for delta, w in zip(deltas, weights, strict=True):
        state = add(state, delta, w / total, rule)
    merged: jax.Array
    merged, cancelled = finish(state, rule, share)
    if rule == "rda" and bool(cancelled):
        return merge_deltas(deltas, weights, "mean", share)
    return merged


def weight(weighting: Weighting, tokens: int, steps: int) -> float:
    """Weight of a delta that holds so many tokens and inner steps; 0 if it is empty.

    "tokens_times_rate" is the paper's: tokens * (tokens / steps), quantity times
    quality.

    Raises:
      ValueError: unknown weighting.
    """
    if weighting not in ("tokens", "tokens_times_rate", "uniform"):
        raise ValueError(
            f"no weighting {weighting!r}; choose 'tokens', 'tokens_times_rate' or "
            f"'uniform'"
        )
    if steps <= 0 or tokens <= 0:
        return 0.0
    if weighting == "uniform":
        return 1.0
    return float(tokens) if weighting == "tokens" else tokens * (tokens / steps)


def rule_for(piece: Piece, rule: MergeRule) -> MergeRule:
    """The rule that this piece is merged by: always "mean" for embeddings."""
    return "mean" if piece.embedding else rule


class MergeState(NamedTuple):
    """Sums over the deltas so far; memory does not grow with the islands."""

    total: jax.Array
    """f32[shape]: sum w d (mean) or sum w unit(d) (rda)."""
    weighted_norm: jax.Array
    """f32: sum w |d|."""
    weight: jax.Array
    """f32: sum w."""
    directed_weight: jax.Array
    """f32: sum w over the deltas that have a direction."""


def init(like: ArrayLike) -> MergeState:
    """Nothing merged yet; `like` has the piece's shape."""
    nothing: MergeState = _nothing(like.shape)
    return nothing


@functools.partial(jax.jit, static_argnums=0)
def _nothing(shape: tuple[int, ...]) -> MergeState:
    zero = jnp.zeros((), jnp.float32)
    return MergeState(jnp.zeros(shape, jnp.float32), zero, zero, zero)


@functools.partial(jax.jit, static_argnames="rule", donate_argnums=0)
def add(
    state: MergeState, delta: jax.Array, weight: jax.Array | float, rule: MergeRule
) -> MergeState:
    """Takes one delta in; the state is donated, the delta is not."""
    # jnp.sum adds pairwise: 50 M elements are right to 1e-7, where a dot product of
    # that length is off by 1e-3 in some libraries.
    norm = jnp.sqrt(jnp.sum(jnp.square(delta)))
    directed = norm > 0
    share = jnp.where(directed, weight / jnp.where(directed, norm, 1.0), 0.0)
    return MergeState(
        state.total + (share if rule == "rda" else weight) * delta,
        state.weighted_norm + weight * norm,
        state.weight + weight,
        state.directed_weight + jnp.where(directed, weight, 0.0),
    )


@functools.partial(jax.jit, static_argnames="rule")
def finish(
    state: MergeState, rule: MergeRule, share: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """(`share` times merged f32[shape], bool: there was no direction to give it).

    Under `rda` the latter means that the deltas cancel or are zero, and that the
    merged value is of no use; under `mean` it is always False.
    """
    if rule == "mean":
        return state.total / state.weight * share, jnp.asarray(False)
    length = jnp.sqrt(jnp.sum(jnp.square(state.total)))
    cancelled = length <= CANCELLED * state.directed_weight
    wanted = share * state.weighted_norm / state.weight
    factor = wanted / jnp.where(cancelled, 1.0, length)
    return state.total * factor, cancelled
