"""Floating-point operations of a step, counted in the program and by the formula.

The count covers the matrix products of the traced program, before any compiler, with
the body of a loop once per iteration; `Compiled.cost_analysis` counts a loop's body
once. Attention of the bundled model counts by the plain formula over the whole square
of positions: the TPU kernel leaves out masked scores, and computes scores twice more in
the backward pass, which about cancels. That is too much for layers with a window, whose
kernel leaves out more. Elementwise operations are left out.
"""

from __future__ import annotations

import dataclasses

import jax

from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.models.build import build
from diloco_jax.models.model import abstract_batch
from diloco_jax.planning.formula import analytic_flops
from diloco_jax.planning.products import product_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations of one step of an island, over all its chips."""

    model: float
    """Forward and backward pass."""
    analytic: float | None
    """The same by the formula; None for a user's own model, which has no formula."""
    executed: float
    """The same, plus what the backward pass computes again: see `IslandConfig.remat`.
    """


def count_flops(run: RunConfig, island: IslandConfig) -> Flops:
    """Trace forward and backward pass of one sequence on the default device."""
    own = bool(run.model.factory)
    plain = dataclasses.replace(island, remat="none", loss_chunk=0)
    analytic = None if own else analytic_flops(run.model, run.sequence_length)
    return Flops(
        model=island.batch_size * _products(run, plain),
        analytic=None if analytic is None else island.batch_size * analytic,
        executed=island.batch_size * _products(run, island),
    )


def _products(run: RunConfig, island: IslandConfig) -> float:
    """Operations of one sequence."""
    if not run.model.factory:
        island = dataclasses.replace(island, attention="dot_product")
    model = build(run, island)
    batch = abstract_batch(model.fields(run.data.arrays), 1, run.sequence_length)
    differentiate = jax.value_and_grad(model.require_loss(), has_aux=True)
    frozen = {} if model.frozen is None else model.frozen.shapes
    made = jax.make_jaxpr(differentiate)(model.shapes(), batch, frozen)
    return product_flops(made.jaxpr)
