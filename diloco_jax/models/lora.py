"""Low-rank adapters: small products that are added to a layer's frozen matrices.

A matrix W of shape [*in, *out] becomes W + s A B, with A [*in, r] drawn, B [r, *out]
zero at the start and s = alpha / r (LoRA, arXiv 2106.09685). A and B alone are trained,
sent and merged. The sum is made in the layer, so that memory holds one layer's.

`L` layers, `r` rank.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from diloco_jax.config import ModelConfig
from diloco_jax.models.tensors import Tensor

INPUT_AXES = {
    "attention/query": 1,
    "attention/key": 1,
    "attention/value": 1,
    "attention/output": 2,
    "mlp/gate": 1,
    "mlp/up": 1,
    "mlp/down": 1,
}
"""Matrices that are adapted, with the number of their axes that are summed over."""


def scale(config: ModelConfig) -> float:
    """Return s."""
    return (config.lora_alpha or config.lora_rank) / config.lora_rank


def tensors(config: ModelConfig, layers: dict[str, Any]) -> dict[str, Any]:
    """Describe the adapters of the stacked layers' tensors, by half and name."""
    adapted: dict[str, Any] = {}
    for path, axes in INPUT_AXES.items():
        half, name = path.split("/")
        base: Tensor = layers[half][name]
        inside, outside = 1 + axes, len(base.shape)
        rank = config.lora_rank
        fan_in = math.prod(base.shape[1:inside])
        adapted.setdefault(half, {})[name] = {
            "a": Tensor(
                (*base.shape[:inside], rank),
                (*base.axes[:inside], None),
                fan_in**-0.5,
            ),
            "b": Tensor(
                (base.shape[0], rank, *base.shape[inside:outside]),
                (base.axes[0], None, *base.axes[inside:outside]),
                0.0,
            ),
        }
    return adapted


def merged(config: ModelConfig, weights: Any, adapters: Any) -> Any:
    """Return one layer's weights with its adapters added; both without axis L."""
    factor = scale(config)
    out = {
        half: dict(own) if isinstance(own, dict) else own
        for half, own in weights.items()
    }
    for half, names in adapters.items():
        for name, pair in names.items():
            out[half][name] = weights[half][name] + product(pair, factor)
    return out


def product(pair: Any, factor: float) -> jax.Array:
    """Return s A B of one layer, in the shape of its matrix."""
    a, b = pair["a"], pair["b"]
    rank = b.shape[0]
    flat = a.reshape(-1, rank) @ b.reshape(rank, -1)
    added: jax.Array = jnp.asarray(factor, flat.dtype) * flat.reshape(
        *a.shape[:-1], *b.shape[1:]
    )
    return added
