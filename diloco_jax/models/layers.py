"""The layers of the bundled model, in flax nnx, and the loop over all of them.

A layer has RMSNorm before each half, rotary positions, grouped-query attention, and a
gated MLP, or a mixture of experts (`experts.py`); by the config also norms of queries
and keys and after each half, and biases.
Every parameter carries its logical axis names and mean and standard deviation at the
start; the values come from outside.

Attention is the plain formula on CPU and GPU, and Pallas splash attention on TPUs: on a
mesh sequences and heads are cut, nothing is gathered.

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
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from diloco_jax.config import ModelConfig
from diloco_jax.config.config import LANES, require_blocks
from diloco_jax.models.experts import Experts, Send
from diloco_jax.models.model import Axes, Layout, Names

Rotations = tuple[jax.Array, jax.Array]
"""Cosines and sines of the angles of all positions."""
Frequencies = npt.NDArray[np.float64]
Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of query, key and value, [B, T, N, H], [B, T, K, H] and [B, T, K, H]; its
result is [B, T, N, H]."""
ATTENDED = "attended"
"""Name of attention's results for checkpoint policies."""
LARGEST_BLOCK = 512
"""Tokens per block; larger blocks of f32 gradients exceed a v5p's vector memory."""


class Tensor(NamedTuple):
    """A parameter: its shape, its axes' names, and mean and standard deviation at the
    start."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float
    start: float = 0.0


def is_tensor(value: Any) -> bool:
    """Tell if a value describes a parameter."""
    return isinstance(value, Tensor)


def axes_of(tensors: dict[str, Any]) -> Axes:
    """Return the names of their axes."""
    axes: Axes = jax.tree.map(lambda t: t.axes, tensors, is_leaf=is_tensor)
    return axes


def stacked(
    layers: int, shape: tuple[int, ...], axes: Names, std: float = 0.0, start: float = 0
) -> Tensor:
    """Describe a parameter that each of so many layers has."""
    return Tensor((layers, *shape), ("layers", *axes), std, start)


def residual_scale(layers: int) -> float:
    """Return the factor that keeps the residual stream's size over two additions per
    layer."""
    return float((2 * layers) ** -0.5)


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
        self.mlp = ExpertMlp(config) if config.experts else Mlp(config)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.attention_post_norm = Norm(config, config.d_model, "embed")
            self.mlp_post_norm = Norm(config, config.d_model, "embed")

    def __call__(
        self,
        x: jax.Array,
        turns: Rotations,
        attend: Mix,
        constrain: Constrain,
        send: Send,
    ) -> jax.Array:
        """send: what experts are called by."""
        added = self.attention(self.attention_norm(x), turns, attend, constrain)
        x = x + (self.attention_post_norm(added) if self.post_norms else added)
        y = self.mlp_norm(x)
        mlp = self.mlp
        added = mlp(y, send) if isinstance(mlp, ExpertMlp) else mlp(y, constrain)
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
        std, out = d**-0.5, (n * h) ** -0.5 * residual_scale(config.num_layers)
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
        self.normed, self.normed_whole = config.qk_norm, config.qk_norm_whole
        if config.qk_norm:
            axis = "heads" if config.qk_norm_whole else "head_dim"
            together = (n, k) if config.qk_norm_whole else (1, 1)
            self.query_norm = Norm(config, together[0] * h, axis)
            self.key_norm = Norm(config, together[1] * h, axis)

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
            query = self._normed(self.query_norm, query)
            key = self._normed(self.key_norm, key)
        mixed = attend(rotate(query, turns), rotate(key, turns), value)  # B T N H
        added = project(mixed, self.output[...], axes=2)
        return added + self.output_bias[...] if self.output_biased else added

    def _normed(self, norm: Norm, heads: jax.Array) -> jax.Array:
        """Normalise each head, or all of them together; heads: [B, T, N, H]."""
        if not self.normed_whole:
            return norm(heads)
        return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)


class Mlp(nnx.Module):
    """Gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        d, f = config.d_model, config.mlp_dim
        self.gate = _weight((d, f), ("embed", "mlp"), d**-0.5)
        self.up = _weight((d, f), ("embed", "mlp"), d**-0.5)
        out = f**-0.5 * residual_scale(config.num_layers)
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


