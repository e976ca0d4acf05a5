"""A model of like square matrices that nobody trains, for coordinators under load.

`model.num_layers` says how many matrices there are, `model.d_model` their side.
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


def model(run: RunConfig, island: IslandConfig, layout: object) -> Model:
    """Return the model: f32[side, side] each, zero at first."""
    side = run.model.d_model
    names = [f"matrix{number:03}" for number in range(run.model.num_layers)]

    def init(key: jax.Array) -> Params:
        return {name: jnp.zeros((side, side)) for name in names}

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        _, targets, weights = split_batch(batch)
        corners = sum(params[name][0, 0] for name in names)
        return weighted_loss(corners + jnp.zeros(targets.shape), weights)

    return Model(init, loss, dict.fromkeys(names, ("embed", "mlp")))
