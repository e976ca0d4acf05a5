"""The modules of one transformer layer, in flax nnx.

RMSNorm before each half, rotary positions, grouped-query attention, gated MLP; by the
config also norms of queries and keys and after each half, and biases.
`B` sequences, `T` tokens, `D` model, `N` query heads, `K` key and value heads,
`H` head, `F` MLP. Every parameter carries its logical axis names and
mean and standard deviation at the start; the values come from outside.

Sources: RMSNorm arXiv 1910.07467, rotary positions 2104.09864, grouped-query
attention 2305.13245, SwiGLU 2002.05202. By default a norm multiplies by 1 + scale,
scale starting at 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from diloco_jax.config import ModelConfig
from diloco_jax.models.attention import Mix
from diloco_jax.models.layout import Names
from diloco_jax.models.rotary import Rotations, rotate

HEADS = ("batch", None, "heads", None)
KV_HEADS = ("batch", None, "kv_heads", None)

Constrain = Callable[[jax.Array, Names], jax.Array]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu_tanh": functools.partial(nnx.gelu, approximate=True),
}


class Layer(nnx.Module):
    """One layer on the residual stream, [B, T, D]."""

    def __init__(self, config: ModelConfig):
        self.attention_norm = Norm(config, config.d_model, "embed")
        self.attention = Attention(config)
        self.mlp_norm = Norm(config, config.d_model, "embed")
        self.mlp = Mlp(config)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.attention_post_norm = Norm(config, config.d_model, "embed")
            self.mlp_post_norm = Norm(config, config.d_model, "embed")

    def __call__(
        self, x: jax.Array, turns: Rotations, attend: Mix, constrain: Constrain
    ) -> jax.Array:
        added = self.attention(self.attention_norm(x), turns, attend, constrain)
        x = x + (self.attention_post_norm(added) if self.post_norms else added)
        added = self.mlp(self.mlp_norm(x), constrain)
        return x + (self.mlp_post_norm(added) if self.post_norms else added)


class Norm(nnx.Module):
    """RMSNorm over the last axis, in f32."""

    def __init__(self, config: ModelConfig, size: int, axis: str):
        self.config = config
        self.scale = _weight((size,), (axis,), 0.0, first_scale(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(self.config, x, self.scale[...])


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig):
        d, n = config.d_model, config.num_heads
        k, h = config.num_kv_heads, config.head_dim
        std, out = d**-0.5, (n * h) ** -0.5 * _residual_scale(config)
        self.query = _weight((d, n, h), ("embed", "heads", "head_dim"), std)
        self.key = _weight((d, k, h), ("embed", "kv_heads", "head_dim"), std)
        self.value = _weight((d, k, h), ("embed", "kv_heads", "head_dim"), std)
        self.output = _weight((n, h, d), ("heads", "head_dim", "embed"), out)
        # Biases are vectors, which do not decay.
        self.biases, self.output_biased = config.attention_bias != "none", False
        if self.biases:
            self.query_bias = _weight((n * h,), ("heads",), 0.0)
            self.key_bias = _weight((k * h,), ("kv_heads",), 0.0)
            self.value_bias = _weight((k * h,), ("kv_heads",), 0.0)
        if config.attention_bias == "qkvo":
            self.output_biased = True
            self.output_bias = _weight((d,), ("embed",), 0.0)
        self.normed = config.qk_norm
        if config.qk_norm:
            self.query_norm = Norm(config, h, "head_dim")
            self.key_norm = Norm(config, h, "head_dim")

    def __call__(
        self, x: jax.Array, turns: Rotations, attend: Mix, constrain: Constrain
    ) -> jax.Array:
        query = constrain(project(x, self.query[...]), HEADS)
        key = constrain(project(x, self.key[...]), KV_HEADS)
        value = constrain(project(x, self.value[...]), KV_HEADS)
        if self.biases:
            query += self.query_bias[...].reshape(query.shape[2:])
            key += self.key_bias[...].reshape(key.shape[2:])
            value += self.value_bias[...].reshape(value.shape[2:])
        if self.normed:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = attend(rotate(query, turns), rotate(key, turns), value)  # B T N H
        added = project(mixed, self.output[...], axes=2)
        return added + self.output_bias[...] if self.output_biased else added


class Mlp(nnx.Module):
    """Gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        d, f = config.d_model, config.mlp_dim
        self.gate = _weight((d, f), ("embed", "mlp"), d**-0.5)
        self.up = _weight((d, f), ("embed", "mlp"), d**-0.5)
        out = f**-0.5 * _residual_scale(config)
        self.down = _weight((f, d), ("mlp", "embed"), out)
        self.activation = config.activation
        self.biases = config.mlp_bias
        if config.mlp_bias:
            self.gate_bias = _weight((f,), ("mlp",), 0.0)
            self.up_bias = _weight((f,), ("mlp",), 0.0)
            self.down_bias = _weight((d,), ("embed",), 0.0)

    def __call__(self, x: jax.Array, constrain: Constrain) -> jax.Array:
        gate, up = project(x, self.gate[...]), project(x, self.up[...])  # B T F
        if self.biases:
            gate, up = gate + self.gate_bias[...], up + self.up_bias[...]
        hidden = ACTIVATIONS[self.activation](gate) * up
        hidden = constrain(hidden, ("batch", None, "mlp"))
        added = project(hidden, self.down[...])
        return added + self.down_bias[...] if self.biases else added


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


def _weight(
    shape: tuple[int, ...], axes: tuple[str, ...], std: float, start: float = 0.0
) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros(shape), axes=axes, std=std, start=start)


def _residual_scale(config: ModelConfig) -> float:
    """Return the factor that keeps the residual stream's size over two additions per
    layer."""
    return float((2 * config.num_layers) ** -0.5)
