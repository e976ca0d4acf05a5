"""Plain data-parallel training of the same initial model, for comparison with a run.

It has one optimizer, and one batch as large as all islands' batches together. The text,
its order by the global index, the number of tokens and the schedule are the run's. The
learning rate is the config's, swept for this batch size.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from diloco_jax.config import Config, IslandConfig
from diloco_jax.data.loading import load_data
from diloco_jax.data.reader import BatchReader
from diloco_jax.evaluation import as_json, whole_validation
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.step import TrainState
from diloco_jax.island.timing import Pace, goal_of
from diloco_jax.weights.first import first_params


def run(
    config: Config, report: Callable[[int, int, float], None] | None = None
) -> dict[str, Any]:
    """Train; return eval_loss, eval_bits_per_byte, tokens, steps, learning rate.

    Args:
      config: the resolved config of the run to compare with.
      report: called after each step with tokens, total tokens and loss.
    """
    run, began = config.run, time.monotonic()
    rate = config.placement.baseline_learning_rate or run.inner.learning_rate
    batch_size = sum(island.batch_size for island in config.islands.values())
    model, trainer = build_trainer(run, IslandConfig(batch_size=batch_size))
    rows = load_data(run).index(run.seed)
    reader = BatchReader(rows, trainer.fields, run.sequence_length)
    params = trainer.place_params(first_params(run, model))
    state = TrainState(params, trainer.init_inner(params))
    per_step = batch_size * run.sequence_length
    steps = -(-run.total_tokens // per_step)
    settings = dataclasses.replace(run.inner, learning_rate=rate)
    pace = Pace(dataclasses.replace(run, inner=settings), goal_of(run, batch_size))
    for step in range(steps):
        positions = np.arange(step * batch_size, (step + 1) * batch_size)
        batch = trainer.put_batch(reader.batch(positions))
        now = pace.learning_rate(step, others_tokens=0)
        state, metrics = trainer.step(state, batch, now)
        if report is not None:
            report((step + 1) * per_step, run.total_tokens, float(metrics["loss"]))
    evaluation = whole_validation(config, trainer, state.params)
    return {
        **as_json(evaluation),
        "tokens": steps * per_step,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": rate,
        "seconds": time.monotonic() - began,
    }
