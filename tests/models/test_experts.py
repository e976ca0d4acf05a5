"""Mixtures of experts in the bundled model: routing, padding, gradients, adapters, and
what a dense model becomes when its MLP is copied into experts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax import emulate
from diloco_jax.before_jax import prepare_environment
from diloco_jax.config import (
    Config,
    ConfigError,
    InnerConfig,
    IslandConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models import experts, transformer
from diloco_jax.models.build import build, build_plan, inner_note
from diloco_jax.models.generation import Cache, make_decode, make_likelihood
from diloco_jax.models.presets import preset
from diloco_jax.weights import families

E, SCRIPT = 4, Path(__file__).with_name("experts_on_meshes.py")
MODEL = preset("tiny_experts")
DENSE = dataclasses.replace(preset("tiny"), mlp_dim=64)
TOKENS = np.random.default_rng(0).integers(1, 256, (2, 33)).astype(np.int32)


def upcycled(dense: dict, router: jax.Array) -> dict:
    """The dense model's parameters, its MLP copied into every expert."""
    copies = {
        name: jnp.repeat(weight[:, None], E, axis=1)
        for name, weight in dense["layers"]["mlp"].items()
    }
    layers = {**dense["layers"], "mlp": {"router": router, **copies}}
    return {**dense, "layers": layers}


def logits(model: ModelConfig, params: dict) -> np.ndarray:
    cache = Cache.empty(model, *TOKENS.shape, "float32")
    return np.asarray(make_decode(model)(params, jnp.asarray(TOKENS), cache, 0)[0])


@pytest.mark.parametrize("of_token", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_dense_model_in_equal_experts_has_its_logits_for_any_routing(of_token, seed):
    """Bit for bit where a token has one expert, whose factor is then 1."""
    params = transformer.build(DENSE).init(jax.random.key(0))
    model = dataclasses.replace(MODEL, experts_per_token=of_token)
    router = 3 * jax.random.normal(jax.random.key(seed), (2, model.d_model, E))
    dense, found = logits(DENSE, params), logits(model, upcycled(params, router))
    if of_token == 1:
        np.testing.assert_array_equal(found, dense)
    np.testing.assert_allclose(found, dense, rtol=0, atol=1e-5 * np.abs(dense).max())
    unequal = upcycled(params, router)
    unequal["layers"]["mlp"]["up"] *= jnp.arange(1.0, E + 1)[:, None, None]
    far = np.abs(logits(model, unequal) - dense).max()
    assert far > 1e-2 * np.abs(dense).max()


def of_rows(model: ModelConfig, batch: dict, params=None):
    """Loss, metrics and gradient of a batch."""
    built = transformer.build(model)
    params = built.init(jax.random.key(0)) if params is None else params
    differentiate = jax.jit(jax.value_and_grad(built.loss, has_aux=True))
    (loss, metrics), gradient = differentiate(params, batch)
    return float(loss), jax.tree.map(np.asarray, metrics), gradient


def test_an_expert_without_a_token_has_gradient_exactly_zero():
    """Three tokens reach three of four experts at most."""
    model = dataclasses.replace(MODEL, experts_per_token=1)
    _, metrics, gradient = of_rows(model, {"tokens": jnp.asarray(TOKENS[:1, :4])})
    used = metrics["expert_tokens"]
    assert used.sum(axis=1).tolist() == [3, 3]
    assert (used == 0).any(axis=1).all()
    assert (used > 0).any(axis=1).all()
    for name in ("gate", "up", "down"):
        sizes = np.abs(np.asarray(gradient["layers"]["mlp"][name])).max(axis=(2, 3))
        np.testing.assert_array_equal(sizes > 0, used > 0)


def test_padding_goes_to_no_expert_and_is_not_counted():
    """Whatever its tokens are, the batch is as one without it."""
    alone = {"tokens": TOKENS[:, :20], "segments": np.ones((2, 20), np.int32)}
    beside = np.pad(alone["segments"], ((0, 0), (0, 13)))
    loss, metrics, gradient = of_rows(MODEL, alone)
    assert metrics["expert_tokens"].sum(axis=1).tolist() == [76, 76]
    for fill in (0, 7):
        tokens = np.where(beside == 0, fill, TOKENS)
        found = of_rows(MODEL, {"tokens": tokens, "segments": beside})
        # The token before the padding is text, and predicts nothing.
        counts = found[1]["expert_tokens"] - metrics["expert_tokens"]
        assert np.asarray(counts).sum(axis=1).tolist() == [4, 4]
    rows = {"tokens": TOKENS, "segments": np.ones_like(TOKENS)}
    none = {key: np.concatenate([v, np.zeros_like(v)]) for key, v in rows.items()}
    one, two = of_rows(MODEL, rows), of_rows(MODEL, none)
    np.testing.assert_array_equal(one[1]["expert_tokens"], two[1]["expert_tokens"])
    np.testing.assert_allclose(one[0], two[0], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        one[2],
        two[2],
    )
    only = {key: np.zeros_like(value) for key, value in rows.items()}
    loss, metrics, gradient = of_rows(MODEL, only)
    assert loss == 0
    assert not metrics["expert_tokens"].any()
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("tokens", "odds", "expected"),
    [
        ([8, 8, 8, 8], [4, 4, 4, 4], 1),
        ([32, 0, 0, 0], [16, 0, 0, 0], 4),
        ([16, 16, 0, 0], [8, 4, 4, 0], 1.5),
        ([0, 0, 0, 0], [0, 0, 0, 0], 0),
    ],
)
def test_the_balance_loss_is_one_at_equal_loads(tokens, odds, expected):
    use = experts.Routed(*(jnp.array([part], jnp.float32) for part in (tokens, odds)))
    assert float(experts.balance_loss(use)) == pytest.approx(expected)


