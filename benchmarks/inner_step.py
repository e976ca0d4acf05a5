"""The bundled model's step against a minimal one of the same architecture.

Question: what does the generality of the bundled model cost? Modules, scans over
stacked layers, sharding constraints, frozen parameters and a step that changes nothing
where the gradient is not finite are compared with one page of JAX: separate arrays for
each layer in a Python loop, products of two matrices, `jax.nn.dot_product_attention`,
optax's AdamW. Both have the same sizes, parameters drawn alike, and the same batch.

They take turns in one process that has one core, blocks of steps at a time. A ratio is
that of two neighbouring blocks, in CPU seconds of the process, which other processes
of the machine disturb least. Losses of both are compared at the first step.

Prediction: 0.99 to 1.02. The bundled step flattens its products, too, and the compiler
sees through modules; the norm of the gradient and the choice of the old state are one
more pass over the parameters.

Found: 1.04 and 1.16 at first. Half of the latter was the choice between the old state
and the new one, element by element, for which XLA copied the moments on CPU; it is a
branch there now (`island/device/step.py`). What is left stands in proportion to the
parameters, not to the tokens: the layers are one stacked array, of which each product
copies its own matrix, and whose gradient is put together from those of the layers.
Gradients alone cost 47 ms more of 520 at 25 M parameters and 512 tokens; with four
times the tokens (`25m, 2k`) that is a fourth of the share.

Command: `python -m benchmarks.inner_step`. Cost: about 3 minutes on one core.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import support
from sizes import MODELS

from diloco_jax.config import IslandConfig, ModelConfig, RunConfig
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.step import TrainState

RATIO_MAX = 1.03
LOSS_ERROR_MAX = 1e-4
SIZES = {"3m": ("3m", 8), "25m": ("25m", 2), "25m, 2k": ("25m", 8)}
"""Model and sequences, of LENGTH tokens each."""
LENGTH = 256
RATE = 1e-3

Step = Callable[[], float]


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    sizes = ["3m"] if options.quick else list(SIZES)
    pairs = 3 if options.quick else options.pairs
    found = {size: measure(size, pairs) for size in sizes}
    checks = []
    for size, row in found.items():
        middle = statistics.median(row["ratios"])
        checks += [
            support.at_most(f"{size}: step over the minimal one", middle, RATIO_MAX),
            support.at_most(
                f"{size}: difference of the losses",
                row["loss_error"],
                LOSS_ERROR_MAX,
                ".1e",
            ),
        ]
    rows = [
        {
            "model": size,
            "parameters": f"{row['parameters']:,}",
            "bundled, CPU s": support.spread(row["bundled"]),
            "minimal, CPU s": support.spread(row["minimal"]),
            "ratio": support.spread(row["ratios"]),
        }
        for size, row in found.items()
    ]
    return support.deliver(
        options, "inner_step", __doc__, {"Steps": rows}, checks, {"sizes": found}
    )


def measure(size: str, pairs: int) -> dict[str, Any]:
    """Return CPU seconds of both steps and their ratio, pair by pair."""
    model, batch_size = SIZES[size]
    config = MODELS[model]
    run = RunConfig(model=config, sequence_length=LENGTH)
    batch = {
        "tokens": np.random.default_rng(0)
        .integers(0, 256, (batch_size, LENGTH + 1))
        .astype(np.int32)
    }
    _, trainer = build_trainer(run, IslandConfig(batch_size=batch_size))
    params = trainer.first(0)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    apart = separate(jax.device_get(params), config.num_layers)
    bundled = bundled_step(trainer, params, batch)
    minimal = minimal_step(config, run, apart, batch)
    print(f"{time.strftime('%H:%M:%S')} {size}: {count:,}", file=sys.stderr, flush=True)
    losses = bundled(), minimal()
    bundled(), minimal()  # Neither compiles nor allocates for the first time later.
    block = max(1, round(0.5 / timed(minimal, 1)))
    times: dict[str, list[float]] = {"bundled": [], "minimal": []}
    for pair in range(pairs):
        order = [("bundled", bundled), ("minimal", minimal)]
        for name, step in order if pair % 2 else reversed(order):
            times[name].append(timed(step, block))
    ratios = [b / m for b, m in zip(times["bundled"], times["minimal"], strict=True)]
    error = abs(losses[0] - losses[1])
    return {"parameters": count, "loss_error": error, "ratios": ratios, **times}


def timed(step: Step, count: int) -> float:
    """Return CPU seconds of this process per step."""
    began = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - began) / count


def bundled_step(trainer: Any, params: Any, batch: dict[str, np.ndarray]) -> Step:
    """Return the product's step, which is waited for."""
    state = TrainState(params, trainer.init_inner(params))
    placed = trainer.put_batch(batch)

    def step() -> float:
        nonlocal state
        state, metrics = trainer.step(state, placed, RATE)
        return float(metrics["loss"])

    return step


