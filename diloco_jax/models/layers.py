"""The modules of one transformer layer, in flax nnx.

RMSNorm before each half, rotary positions, grouped-query attention, gated MLP.
`B` sequences, `T` tokens, `D` model, `N` query heads, `K` key and value heads,
`H` head, `F` MLP. Every parameter carries its logical axis names and
the standard deviation it starts with; the values come from outside.

Sources: RMSNorm arXiv 1910.07467, rotary positions 2104.09864, grouped-query
attention 2305.13245, SwiGLU 2002.05202. Deviation: a norm multiplies by 1 + scale,
scale starting at 0, so that weight decay pulls it to the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diloco_jax.config import ModelConfig
from diloco_jax.models.attention import Attend
from diloco_jax.models.layout import Names

NORM_EPSILON = 1e-6
HEADS = ("batch", None, "heads", None)
KV_HEADS = ("batch", None, "kv_heads", None)

Constrain = Callable[[jax.Array, Names], jax.Array]
Rotations = tuple[jax.Array, jax.Array]


class Layer(nnx.Module):
    """One layer on the residual stream, [B, T, D]."""

    def __init__(self, config: ModelConfig):
        self.attention_norm = Norm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.d_model)
        self.mlp = Mlp(config)

    def __call__(
        self, x: jax.Array, turns: Rotations, attend: Attend, constrain: Constrain
    ) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), turns, attend, constrain)
        return x + self.mlp(self.mlp_norm(x), constrain)


class Norm(nnx.Module):
    """RMSNorm: x / rms(x) * (1 + scale), in f32."""

    def __init__(self, size: int):
        self.scale = _weight((size,), ("embed",), 0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...])


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

    def __call__(
        self, x: jax.Array, turns: Rotations, attend: Attend, constrain: Constrain
    ) -> jax.Array:
        query = constrain(project(x, self.query[...]), HEADS)
        key = constrain(project(x, self.key[...]), KV_HEADS)
        value = constrain(project(x, self.value[...]), KV_HEADS)
        mixed = attend(rotate(query, turns), rotate(key, turns), value)  # B T N H
        return project(mixed, self.output[...], axes=2)


class Mlp(nnx.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        d, f = config.d_model, config.mlp_dim
        self.gate = _weight((d, f), ("embed", "mlp"), d**-0.5)
        self.up = _weight((d, f), ("embed", "mlp"), d**-0.5)
        out = f**-0.5 * _residual_scale(config)
        self.down = _weight((f, d), ("mlp", "embed"), out)

    def __call__(self, x: jax.Array, constrain: Constrain) -> jax.Array:
        gate = nnx.silu(project(x, self.gate[...]))  # B T F
        hidden = constrain(gate * project(x, self.up[...]), ("batch", None, "mlp"))
        return project(hidden, self.down[...])


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / rms(x) * (1 + scale) over the last axis, computed in f32, in x's
    dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPSILON)
    gain = jnp.expand_dims(1 + scale.astype(jnp.float32), range(x.ndim - 1))
    return (y * gain).astype(x.dtype)


def rotations(length: int, head_dim: int, base: float) -> Rotations:
    """Return cosines and sines of the rotations, f32 [1, T, 1, H / 2]."""
    frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(length)[:, None] * frequencies[None, :]
    angles = angles[None, :, None, :]
    return (
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )


def rotate(x: jax.Array, turns: Rotations) -> jax.Array:
    """Rotate the pairs (x[i], x[i + H / 2]) of each head by their position's angle."""
    cosine, sine = turns
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((a * cosine - b * sine, b * cosine + a * sine), axis=-1)
    return turned.astype(x.dtype)


def project(x: jax.Array, weight: jax.Array, axes: int = 1) -> jax.Array:
    """Contract the last `axes` axes of x with the first of weight.

    This is a product of two matrices: on CPU a quarter faster than the general form.
    """
    lead, size = x.shape[: x.ndim - axes], math.prod(weight.shape[:axes])
    y = x.reshape(-1, size) @ weight.reshape(size, -1)
    return y.reshape(*lead, *weight.shape[axes:])


def _weight(
    shape: tuple[int, ...], axes: tuple[str, ...], std: float
) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros(shape), axes=axes, std=std)


def _residual_scale(config: ModelConfig) -> float:
    """Return the factor that keeps the residual stream's size over two additions per
    layer."""
    return float((2 * config.num_layers) ** -0.5)