def test_the_balance_loss_is_added_once_and_moves_the_router_alone():
    batch = {"tokens": jnp.asarray(TOKENS)}
    plain = dataclasses.replace(MODEL, balance_loss=0.0)
    loss, metrics, gradient = of_rows(
        dataclasses.replace(MODEL, balance_loss=2.0), batch
    )
    total = float(metrics["loss"] + 2 * metrics["balance_loss"])
    assert loss == pytest.approx(total, rel=1e-6)
    without = of_rows(plain, batch)
    assert without[0] == float(without[1]["loss"]) == float(metrics["loss"])
    last = {n: w[-1] for n, w in gradient["layers"]["mlp"].items()}
    for name, value in without[2]["layers"]["mlp"].items():
        same = np.allclose(last[name], value[-1], rtol=1e-5, atol=1e-8)
        assert same == (name != "router"), name


def test_half_precision_routes_in_single_precision():
    built = transformer.build(MODEL, compute_dtype="bfloat16", remat="dots")
    params = built.init(jax.random.key(0))
    loss, metrics = jax.jit(built.loss)(params, {"tokens": jnp.asarray(TOKENS)})
    exact = of_rows(MODEL, {"tokens": jnp.asarray(TOKENS)})
    assert float(loss) == pytest.approx(exact[0], rel=2e-2)
    assert metrics["expert_tokens"].dtype == jnp.float32


def test_likelihoods_do_not_depend_on_the_padding_of_rows():
    params = transformer.build(MODEL).init(jax.random.key(0))
    weights = np.ones((2, 20), np.float32)
    short = make_likelihood(MODEL)(params, TOKENS[:, :20], weights)
    padded = make_likelihood(MODEL)(params, TOKENS, np.pad(weights, ((0, 0), (0, 13))))
    np.testing.assert_allclose(short.log, padded.log, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 5}, r"experts_per_token = 5, but model\.experts = 4"),
        ({"mlp_bias": True}, r"mlp_bias = True with model\.experts = 4"),
        ({"qk_norm_whole": True}, r"qk_norm_whole = True with model\.qk_norm = False"),
    ],
)
def test_switches_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        transformer.build(dataclasses.replace(MODEL, **changes))


MIXTRAL = families.write(
    dataclasses.replace(MODEL, norm_gain="scale", norm_epsilon=1e-5), 64
)


