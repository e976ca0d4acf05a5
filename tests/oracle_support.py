"""Results of `oracle.py` for a config: the bits that everything else must give."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import oracle

from diloco_jax.config import Config
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.data.loading import load_data
from diloco_jax.data.reader import BatchReader
from diloco_jax.island.device.step import TrainState
from diloco_jax.models.build import build_plan
from diloco_jax.simulation.bodies import trainer_of


def expected_history(
    config: Config, positions: Mapping[str, np.ndarray], ticks: int
) -> list[oracle.MergeRecord]:
    """The merges of islands in lockstep, at a constant learning rate, each on the data
    at its positions."""
    run = config.run
    rows = load_data(run).index(run.seed)
    reader = BatchReader(rows, rows.fields, run.sequence_length)
    islands = []
    for name, island in config.islands.items():
        model, trainer = trainer_of(run, island)

        def step(carry, params, count, trainer=trainer, name=name, island=island):
            opt_state, done = carry
            state = TrainState(*jax.tree.map(np.array, (params, opt_state)))
            state = jax.device_put(state)
            for _ in range(count):
                chosen = positions[name][
                    done * island.batch_size : (done + 1) * island.batch_size
                ]
                batch = trainer.put_batch(reader.batch(chosen))
                state, _ = trainer.step(state, batch, run.inner.learning_rate)
                done += 1
            return (state.opt_state, done), state.params

        # By number of steps.
        counts = [np.zeros(run.model.vocab_size, np.int64)]

        def used(carry, name=name, island=island, counts=counts):
            _, done = carry
            while run.sync.weights_by_use == "rows" and len(counts) <= done:
                first = (len(counts) - 1) * island.batch_size
                chosen = positions[name][first : first + island.batch_size]
                tokens = reader.batch(chosen)["tokens"][:, :-1]
                own = np.bincount(tokens.ravel(), minlength=len(counts[0]))
                counts.append(counts[-1] + own)
            return counts[min(done, len(counts) - 1)]

        params = jax.jit(model.init)(jax.random.key(run.seed))
        carry = (trainer.init_inner(params), 0)
        islands.append(
            oracle.RoundIsland(
                name, carry, step, island.batch_size * run.sequence_length, used
            )
        )
    plan = build_plan(run, model)
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
    return oracle.run(params, plan, islands, settings, ticks).history
