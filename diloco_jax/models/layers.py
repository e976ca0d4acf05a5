"""The layers of the bundled model, and the loop over all of them.

A layer has RMSNorm before each half, rotary positions, grouped-query attention, and a
gated MLP; by the config also norms of queries and keys and after each half, and biases.
`layer_tensors` describes its parameters; the values come from outside.

In the loop, parameters are stacked on a leading axis. Layers of the same place in a
period (see `ModelConfig.layer_period`) are of one kind: an iteration is one period, and
the layers after the last whole period follow.

`B` sequences, `T` tokens, `D` model, `N` query heads, `K` key and value heads, `H`
head, `F` MLP, `L` layers.

Sources: RMSNorm arXiv 1910.07467, rotary positions 2104.09864, grouped-query attention
2305.13245, SwiGLU 2002.05202. By default a norm multiplies by 1 + scale, scale starting
at 0.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import ModelConfig
from diloco_jax.models.attention import Mix
from diloco_jax.models.model import Names

Rotations = tuple[jax.Array, jax.Array]
"""Cosines and sines of the angles of all positions."""
Frequencies = npt.NDArray[np.float64]


def frequencies(config: ModelConfig, *, windowed: bool) -> Frequencies:
    """Return the angle by which each pair of a head turns per position, [H / 2]."""
    base = config.rope_window_base if windowed else config.rope_base
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain: Frequencies = base**-exponents
    if windowed or config.rope_scaling == "none":
        return plain
    slow: Frequencies = plain / config.rope_factor
    if config.rope_scaling == "linear":
        return slow
    # Llama 3.1: long waves grow, short ones stay, those between are interpolated.
    waves = config.rope_original_length * plain / (2 * math.pi)
    low, high = config.rope_low_factor, config.rope_high_factor
    kept = np.clip((waves - low) / (high - low), 0, 1)
    mixed: Frequencies = kept * plain + (1 - kept) * slow
    return mixed


def rotations(length: int, of_pairs: Frequencies) -> Rotations:
    """Return cosines and sines of the rotations, f32 [1, T, 1, H / 2]."""
    angles = np.arange(length)[None, :, None, None] * of_pairs
    return (
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )


def restarted(turns: Rotations, segments: jax.Array) -> Rotations:
    """Return the rotations, f32 [B, T, 1, H / 2], of positions that begin anew with
    each document. segments: int32 [B, T], a document's tokens side by side."""
    begins = jnp.diff(segments, axis=1, prepend=-1) != 0
    here = jnp.arange(segments.shape[1])
    positions = here - jax.lax.cummax(jnp.where(begins, here, 0), axis=1)
    cosine, sine = (table[0][positions] for table in turns)
    return cosine, sine


def rotate(x: jax.Array, turns: Rotations) -> jax.Array:
    """Rotate the pairs (x[i], x[i + H / 2]) of each head by their position's angle."""
    cosine, sine = turns
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((a * cosine - b * sine, b * cosine + a * sine), axis=-1)
    return turned.astype(x.dtype)


