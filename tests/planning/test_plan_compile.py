"""Islands compiled for real slices, through `diloco plan` itself."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from config_support import load_config

from diloco_jax.config.loading import write_config_json

REPOSITORY = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: pip install -e '.[tpu]'",
    ),
]


NAMES = ("v5p", "v6e")
CUT_NAMES = ("v6e_cut",)
of_toy = pytest.mark.xdist_group("toy")
"""In one process, so that it is planned once."""


def run_plan(config, *options, timeout_s=280, **environment):
    command = [sys.executable, "-m", "diloco_jax.cli", "plan", str(config), "--json"]
    return subprocess.run(
        [*command, *options],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def plan(config, *options, timeout_s=280):
    done = run_plan(config, *options, timeout_s=timeout_s)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """With int4 deltas; and one island again, cut along two axes, with anchors in host
    memory."""
    config = load_config(REPOSITORY / "configs" / "mixed_toy.py")
    sync = dataclasses.replace(config.run.sync, codec_up="int4")
    cut = dataclasses.replace(
        config.islands["v6e"], mesh_fsdp=2, mesh_tensor=2, anchor_memory="pinned_host"
    )
    path = tmp_path_factory.mktemp("plan") / "three.json"
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, sync=sync),
        islands={**config.islands, CUT_NAMES[0]: cut},
    )
    write_config_json(config, path)
    code, found = plan(path)
    assert code == 0
    return found


def kinds_of(island):
    return {c["kind"]: c for c in island["collectives"]}


@of_toy
@pytest.mark.parametrize("name", [*NAMES, *CUT_NAMES])
def test_a_step_has_the_collectives_of_its_mesh_and_no_others(toy, name):
    island = toy["islands"][name]["compiled"]
    kinds = kinds_of(island)
    assert {"all-gather", "all-reduce"} <= set(kinds)
    # And all-reduces of which a chip keeps a part; where four chips' parts of a matrix
    # end inside the tiles of a register, they pass on what is over.
    others = {"reduce-scatter", "collective-permute"}
    assert set(kinds) <= {"all-gather", "all-reduce", *others}
    # Four chips: nothing reaches beyond the island.
    assert all(c["largest_group"] <= island["chips"] for c in kinds.values())


@of_toy
@pytest.mark.parametrize("name", NAMES)
def test_gathers_run_beside_matrix_products(toy, name):
    # With the flags of the generation and libtpu; with none, no gather does.
    gathers = kinds_of(toy["islands"][name]["compiled"])["all-gather"]
    assert gathers["overlapping_bytes"] > gathers["sent_bytes"] / 2
    # Seven matrices of each of four layers, forward and backward; both embeddings.
    assert gathers["count"] == 2 * 7 * 4 + 2


@of_toy
@pytest.mark.parametrize("name", [*NAMES, *CUT_NAMES])
def test_takes_and_adoptions_are_local(toy, name):
    exchange = toy["islands"][name]["compiled"]["exchange"]
    assert len(exchange) >= 6
    for kind in exchange:
        assert kind["aligned"]
        assert kind["collectives"] == {}


@of_toy
@pytest.mark.parametrize("name", NAMES)
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
import dataclasses
from diloco_jax.config import *
from diloco_jax.models.presets import preset
def config():
    model = dataclasses.replace(preset("tiny"), vocab_size=262_144, num_layers=1)
    # Of each chip 128 sequences of 256 tokens: 34 GB of logits at once.
    island = IslandConfig(topology="v6e:2x2", batch_size=512, mesh_fsdp=4, loss_chunk=0,
                          remat="full")
    return Config(run=RunConfig(model=model, sequence_length=256,
                                sync=SyncConfig(fragments=2)),
                  islands={"v6e": island})
"""


def test_what_is_too_large_comes_back_with_by_how_much(tmp_path):
    (tmp_path / "large.py").write_text(TOO_LARGE)
    code, found = plan(tmp_path / "large.py", timeout_s=560)
    island = found["islands"]["v6e"]["compiled"]
    assert (code, found["fits"], island["fits"]) == (2, False, False)
    assert "exceeds available HBM" in island["refusal"]
    hbm = island["hbm"]
    assert hbm["available"] == pytest.approx(31.25 * 2**30, rel=1e-3)
    assert hbm["missing"] == hbm["used"] - hbm["available"] > 1e9
    assert island["collectives"] is None
    short = f"islands.v6e lacks {hbm['missing'] / 1e9:.2f} GB of HBM per chip"
    (advice,) = found["advice"]
    assert advice["text"].startswith(short)
    changes = "".join(
        f" --{field} {value}" for field, value in advice["change"].items()
    )
    assert changes.startswith(" --islands.v6e.accumulation ")
    assert plan(tmp_path / "large.py", *changes.split(), timeout_s=560)[0] == 0


