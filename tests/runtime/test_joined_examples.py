"""The steps of docs/embed.md, in a loop that joins and in the product's own: with one
script of decisions every merge has the same bits."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import numpy as np
import pytest
from example_support import write_files
from runtime_support import make_config, run_scripted

from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.device.replica import Replica
from diloco_jax.models.model import named

pytestmark = pytest.mark.dist

CYCLES = 2
FACTORY = """
import jax
import jax.numpy as jnp
import {page} as page

from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.models.model import Model, named, plain_axes

leaves = LikeLeaves(jax.eval_shape(page.parameters, jax.random.key(0)))


def loss(params, batch):
    rows = batch["tokens"]
    loss = page.loss_of(leaves.as_tree(params), rows)
    return loss, {{"loss": loss, "tokens": jnp.float32(rows[:, 1:].size)}}


def model(run, island, layout):
    return Model(lambda key: named(page.parameters(key)), loss, plain_axes(leaves.like))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        yield folder


class PageSteps:
    """The page's steps of one island. Its rows follow from its batch and the number of
    the step: which positions it is leased depends on when the others ask."""

    def __init__(self, page, batch_size, params):
        self._step, self._moments = jax.jit(page.step), page.optimizer.init(params)
        self._numbers = np.random.default_rng(batch_size)
        self._shape = (batch_size, page.LENGTH + 1)

    def __call__(self, params, rate):
        rows = self._numbers.integers(0, 256, self._shape).astype(np.int32)
        params, self._moments, loss = self._step(params, self._moments, rows, rate)
        return params, loss


def joined_loop(page):
    def train(island, config):
        loop = island.loop
        batch_size = config.islands[island._host.name].batch_size
        steps = PageSteps(page, batch_size, loop.hand_over())
        while (ending := loop.until_step()) is None:
            rate, _ = loop.begin_step()
            loop.stepped(*steps(loop.hand_over(), rate))
        return ending

    return train


def step_in_replica(page):
    """The page's step, in place of the one that the product's loop makes."""
    leaves, made = LikeLeaves(page.parameters(jax.random.key(0))), {}

    def step(self, batch, rate):
        params = leaves.as_tree(self.params)
        if self not in made:
            made[self] = PageSteps(page, len(batch["tokens"]), params)
        params, loss = made[self](params, rate)
        self.params = named(params)
        return {"loss": loss, "tokens": 0.0, "skipped": False}

    return step


@pytest.mark.parametrize("name", ["run", "run_equinox"])
def test_a_step_gives_the_same_bits_in_both_loops(
    name, pages, text, tmp_path, monkeypatch
):
    page, factory = importlib.import_module(name), tmp_path / "factory.py"
    factory.write_text(FACTORY.format(page=name))
    config = make_config(text, cycles=CYCLES)
    model = dataclasses.replace(page.config().run.model, factory=f"{factory}:model")
    run = dataclasses.replace(config.run, model=model)
    config = dataclasses.replace(config, run=run).validate()
    own = dict.fromkeys(config.islands, joined_loop(page))
    like = page.parameters(jax.random.key(1))
    monkeypatch.setattr(Replica, "step", step_in_replica(page))
    tapes = [
        run_scripted(config, tmp_path / "own"),
        run_scripted(config, tmp_path / "joined", own, like),
    ]
    digests = [
        [r["digest"] for r in tape if r["kind"] == "merged" and not r["final"]]
        for tape in tapes
    ]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(digests[0]) >= CYCLES * run.sync.fragments
