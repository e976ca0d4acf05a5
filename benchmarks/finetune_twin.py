"""The fine-tune's plain twin: one loop of JAX and optax over the same rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from diloco_jax.config import Config
from diloco_jax.data.loading import load_data
from diloco_jax.data.reader import BatchReader
from diloco_jax.models.build import build
from diloco_jax.models.model import Params
from diloco_jax.weights.first import first_params

Look = Callable[[int, Params], None]
"""Function that is shown the parameters after so many tokens."""


def train(
    config: Config, batch: int, rate: float, looks: int, look: Look
) -> dict[str, Any]:
    """Train on the run's rows in their order, without islands; return `seconds`,
    without those of the looks, and the loss of each step.

    batch: rows of a step. rate: peak of the learning rate. looks: how often `look` is
    called, evenly spaced, the last time at the end.
    """
    run, inner = config.run, config.run.inner
    model = build(run)
    loss_of, frozen = model.require_loss(), {}
    if model.frozen is not None:
        structure = jax.tree.structure(model.frozen.shapes)
        frozen = jax.tree.unflatten(
            structure, [*map(jax.device_put, model.frozen.leaves())]
        )
    per_step = batch * run.sequence_length
    steps = run.total_tokens // per_step
    course = optax.warmup_cosine_decay_schedule(
        rate / 10,
        rate,
        max(1, round(inner.warmup_fraction * steps)),
        steps,
        inner.final_fraction * rate,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(inner.clip_norm),
        optax.adamw(course, inner.beta1, inner.beta2, weight_decay=inner.weight_decay),
    )

    @jax.jit(donate_argnums=(0, 1))
    def step(params: Params, moments: Any, frozen: Params, rows: Any) -> Any:
        (_, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            params, rows, frozen
        )
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, metrics["loss"]

    params = jax.device_put(first_params(run, model))
    moments = optimizer.init(params)
    rows = load_data(run).index(run.seed)
    reader = BatchReader(rows, model.fields(run.data.arrays), run.sequence_length)
    due = {round(steps * (i + 1) / looks) for i in range(looks)}
    losses, seconds = [], 0.0
    for number in range(steps):
        began = time.monotonic()
        read = reader.batch(np.arange(number * batch, (number + 1) * batch))
        params, moments, loss = step(params, moments, frozen, read)
        losses.append(float(loss))
        seconds += time.monotonic() - began
        done = (number + 1) * per_step
        print(f"{done} tokens, loss {losses[-1]:.3f}, {seconds:.0f} s", flush=True)
        if number + 1 in due:
            look(done, params)
    return {"seconds": seconds, "losses": losses, "tokens": steps * per_step}
