"""Islands compiled for real slices, through `diloco plan` itself."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: pip install 'diloco-jax[tpu]'",
    ),
]


def plan(*options, config="configs/mixed_toy.py"):
    done = subprocess.run(
        [sys.executable, "-m", "diloco_jax.cli", "plan", config, "--json", *options],
        cwd=REPOSITORY,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def toy():
    code, found = plan()
    assert code == 0
    return found


@pytest.mark.parametrize("name", ["v5p", "v6e"])
def test_a_step_has_the_collectives_of_its_mesh_and_no_others(toy, name):
    island = toy["islands"][name]["compiled"]
    kinds = {c["kind"]: c for c in island["collectives"]}
    assert {"all-gather", "all-reduce"} <= set(kinds)
    # Four chips: nothing reaches beyond the island.
    assert all(c["largest_group"] <= island["chips"] for c in kinds.values())
    # With the flags that an island sets, most gathers run beside matrix products.
    gathers = kinds["all-gather"]
    assert gathers["overlapping_bytes"] > gathers["sent_bytes"] / 2
    # Seven matrices of each of four layers, forward and backward; both embeddings.
    assert gathers["count"] == 2 * 7 * 4 + 2


@pytest.mark.parametrize("name", ["v5p", "v6e"])
def test_takes_and_adoptions_are_local(toy, name):
    exchange = toy["islands"][name]["compiled"]["exchange"]
    assert len(exchange) >= 6
    for kind in exchange:
        assert kind["aligned"]
        assert kind["collectives"] == {}


@pytest.mark.parametrize("name", ["v5p", "v6e"])
def test_figures_are_those_of_shapes_and_formulas(toy, name):
    island = toy["islands"][name]["compiled"]
    flops, hbm = island["flops"], island["hbm"]
    assert flops["model"] == pytest.approx(flops["analytic"], rel=0.02)
    assert flops["executed"] > flops["model"]
    share = 4 * toy["run"]["params"] / island["chips"]
    assert hbm["parameters"] == pytest.approx(share, rel=0.02)
    assert hbm["optimizer"] == pytest.approx(2 * share, rel=0.02)
    assert hbm["anchors"] == pytest.approx(share, rel=0.02)
    assert island["fits"]
    assert 0 < hbm["temporaries"] < hbm["used"] < hbm["available"]


TOO_LARGE = """
from diloco_jax.config import *
from diloco_jax.models.presets import preset
def config():
    model = dataclasses.replace(preset("tiny"), vocab_size=262_144)
    # Of each chip 128 sequences of 256 tokens: 34 GB of logits at once.
    island = IslandConfig(topology="v6e:2x2", batch_size=512, mesh_fsdp=4, loss_chunk=0)
    return Config(run=RunConfig(model=model, sequence_length=256,
                                sync=SyncConfig(fragments=2)),
                  islands={"v6e": island})
"""


def test_what_is_too_large_comes_back_with_by_how_much(tmp_path):
    (tmp_path / "large.py").write_text(TOO_LARGE)
    code, found = plan(config=str(tmp_path / "large.py"))
    island = found["islands"]["v6e"]["compiled"]
    assert (code, found["fits"], island["fits"]) == (1, False, False)
    assert "exceeds available HBM" in island["refusal"]
    hbm = island["hbm"]
    assert hbm["available"] == int(31.25 * 2**30)
    assert hbm["missing"] == hbm["used"] - hbm["available"] > 1e9
    assert island["collectives"] is None
    short = f"islands.v6e lacks {hbm['missing'] / 1e9:.2f} GB of HBM per chip"
    assert any(
        line.startswith(short) and "accumulation = 2" in line
        for line in found["advice"]
    )
