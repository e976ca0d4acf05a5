"""Floating-point operations of a step, counted in the program and by the formula.

The count covers the matrix products and convolutions of the traced program, before any
compiler, with the body of a loop once per iteration. `cost_analysis` of jax counts a
loop's body once, and on CPU a ragged product once per group. Attention of the bundled
model counts by the plain formula over the whole square of positions: the TPU kernel
leaves out masked scores, and computes scores twice more in the backward pass, which
about cancels. That is too much for layers with a window, whose kernel leaves out more.
Elementwise operations are left out.

The formula goes by the sizes of the bundled model, of which nothing is traced; a test
holds both together.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from diloco_jax.config import IslandConfig, ModelConfig, RunConfig
from diloco_jax.data.pictures import PICTURES
from diloco_jax.models.model import abstract_batch

logger = logging.getLogger(__name__)


def analytic_flops(model: ModelConfig, length: int, pictures: int = 0) -> float:
    """Count forward and backward pass of one sequence of `length` tokens, with so many
    pictures among them.

    The formula is 6 per weight of a matrix product and token, and 12 per head element
    and pair of positions; 4 per weight that is not trained.
    """
    attended = model.num_layers * model.num_heads * model.head_dim
    per_weight = 6.0 if not model.train or "decoder" in model.train else 4.0
    own = per_weight * product_weights(model) * length + 12.0 * attended * length**2
    return own + pictures * picture_flops(model)


def picture_flops(model: ModelConfig) -> float:
    """Count forward and backward pass of one picture in tower and connector; of a tower
    that is not trained there is no backward pass."""
    vision, trained = model.vision, model.train or ("tower", "connector")
    patches, width = (vision.side // vision.patch) ** 2, vision.width
    back = "tower" in trained
    in_layers = vision.layers * (4 * width**2 + 2 * width * vision.mlp_dim)
    joined = vision.tokens_per_picture * width * vision.shuffle**2 * model.d_model
    return float(
        (6 if back else 2) * patches * in_layers
        # Nothing is before the patches, whose gradient would be used.
        + (4 if back else 2) * patches * 3 * vision.patch**2 * width
        + (12 if back else 4) * vision.layers * width * patches**2
        + (2 + 2 * ("connector" in trained) + 2 * back) * joined
    )


def sequence_flops(run: RunConfig) -> float:
    """Count by the formula what one sequence of a run takes, with room for as many
    pictures as its data has."""
    pictures = run.data.pictures if PICTURES in run.data.arrays else 0
    return analytic_flops(run.model, run.sequence_length, pictures)


def pictures_note(run: RunConfig) -> str:
    """Say that no picture of a bundled model is counted; "" if they are."""
    vision = run.model.vision
    if run.model.factory or not vision.layers or PICTURES in run.data.arrays:
        return ""
    return (
        f"model.vision takes pictures, and data.arrays = {', '.join(run.data.arrays)}: "
        f"none is counted; give --data.arrays tokens segments weights pictures "
        f"picture_count --data.pictures N (most of a row) --data.picture-tokens "
        f"{vision.tokens_per_picture} --data.picture-token {vision.token}"
    )


def least_flops(model: ModelConfig, length: int) -> float:
    """Count what no kernel leaves out of it: the products with weights, without those
    for gradients of frozen weights. Windows and masks may leave out attention.
    """
    frozen = model.lora_rank or (model.train and "decoder" not in model.train)
    per_weight = 4.0 if frozen else 6.0
    return per_weight * product_weights(model) * length


def product_weights(model: ModelConfig) -> int:
    """Weights of all matrix products that a token takes part in, those of the logits
    included: of a mixture the router and the token's own experts."""
    return model.vocab_size * model.d_model + model.num_layers * layer_weights(model)


def layer_weights(model: ModelConfig) -> int:
    """Weights of the matrix products of one layer."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    width = 3 * model.mlp_dim
    if model.experts:
        width = model.experts + 3 * model.experts_per_token * model.expert_dim
    return model.d_model * (heads * model.head_dim + width)


def product_flops(jaxpr: Any) -> float:
    """Count 2 operations for each multiplication and addition of matrix products and
    convolutions.

    The body of a scan counts once per iteration, that of a Pallas kernel once per place
    of its grid, the body of a loop of unknown length once, and of the branches of a
    condition only the most expensive one.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if count := COUNTED.get(equation.primitive.name):
            shapes = [v.aval.shape for v in (*equation.invars[:2], *equation.outvars)]
            total += 2.0 * count(equation.params, *shapes)
        inside = [product_flops(inner) for inner in _programs(equation.params)]
        if equation.primitive.name == "cond":
            total += max(inside)
        else:
            grid = getattr(equation.params.get("grid_mapping"), "grid", ())
            known = [places for places in grid if isinstance(places, int)]
            times = equation.params.get("length", 1) * math.prod(known)
            total += times * sum(inside)
    return total


Params = Mapping[str, Any]
Shape = tuple[int, ...]


def _matrix_product(params: Params, left: Shape, right: Shape, _: Shape) -> int:
    """Count a matrix product: each element on the left meets the right's free axes.

    In a ragged one, whichever axis is ragged, a row is in one group: the number of
    groups costs nothing. Their sizes are values, so rows beyond the last group count.
    """
    groups: Shape = ()
    if ragged := params.get("ragged_dot_dimension_numbers"):
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    else:
        numbers = params["dimension_numbers"]
    (_, contracted), (_, batch) = numbers
    bound = {*contracted, *batch, *groups}
    free = (size for axis, size in enumerate(right) if axis not in bound)
    return math.prod(left) * math.prod(free)


def _convolution(params: Params, image: Shape, kernel: Shape, result: Shape) -> int:
    """Count what meets an element of the image: neither padding nor the holes that
    dilation makes between elements. So each gradient counts as much as the result."""
    numbers = params["dimension_numbers"]
    sizes = [image[axis] for axis in numbers.lhs_spec[2:]]
    _, of_group, *taps = (kernel[axis] for axis in numbers.rhs_spec)
    rows, features, *places = (result[axis] for axis in numbers.out_spec)
    met: int = rows * features * of_group
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    axes = zip(sizes, taps, places, *(params[name] for name in names), strict=True)
    for size, tap, place, stride, (before, _), between, hole in axes:
        begins, offsets = stride * np.arange(place) - before, hole * np.arange(tap)
        fewer, more = sorted((begins, offsets), key=len)
        here = 0
        for at in fewer:
            own, rest = np.divmod(at + more, between)
            here += int(np.sum((rest == 0) & (own >= 0) & (own < size)))
        met *= here
    return met


COUNTED = {
    "dot_general": _matrix_product,
    "ragged_dot_general": _matrix_product,
    "conv_general_dilated": _convolution,
}
"""Counts of multiplications by the primitive's parameters and the shapes of its two
operands and result."""


def _programs(params: Params) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            program = getattr(part, "jaxpr", part)
            if hasattr(program, "eqns"):
                yield program


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
    analytic = None if own else sequence_flops(run)
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
    from diloco_jax.models.build import build

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
    # The dashboard has use for the formula alone, and none for the modules of a model.
    from diloco_jax.models.build import build

    if not run.model.factory:
        island = dataclasses.replace(island, attention="dot_product")
    model = build(run, island)
    batch = abstract_batch(model.fields(run.data.arrays), 1, run.sequence_length)
    differentiate = jax.value_and_grad(model.require_loss(), has_aux=True)
    frozen = {} if model.frozen is None else model.frozen.shapes
    made = jax.make_jaxpr(differentiate)(model.shapes(), batch, frozen)
    return product_flops(made.jaxpr)
