"""The steps of docs/embed.md, in a loop that joins and in the product's own: with one
script of decisions every merge has the same bits."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import numpy as np
import pytest
from example_support import write_files
from runtime_support import make_config, run_scripted, with_run

from diloco_jax.island.device.exchange import Replica
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.models.model import named

pytestmark = pytest.mark.dist

CYCLES = 2
FACTORY = """
import jax
import jax.numpy as jnp
import {page} as page

from diloco_jax.models.model import Model, named

shapes = jax.eval_shape(page.parameters, jax.random.key(0))
structure = jax.tree.structure(shapes)
names = named(jax.tree.unflatten(structure, range(structure.num_leaves)))


def loss(params, batch):
    rows = batch["tokens"]
    numbers, leaves = jax.tree.leaves(names), jax.tree.leaves(params)
    by_number = [leaf for _, leaf in sorted(zip(numbers, leaves, strict=True))]
    loss = page.loss_of(jax.tree.unflatten(structure, by_number), rows)
    return loss, {{"loss": loss, "tokens": jnp.float32(rows[:, 1:].size)}}


def model(run, island, layout):
    axes = jax.tree.map(lambda x: ("embed", *(None,) * (x.ndim - 1)), named(shapes))
    return Model(lambda key: named(page.parameters(key)), loss, axes)
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        yield folder


@pytest.mark.parametrize("name", ["run", "run_equinox"])
def test_a_step_gives_the_same_bits_in_both_loops(
    name, pages, text, tmp_path, monkeypatch
):
    page = importlib.import_module(name)
    config = config_of(page, text, tmp_path)
    own = dict.fromkeys(config.islands, joined_loop(page))
    like = page.parameters(jax.random.key(1))
    monkeypatch.setattr(Replica, "step", step_in_replica(page, like))
    tapes = [
        run_scripted(config, tmp_path / "own"),
        run_scripted(config, tmp_path / "joined", own, like),
    ]
    own, joined = (
        [r["digest"] for r in tape if r["kind"] == "merged" and not r["final"]]
        for tape in tapes
    )
    assert own == joined
    assert len(set(own)) == len(own) >= CYCLES * 2


def config_of(page, text, folder):
    """A config whose model is the page's, with its loss."""
    factory = folder / "factory.py"
    factory.write_text(FACTORY.format(page=page.__name__))
    config = make_config(text, cycles=CYCLES)
    model = dataclasses.replace(page.config().run.model, factory=f"{factory}:model")
    return with_run(config, model=model).validate()


class PageSteps:
    """The page's steps of one island. The rows follow from its batch and the number of
    the step: which positions it is leased depends on when the others ask."""

    def __init__(self, page, batch_size, params):
        self._step = jax.jit(page.step, donate_argnums=(0, 1))
        self._moments = jax.jit(page.optimizer.init)(params)
        self._numbers = np.random.default_rng(batch_size)
        self._shape = (batch_size, page.LENGTH + 1)

    def __call__(self, params, rate):
        rows = self._numbers.integers(0, 256, self._shape).astype(np.int32)
        params, self._moments, loss = self._step(params, self._moments, rows, rate)
        return params, loss


def joined_loop(page):
    def train(island, config):
        loop = island.loop
        batch_size = config.islands[island.name].batch_size
        steps = PageSteps(page, batch_size, loop.hand_over())
        while (ending := loop.until_step()) is None:
            rate, _ = loop.begin_step()
            loop.stepped(*steps(loop.hand_over(), rate))
        return ending

    return train


def step_in_replica(page, like):
    """The page's step, in place of the one that the product's loop makes."""
    leaves, made = LikeLeaves(like), {}

    def step(self, batch, rate):
        params = leaves.as_tree(self.params)
        if self not in made:
            rows = batch["tokens"].shape[0]
            made[self] = PageSteps(page, rows, params)
        params, loss = made[self](params, rate)
        self.params = named(params)
        return {"loss": loss, "tokens": 0.0, "skipped": False}

    return step