# ---- the minimal step ------------------------------------------------------------


def separate(params: Any, layers: int) -> dict[str, Any]:
    """Return the same parameters, those of each layer by themselves, as matrices."""

    def matrix(name: str, value: np.ndarray) -> np.ndarray:
        if value.ndim < 3:
            return value
        lead = value.shape[0] if name != "output" else value.shape[0] * value.shape[1]
        return value.reshape(lead, -1)

    stacked, found = params["layers"], []
    for number in range(layers):
        own = {**stacked["attention"], **stacked["mlp"]}
        layer = {name: matrix(name, value[number]) for name, value in own.items()}
        for norm in ("attention_norm", "mlp_norm"):
            layer[norm] = stacked[norm]["scale"][number]
        found.append(layer)
    return {**params, "layers": found}


def minimal_step(
    config: ModelConfig, run: RunConfig, params: Any, batch: dict[str, np.ndarray]
) -> Step:
    """Return a step of the same architecture, which is waited for."""
    inner, heads, kv, size = (
        run.inner,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    length = batch["tokens"].shape[1] - 1
    angles = np.outer(
        np.arange(length), config.rope_base ** -(np.arange(0, size, 2) / size)
    )
    cosine, sine = (
        jnp.asarray(f(angles)[None, :, None], jnp.float32) for f in (np.cos, np.sin)
    )

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        squares = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(squares + config.norm_epsilon) * (1 + scale)

    def turn(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate((a * cosine - b * sine, b * cosine + a * sine), -1)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
        rows = inputs.shape[0]
        x = params["embedding"][inputs.reshape(-1)]  # [B T, D] throughout.
        for layer in params["layers"]:
            y = norm(x, layer["attention_norm"])
            q, k, v = (
                (y @ layer[name]).reshape(rows, length, count, size)
                for name, count in (("query", heads), ("key", kv), ("value", kv))
            )
            y = jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=True)
            x = x + y.reshape(rows * length, -1) @ layer["output"]
            y = norm(x, layer["mlp_norm"])
            x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
        logits = norm(x, params["norm"]) @ params["unembedding"]
        losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
            logits, targets
        )
        return losses.mean()

    optimizer = optax.chain(
        optax.clip_by_global_norm(inner.clip_norm)
        if inner.clip_norm
        else optax.identity(),
        optax.adamw(
            RATE,
            inner.beta1,
            inner.beta2,
            weight_decay=inner.weight_decay,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        ),
    )

    def update(state: Any, tokens: jax.Array) -> Any:
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    compiled = jax.jit(update, donate_argnums=0)
    params = jax.tree.map(jnp.asarray, params)
    state, tokens = (params, optimizer.init(params)), jnp.asarray(batch["tokens"])

    def step() -> float:
        nonlocal state
        state, value = compiled(state, tokens)
        return float(value)

    return step


if __name__ == "__main__":
    sys.exit(main())
