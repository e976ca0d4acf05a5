"""The layers of the bundled model, and the loop over all of them.

A layer has RMSNorm before each half, rotary positions, grouped-query attention, and a
gated MLP, or a mixture of experts (`experts.py`); by the config also norms of queries
and keys and after each half, and biases.
A `Tensor` describes a parameter: its logical axis names, and mean and standard
deviation at the start. Functions take the values as a nested dict.

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
from jax.ad_checkpoint import checkpoint_name

from diloco_jax.config import ModelConfig
from diloco_jax.config.config import LANES, require_blocks
from diloco_jax.models.experts import Experts, Send
from diloco_jax.models.model import Axes, Layout, Names, Params

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
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def layer_tensors(config: ModelConfig) -> dict[str, Any]:
    """Describe the parameters of all layers, stacked. Biases are vectors, which do not
    decay."""
    d, n, k, h = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    tensor = functools.partial(stacked, config.num_layers)
    std, last = d**-0.5, residual_scale(config.num_layers)

    def norm(size: int, axis: str) -> dict[str, Tensor]:
        return {"scale": tensor((size,), (axis,), start=first_scale(config))}

    of_key = tensor((d, k, h), ("embed", "kv_heads", "head_dim"), std)
    attention: dict[str, Any] = {
        "query": tensor((d, n, h), ("embed", "heads", "head_dim"), std),
        "key": of_key,
        "value": of_key,
        "output": tensor(
            (n, h, d), ("heads", "head_dim", "embed"), (n * h) ** -0.5 * last
        ),
    }
    if config.attention_bias != "none":
        attention["query_bias"] = tensor((n * h,), ("heads",))
        attention["key_bias"] = tensor((k * h,), ("kv_heads",))
        attention["value_bias"] = tensor((k * h,), ("kv_heads",))
    if config.attention_bias == "qkvo":
        attention["output_bias"] = tensor((d,), ("embed",))
    if config.qk_norm_whole:
        attention["query_norm"] = norm(n * h, "heads")
        attention["key_norm"] = norm(k * h, "heads")
    elif config.qk_norm:
        attention["query_norm"] = attention["key_norm"] = norm(h, "head_dim")
    norms = ["attention_norm", "mlp_norm"]
    if config.post_norms:
        norms += ["attention_post_norm", "mlp_post_norm"]
    return {
        "attention": attention,
        "mlp": _mlp_tensors(config, tensor, std, last),
        **{name: norm(d, "embed") for name in norms},
    }


def _mlp_tensors(
    config: ModelConfig, tensor: Callable[..., Tensor], std: float, last: float
) -> dict[str, Tensor]:
    d, f = config.d_model, config.mlp_dim
    lead: tuple[int, ...] = ()
    experts: tuple[str, ...] = ()
    own: dict[str, Tensor] = {}
    if config.experts:
        f, lead, experts = config.expert_dim, (config.experts,), ("expert",)
        own["router"] = tensor((d, config.experts), ("embed", "router"), std)
    inward = tensor((*lead, d, f), (*experts, "embed", "mlp"), std)
    outward = tensor((*lead, f, d), (*experts, "mlp", "embed"), f**-0.5 * last)
    own |= {"gate": inward, "up": inward, "down": outward}
    if config.mlp_bias:
        bias = tensor((f,), ("mlp",))
        own |= {"gate_bias": bias, "up_bias": bias}
        own["down_bias"] = tensor((d,), ("embed",))
    return own


def stacked(
    layers: int, shape: tuple[int, ...], axes: Names, std: float = 0.0, start: float = 0
) -> Tensor:
    """Describe a parameter that each of so many layers has."""
    return Tensor((layers, *shape), ("layers", *axes), std, start)


def residual_scale(layers: int) -> float:
    """Return the factor that keeps the residual stream's size over two additions per
    layer."""
    return float((2 * layers) ** -0.5)


def apply_layer(
    config: ModelConfig,
    own: Params,
    x: jax.Array,
    turns: Rotations,
    attend: Mix,
    constrain: Constrain,
    send: Send,
) -> jax.Array:
    """Return the residual stream, [B, T, D], after one layer.

    own: its parameters. send: what experts are called by.
    """

    def normed(name: str, x: jax.Array) -> jax.Array:
        return rms_norm(config, x, own[name]["scale"])

    y = normed("attention_norm", x)
    added = _attention(config, own["attention"], y, turns, attend, constrain)
    x = x + (normed("attention_post_norm", added) if config.post_norms else added)
    y, mlp = normed("mlp_norm", x), own["mlp"]
    if config.experts:
        added = send(y, Experts(mlp["router"], mlp["gate"], mlp["up"], mlp["down"]))
    else:
        gate, up = product(mlp, "gate", y), product(mlp, "up", y)  # B T F
        hidden = ACTIVATIONS[config.activation](gate) * up
        added = product(mlp, "down", constrain(hidden, ("batch", None, "mlp")))
    return x + (normed("mlp_post_norm", added) if config.post_norms else added)


def _attention(
    config: ModelConfig,
    own: Params,
    x: jax.Array,
    turns: Rotations,
    attend: Mix,
    constrain: Constrain,
) -> jax.Array:
    """Causal grouped-query attention with rotary positions."""
    query = constrain(product(own, "query", x), HEADS)
    key = constrain(product(own, "key", x), KV_HEADS)
    value = constrain(product(own, "value", x), KV_HEADS)

    def normed(name: str, heads: jax.Array) -> jax.Array:
        """Normalise each head, or all of them together; heads: [B, T, N, H]."""
        flat = (*heads.shape[:2], -1) if config.qk_norm_whole else heads.shape
        scale = own[name]["scale"]
        return rms_norm(config, heads.reshape(flat), scale).reshape(heads.shape)

    if config.qk_norm:
        query, key = normed("query_norm", query), normed("key_norm", key)
    mixed = attend(rotate(query, turns), rotate(key, turns), value)  # B T N H
    return product(own, "output", mixed, axes=2)


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


def product(own: Params, name: str, x: jax.Array, axes: int = 1) -> jax.Array:
    """Contract the last `axes` axes of x with the first of a matrix, and add its bias,
    if it has one."""
    made = project(x, own[name], axes)
    bias = own.get(f"{name}_bias")
    return made if bias is None else made + bias.reshape(made.shape[x.ndim - axes :])


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
