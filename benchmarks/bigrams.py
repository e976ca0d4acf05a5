"""The smallest model that trains: a table of the next byte by the last one.

It is cut into equal parts, so that an island compiles one program for all fragments: 64
islands have to fit into one machine.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.models.model import (
    Batch,
    Metrics,
    Model,
    Params,
    split_batch,
    weighted_loss,
)

BYTES, PARTS = 256, 8


def model(run: RunConfig, island: IslandConfig, layout: object) -> Model:
    """Return the model; its parts are f32[256, 32] each."""
    names = [f"part{number}" for number in range(PARTS)]

    def init(key: jax.Array) -> Params:
        return {name: jnp.zeros((BYTES, BYTES // PARTS)) for name in names}

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        inputs, targets, weights = split_batch(batch)
        table = jnp.concatenate([params[name] for name in names], axis=1)
        logits = jax.nn.log_softmax(table[inputs])
        losses = -jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return weighted_loss(losses, weights)

    return Model(init, loss, dict.fromkeys(names, (None, None)))