def test_a_mixture_without_norms_of_queries_leaves_as_a_mixtral():
    assert MIXTRAL["model_type"] == "mixtral"
    assert MIXTRAL["num_local_experts"] == 4
    assert MIXTRAL["intermediate_size"] == 64
    whole = dataclasses.replace(MODEL, qk_norm=True, qk_norm_whole=True)
    assert families.write(whole, 64)["model_type"] == "olmoe"
    each = dataclasses.replace(MODEL, qk_norm=True, experts_renormalised=False)
    written = families.write(each, 64)
    assert (written["model_type"], written["norm_topk_prob"]) == ("qwen3_moe", False)
    with pytest.raises(ConfigError, match=r"nearest lacks model\.experts_renorm"):
        families.write(dataclasses.replace(MODEL, experts_renormalised=False), 64)
    with pytest.raises(ConfigError, match=r"nearest lacks model\.qk_norm_whole"):
        families.write(dataclasses.replace(whole, head_dim=32), 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "deepseek_v3", "n_shared_experts": 1},
            r"c: n_shared_experts = 1 asks for shared experts, .* lacks; its families "
            r"of experts are mixtral, qwen3_moe, olmoe",
        ),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64},
            r"shared_expert_intermediate_size = 64 asks for shared experts",
        ),
        ({"first_k_dense_replace": 3}, r"= 3 asks for layers without experts beside"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] asks for layers without"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step = 2 asks for layers"),
        ({"topk_method": "noaux_tc"}, r"'noaux_tc' asks for balance of the .* a bias"),
        ({"clip_qkv": 8.0}, r"clip_qkv = 8\.0; the bundled transformer has None"),
        ({"router_jitter_noise": 0.1}, r"router_jitter_noise = 0\.1; .* has 0\.0"),
        ({"num_local_experts": 0}, r"num_local_experts = 0: Expected `int` >= 1"),
        ({"sliding_window": 4096}, r"sliding_window = 4096, which the bundled"),
        ({"model_type": "olmoe", "head_dim": 32}, r"head_dim = 32; .* has 16"),
    ],
)
def test_what_a_published_mixture_has_and_this_one_lacks_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        families.read({**MIXTRAL, **settings}, "c")
    harmless = {"first_k_dense_replace": 0, "mlp_only_layers": []}
    assert families.read({**MIXTRAL, **harmless}, "c").experts == 4


def test_islands_train_a_mixture_with_muon(tmp_path):
    """Its experts are matrices to Muon, their use is their weight in a merge,
    and the loss that is told is that of the next token."""
    text = tmp_path / "text"
    text.mkdir()
    for index in range(5):
        (text / f"{index}.txt").write_text("abcdefgh, 01234567. " * 200)
    model = dataclasses.replace(
        MODEL, d_model=32, head_dim=8, expert_dim=32, balance_loss=0.5
    )
    run = RunConfig(
        model=model,
        inner=InnerConfig(optimizer="muon", learning_rate=1e-2),
        sync=SyncConfig(
            steps_per_cycle=4, fragments=3, merge="mean", weights_by_use="rows"
        ),
        sequence_length=32,
        total_tokens=20_000,
    )
    run = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, paths=(str(text),), validation_fraction=0.3),
    )
    islands = {
        "fast": IslandConfig(batch_size=8, step_seconds=0.1),
        "slow": IslandConfig(batch_size=4, step_seconds=0.3),
    }
    learnt = emulate(Config(run=run, islands=islands))
    summary = learnt.summary
    merged = sum(own["tokens_merged"] for own in summary["islands"].values())
    assert merged == summary["tokens_computed"] >= 20_000
    assert summary["eval_loss"] < 0.4  # Below the balance's share alone.
    _, metrics, _ = of_rows(model, {"tokens": jnp.asarray(TOKENS)}, learnt.params)
    assert metrics["balance_loss"] >= 0.99
    assert "leaves to Adam: all vectors, " in (note := inner_note(run))
    assert "mlp" not in note
    pieces = build_plan(run, build(run)).pieces
    by_use = {piece.path[-1] for piece in pieces if piece.by_use}
    assert by_use == {"embedding", "gate", "up", "down"}


# ---- on meshes -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_meshes():
    prepare_environment(4, inherited := dict(os.environ))
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={**inherited, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_mesh_trains_a_mixture_as_one_device(on_meshes):
    meshes = on_meshes["meshes"]
    one = meshes["1x1x1x1"]
    assert len(meshes) == 7
    for found in meshes.values():
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-5)
        assert found["distance"] < 1e-5
        assert found["expert_tokens"] == one["expert_tokens"]
        assert found["sorts"]
        assert not found["sorts_over_the_mesh"]


def test_islands_that_share_experts_merge_what_one_device_would(on_meshes):
    """Ten steps and the merges of two islands, of 2 devices and of 4, with texts at
    which no router is so undecided that rounding could choose."""
    found = on_meshes["merged"]
    assert found["margin"] > 1e-6
    assert found["apart"] < 1e-9
