"""Floating-point operations of a step, as the program has them and as the formula says.

Counted on the traced program, before any compiler: all layers are equal, so two
unrolled depths tell what one layer costs, and what the rest. Attention counts as the
plain formula over the whole square of positions: the TPU kernel leaves out what is
masked, and in the backward pass computes scores twice more, which about cancel. The
optimizer's few operations per parameter are left out.

Of a model of one's own (`model.factory`) nothing is known but its program: its products
of matrices are counted, those of a loop as often as it turns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax.config import IslandConfig, ModelConfig, RunConfig
from diloco_jax.models import transformer
from diloco_jax.models.build import build
from diloco_jax.models.loss import positions_at_a_time
from diloco_jax.models.model import Params
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


class _Depths(NamedTuple):
    """Operations of one sequence."""

    rest: float
    layer: float

    def of(self, layers: int) -> float:
        return self.rest + layers * self.layer


def count_flops(run: RunConfig, island: IslandConfig) -> Flops:
    """Traces forward and backward of two depths, on the default device."""
    if run.model.factory:
        return _count_own(run, island)
    model, length = run.model, run.sequence_length
    plain = _count(run, remat="none", loss_chunk=0)
    chunk = island.loss_chunk
    if chunk is None:
        chunk = positions_at_a_time(model.vocab_size)
    # Of chunks, which are a loop, the first is counted: it has to be about all.
    chunk = length - 1 if 0 < chunk < length else 0
    again = plain
    if chunk or island.remat != "none":
        again = _count(run, remat=island.remat, loss_chunk=chunk)
    return Flops(
        model=island.batch_size * plain.of(model.num_layers),
        analytic=island.batch_size * analytic_flops(model, length),
        executed=island.batch_size * again.of(model.num_layers),
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


def _count_own(run: RunConfig, island: IslandConfig) -> Flops:
    plain = _products(run, dataclasses.replace(island, remat="none"))
    executed = plain if island.remat == "none" else _products(run, island)
    return Flops(
        model=island.batch_size * plain,
        analytic=None,
        executed=island.batch_size * executed,
    )


def _products(run: RunConfig, island: IslandConfig) -> float:
    """Of one sequence."""
    model = build(run, island)
    tokens = jnp.zeros((1, run.sequence_length + 1), jnp.int32)
    differentiate = jax.value_and_grad(model.loss, has_aux=True)
    return product_flops(jax.make_jaxpr(differentiate)(model.shapes(), tokens).jaxpr)


def _count(run: RunConfig, *, remat: str, loss_chunk: int) -> _Depths:
    shallow, deep = (
        _flops(
            dataclasses.replace(run.model, num_layers=layers),
            run.sequence_length,
            remat,
            loss_chunk,
        )
        for layers in (1, 2)
    )
    return _Depths(rest=2 * shallow - deep, layer=deep - shallow)


def _flops(model: ModelConfig, length: int, remat: str, loss_chunk: int) -> float:
    built = transformer.build(
        model,
        compute_dtype="bfloat16",
        remat=remat,
        attention="dot_product",
        loss_chunk=loss_chunk,
        unroll=True,
    )

    def differentiate(params: Params) -> Any:
        tokens = jnp.zeros((1, length + 1), jnp.int32)
        return jax.value_and_grad(built.loss, has_aux=True)(params, tokens)

    analysis = jax.jit(differentiate).lower(built.shapes()).cost_analysis()
    assert analysis, "the default device's compiler has a cost model"
    return float(analysis["flops"])