class ExpertMlp(nnx.Module):
    """Gated MLPs, to some of which each token is sent: see `experts.py`."""

    def __init__(self, config: ModelConfig):
        e, d, f = config.experts, config.d_model, config.expert_dim
        self.router = _weight((d, e), ("embed", "router"), d**-0.5)
        self.gate = _weight((e, d, f), ("expert", "embed", "mlp"), d**-0.5)
        self.up = _weight((e, d, f), ("expert", "embed", "mlp"), d**-0.5)
        out = f**-0.5 * residual_scale(config.num_layers)
        self.down = _weight((e, f, d), ("expert", "mlp", "embed"), out)

    def __call__(self, x: jax.Array, send: Send) -> jax.Array:
        weights = (self.router, self.gate, self.up, self.down)
        return send(x, Experts(*(weight[...] for weight in weights)))


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
    shape: tuple[int, ...], axes: Names, std: float, start: float = 0.0
) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros(shape), axes=axes, std=std, start=start)


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


def dot_product(
    layout: Layout,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Attend by the plain formula, compiled by XLA; softmax in f32.

    window: tokens that each token attends to, itself included; 0 = all earlier.
    segments: int32 [B, T]; a token attends to those of its own document alone.
    """
    together = None
    if segments is not None:
        together = segments[:, None, :, None] == segments[:, None, None, :]
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=together,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
    )
    named: jax.Array = checkpoint_name(mixed, ATTENDED)  # type: ignore[no-untyped-call]
    return named


def auto(layout: Layout, query: jax.Array, *others: Any, **options: Any) -> jax.Array:
    """Attend by the kernel on TPUs if it fits the shapes, else by the plain formula."""
    fits = layout.platform == "tpu" and query.shape[1] % LANES == 0
    return (splash if fits else dot_product)(layout, query, *others, **options)


def splash(
    layout: Layout,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Attend by the Pallas kernel for TPUs, as `dot_product`; other devices interpret
    it, slowly.
    """
    length, heads, head_dim = query.shape[1:]
    require_blocks(length)
    if key.shape[2] % layout.ways("heads"):
        # Cut between the heads of one group: each head gets keys of its own.
        group = heads // key.shape[2]
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    arrays = [x.swapaxes(1, 2) for x in (query * head_dim**-0.5, key, value)]
    specs = [layout.spec(("batch", "heads", None, None), x.shape) for x in arrays]
    if segments is not None:
        arrays.append(segments)
        specs.append(layout.spec(("batch", None), segments.shape))
    mapped = jax.shard_map(
        functools.partial(_one_device, layout.platform != "tpu", window),
        mesh=layout.mesh,
        in_specs=tuple(specs),
        out_specs=specs[0],
        check_vma=False,
    )
    mixed: jax.Array = mapped(*arrays)
    return mixed.swapaxes(1, 2)


def _one_device(
    interpret: bool,
    window: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Return [B, N, T, H] of one device's sequences and heads."""
    # Pallas takes a third of a second to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    heads, length = query.shape[1:3]
    square = (length, length)
    mask: pallas.splash_attention_mask.Mask = pallas.CausalMask(square)
    if window:
        mask = pallas.LocalMask(square, (window - 1, 0), offset=0)
    block = max(n for n in range(LANES, LARGEST_BLOCK + 1, LANES) if length % n == 0)
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    kernel = pallas.make_splash_mha_single_device(
        pallas.MultiHeadMask([mask] * heads),
        block_sizes=pallas.BlockSizes(**sizes),
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
    documents = None
    if segments is not None:
        documents = pallas.SegmentIds(q=segments, kv=segments)
    mixed: jax.Array = jax.vmap(kernel)(query, key, value, documents)
    return mixed


ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "auto": auto,
    "dot_product": dot_product,
    "splash": splash,
}
