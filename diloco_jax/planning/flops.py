"""Floating-point operations of a step, as the program has them and as the formula says.

Counted are the matrix products of the traced program, before any compiler, those of a
loop as often as it turns: `Compiled.cost_analysis` counts a loop's body once. Attention
of the bundled model counts as the plain formula over the whole square of positions: the
TPU kernel leaves out what is masked, and in the backward pass computes scores twice
more, which about cancel. Operations on single elements are left out.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from diloco_jax.config import IslandConfig, ModelConfig, RunConfig
from diloco_jax.models.build import build
from diloco_jax.planning.products import product_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """Of one step of an island, over all its chips."""

    model: float
    """Forward and backward."""
    analytic: float | None
    """The same by the formula; None of a model of one's own, which has none."""
    executed: float
    """With what the backward pass computes again: see `IslandConfig.remat`."""


def count_flops(run: RunConfig, island: IslandConfig) -> Flops:
    """Traces forward and backward of one sequence, on the default device."""
    own = bool(run.model.factory)
    plain = dataclasses.replace(island, remat="none", loss_chunk=0)
    analytic = None if own else analytic_flops(run.model, run.sequence_length)
    return Flops(
        model=island.batch_size * _products(run, plain),
        analytic=None if analytic is None else island.batch_size * analytic,
        executed=island.batch_size * _products(run, island),
    )


def analytic_flops(model: ModelConfig, length: int) -> float:
    """Forward and backward of one sequence of that many tokens: 6 per weight of a
    matrix product and token, 12 per head element and pair of positions."""
    weights = model.vocab_size * model.d_model + model.num_layers * layer_weights(model)
    attended = model.num_layers * model.num_heads * model.head_dim
    return 6.0 * weights * length + 12.0 * attended * length**2


def layer_weights(model: ModelConfig) -> int:
    """Of the matrix products of one layer."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    return model.d_model * (heads * model.head_dim + 3 * model.mlp_dim)


def _products(run: RunConfig, island: IslandConfig) -> float:
    """Of one sequence."""
    if not run.model.factory:
        island = dataclasses.replace(island, attention="dot_product")
    model = build(run, island)
    tokens = jnp.zeros((1, run.sequence_length + 1), jnp.int32)
    differentiate = jax.value_and_grad(model.loss, has_aux=True)
    return product_flops(jax.make_jaxpr(differentiate)(model.shapes(), tokens).jaxpr)
