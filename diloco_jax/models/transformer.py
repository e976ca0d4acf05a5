"""The bundled model: a decoder-only transformer.

A layer is a flax nnx module; its parameters leave as a plain nested dict, all layers
stacked on a leading axis and run by one `lax.scan`.

`B` sequences, `T` tokens, `D` model, `N` query heads, `K` key and value heads,
`H` head, `L` layers, `V` vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from diloco_jax.config import ConfigError, ModelConfig, suggest
from diloco_jax.data.tokenizer import VOCAB_SIZE
from diloco_jax.models.layers import Attend, Layer, rms_norm, rotations
from diloco_jax.models.model import (
    Batch,
    Metrics,
    Model,
    Params,
    split_batch,
    split_by_sequence,
    weighted_loss,
)

EMBEDDING_STD = 0.02
UNROLLED_LAYERS = 8
"""Up to this depth the scan is unrolled on CPU: see `layers_per_iteration`."""


def build(
    config: ModelConfig,
    *,
    compute_dtype: str = "float32",
    remat: str = "none",
    attention: str = "dot_product",
) -> Model:
    """The transformer of this config.

    Args:
      config: sizes.
      compute_dtype: "float32" or "bfloat16"; parameters stay f32, and so do norms,
        softmax, logits and loss.
      remat: what the backward pass computes again: "none", "full" (each layer) or
        "dots" (all but the products with weights).
      attention: a name in ATTENTION.

    Raises:
      ConfigError: sizes that do not fit together, or an unknown name.
    """
    _validate(config)
    dtype = _choose("compute_dtype", compute_dtype, DTYPES)
    wrap = _choose("remat", remat, REMAT)
    attend = _choose("attention", attention, ATTENTION)
    # Unrolled, nothing would keep the compiler from merging the repeated work again.
    unroll = layers_per_iteration(config.num_layers) if remat == "none" else 1

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        inputs, targets, weights = split_batch(batch)
        logits = _logits(config, params, inputs, dtype, wrap, attend, unroll)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return weighted_loss(losses, weights)

    tensors = _tensors(config)
    axes = jax.tree.map(lambda t: t.axes, tensors, is_leaf=_is_tensor)
    return Model(lambda key: _init(tensors, key), loss, axes)


class Tensor(NamedTuple):
    """A parameter: its shape, its axes' names, its standard deviation at the start."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    std: float


def layers_per_iteration(num_layers: int) -> int:
    """Layers in one iteration of the scan.

    On CPU an unrolled step is a quarter faster and compiles no slower at these depths;
    elsewhere one layer per iteration keeps the program small at any depth.
    """
    unrolled = jax.default_backend() == "cpu" and num_layers <= UNROLLED_LAYERS
    return num_layers if unrolled else 1


def _logits(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    dtype: Any,
    wrap: Callable[[Any], Any],
    attend: Attend,
    unroll: int,
) -> jax.Array:
    """f32 [B, T, V] of int32 [B, T]."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    graph = _layer_graph(config)[0]
    turns = rotations(tokens.shape[1], config.head_dim, config.rope_base)

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        module = nnx.merge(graph, nnx.State(weights))
        return split_by_sequence(module(x, turns, attend)), None

    x = split_by_sequence(params["embedding"][tokens])
    x, _ = jax.lax.scan(wrap(layer), x, params["layers"], unroll=unroll)
    x = rms_norm(x, params["norm"])
    tied = config.tied_embeddings
    table = params["embedding"].T if tied else params["unembedding"]
    return jnp.matmul(x, table, preferred_element_type=jnp.float32)


def _init(tensors: dict[str, Any], key: jax.Array) -> Params:
    """Normal values of each tensor's standard deviation.

    One draw for all of them: compiling one per tensor takes several times as long.
    """
    leaves, structure = jax.tree.flatten(tensors, is_leaf=_is_tensor)
    sizes = [math.prod(t.shape) if t.std else 0 for t in leaves]
    noise = jax.random.normal(key, (sum(sizes),), jnp.float32)
    parts = jnp.split(noise, list(itertools.accumulate(sizes))[:-1])
    values = [
        t.std * part.reshape(t.shape) if t.std else jnp.zeros(t.shape, jnp.float32)
        for t, part in zip(leaves, parts, strict=True)
    ]
    params: Params = jax.tree.unflatten(structure, values)
    return params


def _tensors(config: ModelConfig) -> dict[str, Any]:
    """All parameters, described: init and axes both follow from it."""

    def stacked(variable: Any) -> Tensor:
        metadata = variable.get_metadata()
        shape = (config.num_layers, *variable.get_value().shape)
        return Tensor(shape, ("layers", *metadata["axes"]), metadata["std"])

    d, v = config.d_model, config.vocab_size
    tensors = {
        "embedding": Tensor((v, d), ("vocab", "embed"), EMBEDDING_STD),
        "layers": nnx.to_pure_dict(_layer_graph(config)[1], extract_fn=stacked),
        "norm": Tensor((d,), ("embed",), 0.0),
    }
    if not config.tied_embeddings:
        tensors["unembedding"] = Tensor((d, v), ("embed", "vocab"), EMBEDDING_STD)
    return tensors


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _layer_graph(config: ModelConfig) -> tuple[Any, Any]:
    """A layer's structure and its abstract state."""
    return nnx.split(nnx.eval_shape(lambda: Layer(config)))


def _attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """[B, T, N, H] from [B, T, N, H], [B, T, K, H], [B, T, K, H]; softmax in f32."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
ATTENTION: dict[str, Attend] = {"dot_product": _attend}
REMAT: dict[str, Callable[[Any], Any]] = {
    "none": lambda f: f,
    "full": lambda f: jax.checkpoint(f, prevent_cse=False),
    "dots": lambda f: jax.checkpoint(
        f,
        prevent_cse=False,
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
}


def _choose(field: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(
            f"{field} = {name!r} is unknown{suggest(name, known)}; "
            f"choose from {', '.join(known)}"
        )
    return known[name]


def _validate(config: ModelConfig) -> None:
    if config.vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"model.vocab_size = {config.vocab_size}; tokens are bytes, so it must be "
            f"at least {VOCAB_SIZE}"
        )
    for field in ("d_model", "num_layers", "num_heads", "mlp_dim"):
        if getattr(config, field) < 1:
            raise ConfigError(
                f"model.{field} = {getattr(config, field)}; it must be at least 1"
            )
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(
            f"model.head_dim = {config.head_dim}; rotary positions need an even "
            f"number of at least 2"
        )
    if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"model.num_heads = {config.num_heads} is not a multiple of "
            f"model.num_kv_heads = {config.num_kv_heads}; choose a multiple"
        )
