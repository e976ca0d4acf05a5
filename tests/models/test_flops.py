"""Operations as counted on the program, against those by the formula."""

import dataclasses

import pytest

from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.models.flops import analytic_flops, count_flops, layer_weights
from diloco_jax.models.presets import preset

RUN = RunConfig(model=preset("12b"), sequence_length=4096)


def test_the_count_of_twelve_billion_is_that_of_the_formula_within_two_percent():
    flops = count_flops(RUN, IslandConfig(batch_size=64))
    assert flops.model == pytest.approx(flops.analytic, rel=0.02)
    assert flops.analytic == 64 * analytic_flops(RUN.model, 4096)


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
