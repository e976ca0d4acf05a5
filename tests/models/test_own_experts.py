"""A mixture of experts of a user's own: what it costs, how it is cut, and that two
unlike islands train, merge and adopt it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from config_support import load_config

from diloco_jax import cli
from diloco_jax.config import IslandConfig
from diloco_jax.models.build import build
from diloco_jax.models.flops import count_flops, least_sequence_flops
from diloco_jax.planning.plan import fragments_of

L, E, D, F, K, T = 2, 4, 16, 24, 2, 32
"""Layers, experts in each, their sizes, experts of a token, tokens of a row."""

FILE = f"""
import jax
import jax.numpy as jnp
from diloco_jax.config import *
from diloco_jax.models.model import Model, split_batch, weighted_loss

L, E, D, F, K, T = {L}, {E}, {D}, {F}, {K}, {T}
SHAPES = {{"router": (D, E), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}}
AXES = {{
    "router": ("layers", "embed", None),
    "gate": ("layers", "expert", "embed", "mlp"),
    "up": ("layers", "expert", "embed", "mlp"),
    "down": ("layers", "expert", "mlp", "embed"),
}}

def init(key):
    keys = iter(jax.random.split(key, 6))
    draw = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)
    layers = {{name: draw(L, *shape) for name, shape in SHAPES.items()}}
    return {{"bytes": draw(256, D), "layers": layers, "out": draw(D, 256)}}

def layer(x, w):
    odds, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), K)
    order = jnp.argsort(chosen.reshape(-1))
    rows, sizes = x[order // K], jnp.bincount(chosen.reshape(-1), length=E)
    gate, up = (jax.lax.ragged_dot(rows, w[n], sizes) for n in ("gate", "up"))
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], sizes)
    back = jnp.zeros_like(out).at[order].set(out).reshape(-1, K, D)
    return x + jnp.sum(odds[..., None] * back, axis=1), None

def loss(params, batch):
    inputs, targets, weights = split_batch(batch)
    x = params["bytes"][inputs]
    y, _ = jax.lax.scan(layer, x.reshape(-1, D), params["layers"])
    logits = jax.nn.log_softmax(y.reshape(x.shape) @ params["out"])
    losses = -jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return weighted_loss(losses, weights)

def model(run, island, layout):
    axes = {{"bytes": ("vocab", "embed"), "layers": AXES, "out": ("embed", "vocab")}}
    return Model(init, loss, axes)

def config():
    run = RunConfig(
        model=ModelConfig(factory=f"{{__file__}}:model"),
        inner=InnerConfig(optimizer="muon", learning_rate=1e-2),
        sync=SyncConfig(steps_per_cycle=4, fragments=3),
        sequence_length=T,
        total_tokens=20_000,
    )
    islands = {{
        "fast": IslandConfig(batch_size=8, step_seconds=0.1),
        "slow": IslandConfig(batch_size=4, accumulation=2, step_seconds=0.3),
    }}
    return Config(run=run, islands=islands)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mixture.py"
    path.write_text(FILE)
    return path


def test_each_token_costs_its_own_experts_alone(path: Path) -> None:
    run = load_config(path).run
    of_token = L * (D * E + 3 * K * D * F) + D * 256
    flops = count_flops(run, IslandConfig(batch_size=8))
    assert flops.model == flops.executed == 8 * T * 6 * of_token
    assert least_sequence_flops(run) == T * 6 * of_token


def test_the_experts_of_a_layer_are_a_piece_that_islands_train_and_merge(
    path: Path, tmp_path: Path, capsys
) -> None:
    config = load_config(path)
    pieces = {piece.name: piece.shape for piece in fragments_of(config).pieces}
    assert pieces["layers/gate/0"] == pieces["layers/up/1"] == (E, D, F)
    text = tmp_path / "text"
    text.mkdir()
    for index in range(5):
        (text / f"{index}.txt").write_text("abcdefgh, 01234567. " * 200)
    options = ["--data.paths", str(text), "--data.validation-fraction", "0.3"]
    workdir = tmp_path / "run"
    options += ["--placement.workdir", str(workdir), "--json"]
    assert cli.main(["emulate", str(path), *options]) == 0
    out, err = capsys.readouterr()
    assert "'muon' leaves to Adam: all vectors, bytes, out (docs/models.md" in err
    summary = json.loads(out)
    islands = summary["islands"]
    assert islands["fast"]["tokens_merged"] > islands["slow"]["tokens_merged"] > 0
    merged = sum(island["tokens_merged"] for island in islands.values())
    assert merged == summary["tokens_computed"] >= 20_000
    assert summary["eval_loss"] < np.log(256) - 1.5
    assert build(config.run).axes["layers"]["up"][1] == "expert"
