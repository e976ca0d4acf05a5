"""With scripted events the runtime reproduces core/round.py, bit for bit."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from runtime_support import run_scripted

from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.coordinator.store import outer_settings
from diloco_jax.core import round as oracle
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.data.corpus import load_corpus
from diloco_jax.data.windows import Windows
from diloco_jax.island.main import build_trainer
from diloco_jax.island.step import TrainState

pytestmark = pytest.mark.dist

MODEL = ModelConfig(
    d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64
)
CYCLES = 3


def make_config(text, **sync) -> Config:
    sync = {
        "steps_per_cycle": 4,
        "fragments": 2,
        "overlap_steps": 1,
        "quorum": 2,
        **sync,
    }
    islands = {
        "b": IslandConfig(batch_size=2),
        "a": IslandConfig(batch_size=4),
    }
    run = RunConfig(
        model=MODEL,
        data=DataConfig(paths=(str(text),), validation_fraction=0.2),
        inner=InnerConfig(
            learning_rate=1e-2, schedule="constant", warmup_fraction=0, rewarm_steps=0
        ),
        outer=OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9),
        sync=SyncConfig(**sync),
        sequence_length=16,
        total_tokens=(CYCLES + 1) * 4 * 6 * 16,
    )
    run = dataclasses.replace(
        run,
        data=dataclasses.replace(
            run.data, digest=load_corpus(run.data.paths, 0.2).digest
        ),
    )
    return Config(run=run, islands=islands, placement=Placement()).validate()


def positions_by_island(tape) -> dict[str, np.ndarray]:
    found: dict[str, list[int]] = {}
    for record in tape:
        if record["kind"] == "granted":
            spans = found.setdefault(record["island"], [])
            assert record["offset"] == len(spans)
            spans += range(record["start"], record["stop"])
    return {name: np.array(spans) for name, spans in found.items()}


def expected_history(config: Config, tape) -> list[oracle.MergeRecord]:
    run = config.run
    windows = Windows(
        load_corpus(run.data.paths, run.data.validation_fraction).train,
        run.sequence_length,
        run.seed,
    )
    positions = positions_by_island(tape)
    islands = []
    for name, island in config.islands.items():
        model, trainer = build_trainer(run, island)

        def step(carry, params, count, trainer=trainer, name=name, island=island):
            opt_state, done = carry
            state = TrainState(*jax.tree.map(np.array, (params, opt_state)))
            state = jax.device_put(state)
            for _ in range(count):
                chosen = positions[name][
                    done * island.batch_size : (done + 1) * island.batch_size
                ]
                batch = trainer.put_batch(windows.batch(chosen))
                state, _ = trainer.step(state, batch, run.inner.learning_rate)
                done += 1
            return (state.opt_state, done), state.params

        params = jax.jit(model.init)(jax.random.key(run.seed))
        carry = (trainer.init_inner(params), 0)
        islands.append(
            oracle.RoundIsland(
                name, carry, step, island.batch_size * run.sequence_length
            )
        )
    plan = plan_fragments(model.shapes(), model.axes, run.sync.fragments)
    sync = run.sync
    settings = oracle.RoundSettings(
        steps_per_cycle=sync.steps_per_cycle,
        outer=outer_settings(run),
        overlap_steps=sync.overlap_steps,
        weighting=sync.weighting,
        merge=sync.merge,
        adopt=sync.adopt,
        blend_alpha=sync.blend_alpha,
        codec_up=sync.codec_up,
        codec_down=sync.codec_down,
        error_feedback=sync.error_feedback,
    )
    ticks = CYCLES * sync.fragments
    return oracle.run(params, plan, islands, settings, ticks).history


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0)
    for index in range(20):
        line = " ".join(str(n) for n in words.integers(0, 99, 200))
        (folder / f"{index}.txt").write_text(line)
    return folder


@pytest.mark.parametrize(
    "sync",
    [
        {"codec_up": "int8", "codec_down": "int8", "adopt": "rebase"},
        {"codec_up": "f32", "codec_down": "f32", "adopt": "overwrite"},
        {"codec_up": "int4", "codec_down": "bf16", "adopt": "blend", "merge": "mean"},
    ],
    ids=lambda sync: f"{sync['adopt']}-{sync['codec_up']}-{sync['codec_down']}",
)
def test_the_runtime_gives_the_oracles_bits(sync, text, tmp_path):
    config = make_config(text, **sync)
    tape = run_scripted(config, tmp_path)
    merges = [r for r in tape if r["kind"] == "merged" and not r["final"]]
    expected = expected_history(config, tape)
    assert len(merges) >= len(expected) == CYCLES * 2
    for merge, wanted in zip(merges, expected, strict=False):
        assert (merge["tick"], merge["fragment"]) == (wanted.tick, wanted.fragment)
        assert [c["island"] for c in merge["contributions"]] == ["a", "b"]
        assert merge["digest"] == wanted.digest, f"tick {wanted.tick} differs"
