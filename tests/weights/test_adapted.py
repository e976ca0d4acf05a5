"""Adapters of frozen weights: what they compute, what trains, and what is refused. They
are merged with the weights that they were trained on, or with none."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from begin_support import FAMILIES, NAMES
from begin_support import begun as begun_run
from safetensors.numpy import load_file, save_file

from diloco_jax import cli
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    InnerConfig,
    IslandConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.resolving import resolve, resolve_open
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.step import TrainState
from diloco_jax.models import transformer
from diloco_jax.models.build import build
from diloco_jax.weights import adapted, tensor_files
from diloco_jax.weights.adapted import ADAPTER_CONFIG, ADAPTER_TENSORS, write_adapter
from diloco_jax.weights.export import export
from diloco_jax.weights.first import first_params, started_from
from diloco_jax.weights.tasks import open_model
from diloco_jax.workdir import read_config

RANK, ALPHA = 3, 6.0


def run_of(family: str, **changes) -> RunConfig:
    """A run that adapts the tiny weights of a family."""
    run = RunConfig(
        model=dataclasses.replace(tiny.UNLIKE, lora_rank=RANK, lora_alpha=ALPHA),
        data=DataConfig(digest="d"),
        inner=InnerConfig(optimizer="sgd", learning_rate=0.5),
        sync=SyncConfig(fragments=2, steps_per_cycle=4),
        sequence_length=16,
    )
    config = started_from(Config(run=run), f"hf:{FAMILIES / family}")
    return dataclasses.replace(config.run, **changes)


def batch_of(run: RunConfig, rows: int = 2) -> dict[str, jax.Array]:
    key = jax.random.key(7)
    shape = (rows, run.sequence_length + 1)
    return {"tokens": jax.random.randint(key, shape, 0, run.model.vocab_size)}


def frozen_of(model) -> dict:
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in model.frozen.leaves()]
    return jax.tree.unflatten(jax.tree.structure(model.frozen.shapes), leaves)


def moved(params, seed: int):
    """Parameters away from their start, where half of them are zeros."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        structure,
        [0.3 * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves],
    )


@pytest.mark.parametrize("family", NAMES)
def test_adapters_begin_as_nothing_and_are_what_they_are_merged_to(family):
    run = run_of(family)
    model, plain = build(run), build(adapted.base_run(run))
    batch = batch_of(run)
    own, theirs = jax.jit(model.loss), jax.jit(plain.loss)
    base, _ = theirs(first_params(adapted.base_run(run), plain), batch)
    params = first_params(run, model)
    begun, _ = own(params, batch, frozen_of(model))
    assert begun == base
    params = moved(params, 1)
    found, _ = own(params, batch, frozen_of(model))
    wanted, _ = theirs(adapted.merged(run, params), batch)
    assert abs(found - base) > 1e-3
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_a_step_trains_the_adapters_alone():
    run = run_of("smollm2")
    model, trainer = build_trainer(run, IslandConfig(batch_size=2))
    params = trainer.place_params(first_params(run, model))
    assert set(params) == {"layers"}
    state = TrainState(params, trainer.init_inner(params))
    before = jax.tree.map(np.asarray, trainer.frozen)
    losses = []
    batch = {name: np.asarray(array) for name, array in batch_of(run).items()}
    for _ in range(8):
        state, metrics = trainer.step(state, trainer.put_batch(batch), 0.5)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    jax.tree.map(np.testing.assert_array_equal, before, trainer.frozen)
    assert tiny.steps_compiled(trainer) == 1


def test_frozen_weights_rest_in_the_dtype_that_computes():
    run = run_of("smollm2")
    _, trainer = build_trainer(run, IslandConfig(compute_dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.frozen)} == {
        jnp.dtype("bfloat16")
    }


def test_other_weights_than_the_runs_are_refused():
    run = resolve(Config(run=run_of("smollm2"))).run
    assert len(run.model.frozen_digest) == 16
    other = dataclasses.replace(run.model, frozen_digest="0" * 16)
    _, trainer = build_trainer(dataclasses.replace(run, model=other), IslandConfig())
    with pytest.raises(ConfigError, match=rf"{'0' * 16}.*{run.model.frozen_digest}"):
        trainer.frozen  # noqa: B018


def test_the_digest_is_of_values_and_shapes():
    leaf = np.arange(6, dtype=np.float32)
    digest = adapted.digest_of(iter([leaf, leaf]))
    assert adapted.digest_of(iter([leaf.astype(np.float16), leaf])) == digest
    assert adapted.digest_of(iter([leaf + 1, leaf])) != digest
    assert adapted.digest_of(iter([leaf.reshape(2, 3), leaf])) != digest


def test_adapters_need_weights():
    run = RunConfig(model=dataclasses.replace(tiny.UNLIKE, lora_rank=2))
    with pytest.raises(ConfigError, match=r"lora_rank = 2.*--init hf:DIR"):
        build(run)


