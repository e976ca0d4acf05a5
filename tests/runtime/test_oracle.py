"""With scripted events the runtime reproduces core/round.py, bit for bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from runtime_support import make_config, run_scripted

from diloco_jax.config import Config
from diloco_jax.coordinator.store import outer_settings
from diloco_jax.core import round as oracle
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.data.corpus import load_corpus
from diloco_jax.data.windows import Windows
from diloco_jax.island.build import build_trainer
from diloco_jax.island.step import TrainState

pytestmark = pytest.mark.dist

CYCLES = 3


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
    config = make_config(text, cycles=CYCLES, **sync)
    tape = run_scripted(config, tmp_path)
    merges = [r for r in tape if r["kind"] == "merged" and not r["final"]]
    expected = expected_history(config, tape)
    assert len(merges) >= len(expected) == CYCLES * 2
    for merge, wanted in zip(merges, expected, strict=False):
        assert (merge["tick"], merge["fragment"]) == (wanted.tick, wanted.fragment)
        assert [c["island"] for c in merge["contributions"]] == ["a", "b"]
        assert merge["digest"] == wanted.digest, f"tick {wanted.tick} differs"
