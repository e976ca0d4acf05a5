"""The trainer's view of a model: two functions and the names of its axes.

Any library's model fits: `init` gives a nested dict of f32 arrays, `loss` takes one
of the same structure. Shapes: `B` sequences, `T` tokens predicted of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, Any]
Axes = dict[str, Any]
Batch = jax.Array | Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


class Model(NamedTuple):
    """A model as pure functions.

    `init(key) -> params`: nested dict of f32 arrays.
    `loss(params, batch) -> (loss, metrics)`: mean cross entropy of the next token in
    nats, f32 scalar; metrics has "loss" and "tokens", the sum of the weights that the
    mean was taken over. A batch is tokens, int32 [B, T + 1], or a mapping of "tokens"
    and "weights", f32 [B, T], 0 where a prediction does not count.
    `axes`: the structure of params with a tuple of logical names for each array:
    "layers" (leading, of stacked tensors), "vocab", "embed", "heads", "kv_heads",
    "head_dim", "mlp".
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch], tuple[jax.Array, Metrics]]
    axes: Axes

    def shapes(self) -> Params:
        """Return `jax.ShapeDtypeStruct` of every parameter; compile nothing."""
        shapes: Params = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return shapes


def split_batch(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return inputs and targets, int32 [B, T], and weights, f32 [B, T]."""
    if isinstance(batch, Mapping):
        tokens, weights = batch["tokens"], batch["weights"]
    else:
        tokens = batch
        weights = jnp.ones((tokens.shape[0], tokens.shape[1] - 1), jnp.float32)
    return tokens[:, :-1], tokens[:, 1:], weights


def weighted_loss(losses: jax.Array, weights: jax.Array) -> tuple[jax.Array, Metrics]:
    """Return the weighted mean of losses, f32 [B, T]; 0 if all weights are 0."""
    tokens = jnp.sum(weights)
    loss = jnp.sum(losses * weights) / jnp.maximum(tokens, 1.0)
    return loss, {"loss": loss, "tokens": tokens}