def test_a_run_that_starts_from_weights_takes_no_outer_momentum():
    """However many merges it has."""
    run = dataclasses.replace(
        run_of("smollm2"), total_tokens=10**9, outer=OuterConfig()
    )
    assert resolve_open(Config(run=run)).run.outer.momentum == 0.0
    plain = dataclasses.replace(run, model=tiny.UNLIKE)
    assert resolve_open(Config(run=plain)).run.outer.momentum > 0.0


def test_the_files_are_those_of_peft(tmp_path):
    """W + (alpha / r) B A, matrix by matrix, is the merged one."""
    run = run_of("qwen3")
    model = run.model
    params = moved(first_params(run, build(run)), 2)
    count = write_adapter(model, params, tmp_path)
    assert count == sum(leaf.size for leaf in jax.tree.leaves(params))
    said = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert said["target_modules"] == sorted(
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
    pairs = load_file(tmp_path / ADAPTER_TENSORS)
    merged = adapted.merged(run, params)
    base = tensor_files.read_tensors(FAMILIES / "qwen3")
    wanted = {t.name: t for t in tensor_files.tensors(model)}
    found = 0
    for name in pairs:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        other = name.replace("lora_A", "lora_B")
        weight = base[f"{module}.weight"].astype(np.float32)
        weight = weight + ALPHA / RANK * pairs[other] @ pairs[name]
        tensor = wanted[f"{module}.weight"]
        ours = merged["layers"][tensor.path[1]][tensor.path[2]][tensor.layer]
        np.testing.assert_allclose(tensor.view(weight), ours, rtol=1e-5, atol=1e-6)
        found += 1
    assert found == model.num_layers * len(transformer.ADAPTED_AXES)


@pytest.fixture
def begun(tmp_path) -> tuple[Config, Path]:
    """A run of adapters that has begun, and merged nothing."""
    text = tmp_path / "text.txt"
    text.write_text("one line of text\n" * 2000)
    run = run_of("smollm2")
    run = dataclasses.replace(run, data=DataConfig(paths=(str(text),)))
    config = resolve(Config(run=run).validate())
    return config, begun_run(config, "", tmp_path / "run")


def test_a_run_leaves_as_adapters_or_merged(begun, tmp_path):
    config, workdir = begun
    model = config.run.model
    assert cli.main(["export", str(workdir), str(tmp_path / "adapter")]) == 0
    said = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert said["base_model_name_or_path"] == str(FAMILIES / "smollm2")
    assert not (tmp_path / "adapter" / "config.json").exists()
    pairs = load_file(tmp_path / "adapter" / ADAPTER_TENSORS)
    assert len(pairs) == 2 * model.num_layers * len(transformer.ADAPTED_AXES)
    assert all(pairs[n].any() == ("lora_A" in n) for n in pairs)
    assert cli.main(["export", str(workdir), str(tmp_path / "whole"), "--merged"]) == 0
    whole = tensor_files.read_tensors(tmp_path / "whole")
    for name, tensor in tensor_files.read_tensors(FAMILIES / "smollm2").items():
        np.testing.assert_array_equal(whole[name], tensor)
    assert (tmp_path / "whole" / "config.json").is_file()


def test_what_a_run_with_adapters_says_is_what_they_are_merged_to(begun):
    config, workdir = begun
    text_model = open_model(workdir)
    plain = adapted.base_run(config.run)
    wanted = first_params(plain, build(plain))
    jax.tree.map(np.testing.assert_array_equal, text_model.params, wanted)


def test_a_run_without_adapters_has_nothing_to_merge(tmp_path):
    run = RunConfig(model=tiny.UNLIKE)
    with pytest.raises(ConfigError, match=r"--merged, .*lora_rank = 0"):
        export(Config(run=run), tmp_path, tmp_path / "out", merged=True)


def changed(base):
    found = load_file(base / tensor_files.SINGLE)
    found["model.norm.weight"] = -found["model.norm.weight"]
    save_file(found, base / tensor_files.SINGLE)


def test_commands_that_merge_say_that_the_base_is_another(config, tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(FAMILIES / "smollm2", base)
    adapting = config.replace({"model.lora_rank": 2, "model.lora_alpha": 4.0})
    workdir = begun_run(adapting, f"hf:{base}", tmp_path / "run")
    digest = read_config(workdir).run.model.frozen_digest
    changed(base)
    out = tmp_path / "out"
    task = tmp_path / "t.json"
    task.write_text('[{"question": "a", "choices": ["b", "c"], "answer": "b"}]')
    for command in (
        ["export", str(workdir), str(out), "--merged"],
        ["generate", str(workdir), "--prompt", "a"],
        ["eval", str(workdir), "--tasks", str(task)],
    ):
        assert cli.main(command) == 2
        assert f"model.frozen_digest = {digest}" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert export(read_config(workdir), workdir, out)[0]  # The adapters alone.
