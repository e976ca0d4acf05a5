"""Operations as counted on the program, against those by the formula."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.models.flops import (
    analytic_flops,
    count_flops,
    layer_weights,
    product_flops,
    product_weights,
)
from diloco_jax.models.presets import preset

RUN = RunConfig(model=preset("12b"), sequence_length=4096)


def test_the_count_of_twelve_billion_is_that_of_the_formula_within_two_percent():
    flops = count_flops(RUN, IslandConfig(batch_size=64))
    assert flops.model == pytest.approx(flops.analytic, rel=0.02)
    assert flops.analytic == 64 * analytic_flops(RUN.model, 4096)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "olmoe_1b_7b"])
def test_a_token_of_a_mixture_costs_its_own_experts_alone(name):
    """Published as 3.3 B and 1.3 B active parameters; one of both embeddings is no
    product."""
    model = preset(name)
    run = dataclasses.replace(RUN, model=model)
    flops = count_flops(run, IslandConfig(batch_size=2))
    assert flops.model == pytest.approx(flops.analytic, rel=0.02)
    active = product_weights(model) + model.vocab_size * model.d_model
    billions = {"qwen3_30b_a3b": 3.35, "olmoe_1b_7b": 1.28}
    assert active == pytest.approx(billions[name] * 1e9, rel=0.005)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_recomputation_counts_the_products_of_experts(remat):
    """All of a layer's, or the scores of attention alone. The last product's result is
    needed for the gradient of the router's probabilities."""
    run = dataclasses.replace(RUN, model=preset("tiny_experts"), sequence_length=256)
    model = run.model
    flops = count_flops(run, IslandConfig(batch_size=8, remat=remat))
    square = 4 * model.num_heads * model.head_dim * 256**2
    again = {"full": 2 * layer_weights(model) * 256 + square, "dots": square}[remat]
    extra = 8 * model.num_layers * again
    assert flops.executed - flops.model == pytest.approx(extra, rel=0.05)


def test_recomputation_counts_apart():
    run = dataclasses.replace(RUN, model=preset("2m"), sequence_length=256)
    plain, full, attention = (
        count_flops(run, IslandConfig(batch_size=8, remat=remat))
        for remat in ("none", "full", "attention")
    )
    assert plain.executed == plain.model == full.model
    # The backward pass of a layer begins with its forward pass, but for the last
    # product, whose result it does not need.
    model = run.model
    again = layer_weights(model) - model.mlp_dim * model.d_model
    square = 4 * model.num_heads * model.head_dim * 256**2
    extra = 8 * model.num_layers * (2 * again * 256 + square)
    assert full.executed - full.model == pytest.approx(extra, rel=0.05)
    assert plain.executed < attention.executed < full.executed


def test_chunks_of_the_loss_are_computed_twice():
    run = dataclasses.replace(RUN, model=preset("2m"), sequence_length=256)
    chunked = count_flops(run, IslandConfig(batch_size=8, loss_chunk=64))
    extra = 2 * 8 * 256 * run.model.vocab_size * run.model.d_model
    assert chunked.executed - chunked.model == pytest.approx(extra, rel=0.1)


# ---- products of rows by groups, and convolutions ------------------------------------


def counted(function, *shapes):
    """Count a function of arrays of these shapes."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return product_flops(jax.make_jaxpr(function)(*arrays).jaxpr)


def both_gradients(function):
    """A function's gradients by both of its arguments, without its result."""

    def gradients(one, other):
        result, back = jax.vjp(function, one, other)
        return back(result)

    return gradients


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "a batch"])
def test_rows_of_experts_count_once_forward_and_backward(lead):
    """8 experts of 16 x 24, and 32 rows in unlike groups, one of them empty."""
    sizes = jnp.array([0, 1, 2, 3, 4, 5, 6, 11])

    def product(x, w):
        if not lead:
            return jax.lax.ragged_dot(x, w, sizes)
        return jax.vmap(jax.lax.ragged_dot)(x, w, jnp.tile(sizes, (*lead, 1)))

    shapes = (*lead, 32, 16), (*lead, 8, 16, 24)
    by_hand = 2 * math.prod(lead) * 32 * 16 * 24
    assert counted(product, *shapes) == by_hand
    assert counted(both_gradients(product), *shapes) == 3 * by_hand


CONVOLUTIONS = {
    "patches": ({"window_strides": (3, 3), "padding": "VALID"}, (12, 8, 3, 3)),
    "padded": ({"window_strides": (1, 1), "padding": "SAME"}, (12, 8, 3, 3)),
    "strided": ({"window_strides": (2, 3), "padding": "SAME"}, (12, 8, 4, 3)),
    "cut off": (
        {"window_strides": (1, 2), "padding": [(-2, 1), (3, -1)]},
        (12, 8, 3, 2),
    ),
    "kernel with holes": (
        {"window_strides": (2, 1), "padding": [(4, 2), (0, 0)], "rhs_dilation": (3, 2)},
        (12, 8, 3, 3),
    ),
    "image with holes": (
        {"window_strides": (1, 2), "padding": [(1, 2), (2, 3)], "lhs_dilation": (2, 3)},
        (12, 8, 3, 4),
    ),
    "groups of features": (
        {"window_strides": (2, 2), "padding": "SAME", "feature_group_count": 4},
        (12, 2, 3, 3),
    ),
    "groups of rows": (
        {"window_strides": (1, 2), "padding": [(2, 2), (1, 0)], "batch_group_count": 2},
        (12, 8, 3, 3),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_count_as_by_hand_and_as_the_compiler_says(name):
    """By hand: as many multiplications as a kernel of ones finds ones in an image."""
    settings, kernel = CONVOLUTIONS[name]
    image = (4, 8, 9, 10)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, **settings)

    by_hand = 2 * np.sum(convolve(jnp.ones(image), jnp.ones(kernel)), dtype=int)
    gradients = both_gradients(convolve)
    assert counted(convolve, image, kernel) == by_hand
    assert counted(gradients, image, kernel) == 3 * by_hand
    for function, expected in ((convolve, by_hand), (gradients, 3 * by_hand)):
        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (image, kernel)]
        analysis = jax.jit(function).lower(*arrays).cost_analysis()
        assert analysis["flops"] == expected


def test_axes_in_another_order_count_as_much():
    numbers = ("NHWC", "HWIO", "NHWC")
    found = counted(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=numbers
        ),
        (4, 9, 10, 8),
        (3, 2, 8, 12),
    )
    assert found == 2 * 4 * 12 * 8 * (4 * 3) * (5 * 2)


def test_a_kernel_counts_at_every_place_of_its_grid():
    def rows_times(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    rows = pallas.BlockSpec((8, 16), lambda at: (at, 0))
    product = pallas.pallas_call(
        rows_times,
        grid=(4,),
        in_specs=[rows, pallas.BlockSpec((16, 16), lambda at: (0, 0))],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct((32, 16), jnp.float32),
    )
    assert counted(product, (32, 16), (16, 16)) == 2 * 32 * 16 * 16
