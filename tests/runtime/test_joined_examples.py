"""The steps of docs/embed.md, in a loop that joins and in the product's own: with one
script of decisions every merge has the same bits."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from example_support import TIMEOUT_S, write_files
from page_steps import FACTORY, NAME, joined_loop, step_in_replica
from runtime_support import (
    PATIENCE_S,
    coordinator,
    make_config,
    placed,
    run_scripted,
    with_run,
)

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import IslandConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.island.device.exchange import Replica
from diloco_jax.observability.tape import read_tape

pytestmark = pytest.mark.dist

CYCLES = 2
PAGE_STEPS = Path(__file__).with_name("page_steps.py")


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
    check_same(tapes)


def test_so_it_does_where_two_hosts_have_half_of_each_matrix(pages, text, tmp_path):
    config = config_of(importlib.import_module("run"), text, tmp_path)
    sync = dataclasses.replace(config.run.sync, quorum=1)
    pair = IslandConfig(batch_size=4, hosts=2, mesh_fsdp=2)
    config = with_run(dataclasses.replace(config, islands={NAME: pair}), sync=sync)
    config, tapes = placed(config, time_budget_s=PATIENCE_S).validate(), []
    write_config_json(config, path := tmp_path / "config.json")
    for how in ("own", "joined"):
        world, folder = f"127.0.0.1:{free_port()}", tmp_path / how
        with coordinator(config, folder) as service:
            common = [sys.executable, PAGE_STEPS, path, service.address]
            common += [folder / NAME, world]
            processes = [
                subprocess.Popen(
                    [*map(str, (*common, n, how, pages))],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "JAX_PLATFORMS": "cpu"},
                )
                for n in range(2)
            ]
            try:
                said = [p.communicate(timeout=TIMEOUT_S)[0] for p in processes]
                assert [p.returncode for p in processes] == [0, 0], said
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        tapes.append(list(read_tape(folder / "tape.jsonl")))
    check_same(tapes)


def config_of(page, text, folder):
    """A config whose model is the page's, with its loss."""
    factory = folder / "factory.py"
    factory.write_text(FACTORY.format(page=page.__name__))
    config = make_config(text, cycles=CYCLES)
    model = dataclasses.replace(page.config().run.model, factory=f"{factory}:model")
    return with_run(config, model=model).validate()


def check_same(tapes):
    own, joined = (
        [r["digest"] for r in tape if r["kind"] == "merged" and not r["final"]]
        for tape in tapes
    )
    assert own == joined
    assert len(set(own)) == len(own) >= CYCLES * 2
