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
import logging

import jax

from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.models.build import build
from diloco_jax.models.flops_by_formula import analytic_flops, least_flops
from diloco_jax.models.flops_of_products import product_flops
from diloco_jax.models.model import abstract_batch

logger = logging.getLogger(__name__)


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


def least_sequence_flops(run: RunConfig) -> float:
    """Count what no kernel leaves out of one sequence, of any model: its products with
    weights, which grow with its tokens. Attention grows with their square, and products
    among weights do not grow; so three lengths tell them apart.

    Return 0 if the program of a user's own model does not tell, which the log says.
    """
    if not run.model.factory:
        return least_flops(run.model, run.sequence_length)
    quarter = run.sequence_length // 4
    untold = "the FLOPs of model.factory cannot be counted: %s"
    try:
        if build(run).loss is None:
            logger.info(untold, "only the train loops that join know its loss")
            return 0.0
        one, two, four = (
            _products(dataclasses.replace(run, sequence_length=n), IslandConfig())
            for n in (quarter, 2 * quarter, 4 * quarter)
        )
    except Exception as error:  # The model's own.
        logger.warning(untold, error)
        return 0.0
    linear = 8 * (two - one) - 2 * (four - two)
    return max(0.0, min(linear, four)) * run.sequence_length / max(4 * quarter, 1)


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