def test_a_rule_in_a_file_of_the_users_is_planned(tmp_path):
    """The example of docs/extending.md, with the step compiled for its slice."""
    text = (REPOSITORY / "docs" / "extending.md").read_text()
    rule = re.search(
        r"^`sign_consensus\.py`:.*?^```python\n(.*?)^```$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert rule
    (tmp_path / "rules.py").write_text(rule[1])
    config = load_config(REPOSITORY / "configs" / "mixed_toy.py")
    named = f"{tmp_path / 'rules.py'}:sign_consensus"
    sync = dataclasses.replace(config.run.sync, merge=named)
    islands = {"v6e": config.islands["v6e"]}
    run = dataclasses.replace(config.run, sync=sync)
    path = tmp_path / "theirs.json"
    write_config_json(dataclasses.replace(config, run=run, islands=islands), path)
    code, found = plan(path)
    assert code == 0
    assert found["islands"]["v6e"]["compiled"]["fits"]
    assert found["run"]["coordinator"]["merging"] > 0
    (tmp_path / "rules.py").write_text("")
    assert run_plan(path).returncode == 2


REFUSED = "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"


@pytest.mark.parametrize("island", NAMES)
@pytest.mark.parametrize("flag", ["--xla_no_such_flag=1", REFUSED])
def test_flags_that_are_refused_are_named_and_end_with_2(island, flag, tmp_path):
    version = tuple(map(int, metadata.version("libtpu").split(".")))
    if flag == REFUSED and version < (0, 0, 50):
        pytest.skip("libtpu 0.0.42.1 takes it; 0.0.50.1 does not")
    config = load_config(REPOSITORY / "configs" / "mixed_toy.py")
    alone = dataclasses.replace(config, islands={island: config.islands[island]})
    write_config_json(alone, tmp_path / "one.json")
    done = run_plan(tmp_path / "one.json", LIBTPU_INIT_ARGS=flag)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"LIBTPU_INIT_ARGS = '{flag} " in done.stderr
    assert f"libtpu {metadata.version('libtpu')}" in done.stderr


def test_the_compiler_has_the_slices_hosts():
    script = """
import json, sys
from diloco_jax.hardware.tpus import GENERATIONS, Slice
from diloco_jax.planning.compiling import _devices
for generation in GENERATIONS.values():
    for shape in generation.shapes[:6]:
        found = Slice(generation, shape)
        devices = _devices(found)
        assert len(devices) == found.chips, found
        assert len({d.process_index for d in devices}) == found.hosts, found
        print(found.topology)
"""
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert {"v6e:1x1", "v6e:2x4", "v5p:2x2x2"} <= set(shown.stdout.split())


HOSTS = """
import dataclasses
from diloco_jax.config import *
from diloco_jax.models.presets import preset
def config():
    model = dataclasses.replace(preset("tiny"), num_layers=1)
    island = IslandConfig(topology="v5p:2x2x2", batch_size=8, mesh_data=2, mesh_fsdp=4)
    return Config(run=RunConfig(model=model, sequence_length=256,
                                sync=SyncConfig(fragments=2)),
                  islands={"v5p": island})
"""


def test_parts_that_hosts_fetch_are_put_in_place_within_the_cycle(tmp_path):
    """Two hosts, each with a copy: each fetches a part, which all-gathers spread."""
    (tmp_path / "hosts.py").write_text(HOSTS)
    _, found = plan(tmp_path / "hosts.py")
    island = found["islands"]["v5p"]
    exchange = island["compiled"]["exchange"]
    assert any("gather" in kind["collectives"] for kind in exchange)
    seconds = sum(kind["pieces"] * kind["seconds"] for kind in exchange)
    assert island["exchange_seconds"] == pytest.approx(seconds)
    assert seconds > 0
    step = island["compiled"]["roofline"]["step_seconds"]
    share = seconds / found["run"]["cycle_seconds"]
    assert island["step_seconds"] == pytest.approx(step / (1 - share), rel=1e-3)


PACKED = """
import dataclasses, json, os, sys
from diloco_jax.config import DataConfig, IslandConfig, ModelConfig, RunConfig
from diloco_jax.planning.compiling import environment_of
island = IslandConfig(
    topology="v6e:2x2", batch_size=4, mesh_fsdp=2, mesh_tensor=2, remat="attention"
)
os.environ.update(environment_of(island))
from diloco_jax.island.device.build import build_trainer
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.planning.compiling import _devices
model = ModelConfig(
    d_model=128, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=128, mlp_dim=128,
    window=128, window_pattern=2,
)
run = RunConfig(
    model=model, sequence_length=384, data=DataConfig(arrays=("segments", "tokens"))
)
_, trainer = build_trainer(run, island, _devices(slice_of("a", island)))
print(trainer.lower(run.sequence_length).compile().as_text())
"""


def test_packed_rows_are_masked_by_the_kernel_and_by_no_square_of_positions():
    done = subprocess.run(
        [sys.executable, "-c", PACKED],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = re.findall(
        r"%(splash_mha_\w+?)_(?:residuals|no_residuals|\d|\.)", done.stdout
    )
    assert kernels
    assert all("segmented" in kernel for kernel in kernels), kernels
    assert not re.search(r"\[[\d,]*384,384\]", done.stdout)
