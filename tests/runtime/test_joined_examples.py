"""The steps of docs/embed.md and embed_more.md are those of islands that join."""

from __future__ import annotations

import importlib
import sys

import jax
import numpy as np
import pytest
from example_support import write_files
from runtime_support import make_config, run_scripted, with_run

pytestmark = pytest.mark.dist

CYCLES = 2


@pytest.mark.parametrize("name", ["run", "run_equinox"])
def test_steps_of_the_pages_are_merged(name, text, tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("run", name):
        monkeypatch.delitem(sys.modules, module, raising=False)
    page = importlib.import_module(name)
    config = make_config(text, cycles=CYCLES)
    config = with_run(config, model=page.config().run.model).validate()
    own = dict.fromkeys(config.islands, joined_loop(page))
    like = page.parameters(jax.random.key(1))
    tape = run_scripted(config, tmp_path / "merged", own, like)
    merges = [r for r in tape if r["kind"] == "merged" and not r["final"]]
    assert len({r["digest"] for r in merges}) == len(merges) >= CYCLES * 2
    for merge in merges:
        assert [c["island"] for c in merge["contributions"]] == ["a", "b"]


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