class Tensor(NamedTuple):
    """A parameter: its shape, its axes' names, and mean and standard deviation at the
    start."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float
    start: float = 0.0


def layer_tensors(config: ModelConfig) -> dict[str, Any]:
    """Describe the parameters of one layer."""
    d, f, h = config.d_model, config.mlp_dim, config.head_dim
    n, k = config.num_heads, config.num_kv_heads
    # The residual stream keeps its size over two additions per layer.
    added = (2 * config.num_layers) ** -0.5
    heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")

    def norm(size: int, axis: str) -> dict[str, Tensor]:
        return {"scale": Tensor((size,), (axis,), 0.0, first_scale(config))}

    attention: dict[str, Any] = {
        "query": Tensor((d, n, h), ("embed", *heads), d**-0.5),
        "key": Tensor((d, k, h), ("embed", *kv_heads), d**-0.5),
        "value": Tensor((d, k, h), ("embed", *kv_heads), d**-0.5),
        "output": Tensor((n, h, d), (*heads, "embed"), (n * h) ** -0.5 * added),
    }
    mlp = {
        "gate": Tensor((d, f), ("embed", "mlp"), d**-0.5),
        "up": Tensor((d, f), ("embed", "mlp"), d**-0.5),
        "down": Tensor((f, d), ("mlp", "embed"), f**-0.5 * added),
    }
    # Biases are vectors, which do not decay.
    if config.attention_bias != "none":
        attention["query_bias"] = Tensor((n * h,), ("heads",), 0.0)
        attention["key_bias"] = Tensor((k * h,), ("kv_heads",), 0.0)
        attention["value_bias"] = Tensor((k * h,), ("kv_heads",), 0.0)
    if config.attention_bias == "qkvo":
        attention["output_bias"] = Tensor((d,), ("embed",), 0.0)
    if config.qk_norm:
        attention["query_norm"] = norm(h, "head_dim")
        attention["key_norm"] = norm(h, "head_dim")
    if config.mlp_bias:
        mlp["gate_bias"] = mlp["up_bias"] = Tensor((f,), ("mlp",), 0.0)
        mlp["down_bias"] = Tensor((d,), ("embed",), 0.0)
    norms = ["attention_norm", "mlp_norm"]
    if config.post_norms:
        norms += ["attention_post_norm", "mlp_post_norm"]
    own = {name: norm(d, "embed") for name in norms}
    return {"attention": attention, "mlp": mlp, **own}


HEADS = ("batch", None, "heads", None)
KV_HEADS = ("batch", None, "kv_heads", None)

Constrain = Callable[[jax.Array, Names], jax.Array]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def apply_layer(
    config: ModelConfig,
    weights: Any,
    x: jax.Array,
    turns: Rotations,
    attend: Mix,
    constrain: Constrain,
) -> jax.Array:
    """Return the residual stream, [B, T, D], after a layer of these weights."""

    def norm(x: jax.Array, name: str) -> jax.Array:
        return rms_norm(config, x, weights[name]["scale"])

    x_normed = norm(x, "attention_norm")
    added = _attention(config, weights["attention"], x_normed, turns, attend, constrain)
    x = x + (norm(added, "attention_post_norm") if config.post_norms else added)
    added = _mlp(config, weights["mlp"], norm(x, "mlp_norm"), constrain)
    return x + (norm(added, "mlp_post_norm") if config.post_norms else added)


def _attention(
    config: ModelConfig,
    w: Any,
    x: jax.Array,
    turns: Rotations,
    attend: Mix,
    constrain: Constrain,
) -> jax.Array:
    query = constrain(project(x, w["query"]), HEADS)
    key = constrain(project(x, w["key"]), KV_HEADS)
    value = constrain(project(x, w["value"]), KV_HEADS)
    if "query_bias" in w:
        query += w["query_bias"].reshape(query.shape[2:])
        key += w["key_bias"].reshape(key.shape[2:])
        value += w["value_bias"].reshape(value.shape[2:])
    if config.qk_norm:
        query = rms_norm(config, query, w["query_norm"]["scale"])
        key = rms_norm(config, key, w["key_norm"]["scale"])
    mixed = attend(rotate(query, turns), rotate(key, turns), value)  # B T N H
    added = project(mixed, w["output"], axes=2)
    return added + w["output_bias"] if "output_bias" in w else added


def _mlp(config: ModelConfig, w: Any, x: jax.Array, constrain: Constrain) -> jax.Array:
    """Return down(activation(gate(x)) * up(x))."""
    gate, up = project(x, w["gate"]), project(x, w["up"])  # B T F
    if config.mlp_bias:
        gate, up = gate + w["gate_bias"], up + w["up_bias"]
    hidden = ACTIVATIONS[config.activation](gate) * up
    added = project(constrain(hidden, ("batch", None, "mlp")), w["down"])
    return added + w["down_bias"] if config.mlp_bias else added


def rms_norm(config: ModelConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / rms(x) times the config's gain over the last axis, computed in f32, in
    x's dtype."""
    y = x.astype(jnp.float32)
    squares = jnp.mean(y * y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(squares + config.norm_epsilon)
    gain = scale.astype(jnp.float32)
    if config.norm_gain == "one_plus_scale":
        gain = 1 + gain
    return (y * jnp.expand_dims(gain, range(x.ndim - 1))).astype(x.dtype)


def first_scale(config: ModelConfig) -> float:
    """Return the value at which the scales of norms start: a gain of 1."""
    return 0.0 if config.norm_gain == "one_plus_scale" else 1.0


def project(x: jax.Array, weight: jax.Array, axes: int = 1) -> jax.Array:
    """Contract the last `axes` axes of x with the first of weight.

    This is a product of two matrices: on CPU a quarter faster than the general form.
    """
    lead, size = x.shape[: x.ndim - axes], math.prod(weight.shape[:axes])
    y = x.reshape(-1, size) @ weight.reshape(size, -1)
    return y.reshape(*lead, *weight.shape[axes:])


Apply = Callable[[jax.Array, Any, bool], tuple[jax.Array, Any]]
"""Function of activations, one layer's own values and True if it has a window, that
returns the activations after it and values to keep, or None."""


def run_layers(
    config: ModelConfig, x: jax.Array, stacked: Any, apply: Apply, unroll: int = 1
) -> tuple[jax.Array, Any]:
    """Apply all layers; return the last activations, and what was kept, [L, ...].

    stacked: values by layer, [L, ...]. unroll: layers in one iteration of the loop, if
    that is more than a period.
    """
    period = config.layer_period
    periods = config.num_layers // period
    inside = periods * period

    def several(x: jax.Array, own: Any, first: int, count: int) -> tuple[Any, Any]:
        kept = []
        for index in range(count):
            layer = jax.tree.map(operator.itemgetter(index), own)
            x, values = apply(x, layer, config.is_windowed(first + index))
            kept.append(values)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *kept)

    if period == 1:
        return jax.lax.scan(
            lambda x, own: apply(x, own, False), x, stacked, unroll=unroll
        )
    parts = []
    if periods:
        grouped = jax.tree.map(
            lambda a: a[:inside].reshape(periods, period, *a.shape[1:]), stacked
        )
        x, kept = jax.lax.scan(
            lambda x, own: several(x, own, 0, period),
            x,
            grouped,
            unroll=max(unroll // period, 1),
        )
        flat = jax.tree.map(lambda a: a.reshape(inside, *a.shape[2:]), kept)
        parts.append(flat)
    if inside < config.num_layers:
        rest = jax.tree.map(lambda a: a[inside:], stacked)
        x, kept = several(x, rest, inside, config.num_layers - inside)
        parts.append(kept)
    return x, jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
