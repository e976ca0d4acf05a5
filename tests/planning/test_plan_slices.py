"""Programs for real slices: what is too large, what hosts fetch apart, packed rows."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
from plan_support import ROOT, needs_libtpu, plan

from diloco_jax.config import Config, IslandConfig, RunConfig, SyncConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.models.presets import preset

pytestmark = [pytest.mark.tpu_compile, needs_libtpu]


def written(folder, islands, preset_name="tiny", **model):
    """Write a config of two fragments and a model like a preset; return its path."""
    run = RunConfig(
        model=dataclasses.replace(preset(preset_name), **model),
        sequence_length=256,
        sync=SyncConfig(fragments=2),
    )
    path = folder / "config.json"
    write_config_json(Config(run=run, islands=islands), path)
    return path


def test_what_is_too_large_comes_back_with_by_how_much(tmp_path):
    """Of each chip 128 sequences of 256 tokens: 34 GB of logits at once."""
    large = IslandConfig(
        topology="v6e:2x2", batch_size=512, mesh_fsdp=4, loss_chunk=0, remat="full"
    )
    path = written(tmp_path, {"v6e": large}, vocab_size=262_144, num_layers=1)
    code, found = plan(path, timeout_s=560)
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
    assert plan(path, *changes.split(), timeout_s=560)[0] == 0


def test_the_compiler_has_the_slices_hosts():
    script = """
import json, sys
from diloco_jax.hardware.tpus import GENERATIONS, Slice
from diloco_jax.planning.compiling import _devices
for generation in GENERATIONS.values():
    for shape in generation.shapes[:6]:
        found = Slice(generation, shape)
        devices = _devices(found)
        assert len(devices) == found.devices, found
        assert found.devices == found.chips * generation.devices_per_chip, found
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
    shown = set(shown.stdout.split())
    assert {"v6e:1x1", "v5e:2x4", "v5p:2x2x2", "v4:2x2x1", "tpu7x:2x2x2"} <= shown


def test_parts_that_hosts_fetch_are_put_in_place_within_the_cycle(tmp_path):
    """Two hosts, each with a copy: each fetches a part, which all-gathers spread."""
    apart = IslandConfig(topology="v5p:2x2x2", batch_size=8, mesh_data=2, mesh_fsdp=4)
    _, found = plan(written(tmp_path, {"v5p": apart}, num_layers=1))
    island = found["islands"]["v5p"]
    exchange = island["compiled"]["exchange"]
    assert any("gather" in kind["collectives"] for kind in exchange)
    seconds = sum(kind["pieces"] * kind["seconds"] for kind in exchange)
    assert island["exchange_seconds"] == pytest.approx(seconds)
    assert seconds > 0
    step = island["compiled"]["roofline"]["step_seconds"]
    share = seconds / found["run"]["cycle_seconds"]
    assert island["step_seconds"] == pytest.approx(step / (1 - share), rel=1e-3)


WIDE = {"d_model": 256, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128}
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_dim": 128, "num_layers": 3}


def test_rows_of_experts_cross_the_slice_as_by_hand(tmp_path):
    """To the experts and back, and so their gradients; and once more where layers are
    computed again."""
    mesh = {"topology": "v6e:2x2", "batch_size": 8, "mesh_expert": 4}
    islands = {
        remat: IslandConfig(**mesh, compute_dtype="bfloat16", remat=remat)
        for remat in ("none", "full")
    }
    path = written(tmp_path, islands, "tiny_experts", **WIDE, **EXPERTS)
    _, found = plan(path, timeout_s=560)
    rows = 8 * 256 // 4 * 2
    for name, times in (("none", 4), ("full", 6)):
        island = found["islands"][name]["compiled"]
        (exchange,) = (
            c for c in island["collectives"] if c["kind"] == "ragged-all-to-all"
        )
        assert exchange["count"] == times * 3
        assert exchange["sent_bytes"] == times * 3 * rows * 256 * 2 * 3 // 4
        flops = island["flops"]
        assert flops["model"] == pytest.approx(flops["analytic"], rel=0.02)


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
        cwd=ROOT,
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


def test_the_page_lists_the_programs_with_one_key_of_jaxs_cache_on_all_hosts():
    made = [sys.executable, "-m", "benchmarks.cache_keys"]
    told = subprocess.run(
        made, cwd=ROOT, stdout=subprocess.PIPE, timeout=280, check=True
    )
    page = (ROOT / "docs" / "cloud.md").read_text()
    rows = re.findall(r"^\| `(jit_.*?)` \| (all hosts|each host) \|", page, re.M)
    listed = {name: "all" in who for names, who in rows for name in names.split("`, `")}
    assert listed == json.loads(told.stdout)
