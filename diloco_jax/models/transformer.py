"""The bundled model: a decoder-only transformer.

A layer is a flax nnx module; its parameters leave as a plain nested dict, all layers
stacked on a leading axis (`stack.py`). The config's switches make the families.

`B` sequences, `T` tokens, `D` model, `N` query heads, `K` key and value heads,
`H` head, `L` layers, `V` vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diloco_jax.config import ConfigError, ModelConfig, suggest
from diloco_jax.data.source import SEGMENTS, TOKENS, WEIGHTS
from diloco_jax.data.tokenizers.of_bytes import VOCAB_SIZE
from diloco_jax.models import lora
from diloco_jax.models.attention import ATTENDED, ATTENTION
from diloco_jax.models.layers import Layer, first_scale, rms_norm
from diloco_jax.models.layout import Layout
from diloco_jax.models.loss import positions_at_a_time, token_losses
from diloco_jax.models.model import (
    Batch,
    Frozen,
    Metrics,
    Model,
    Params,
    split_batch,
    weighted_loss,
)
from diloco_jax.models.noise import normal
from diloco_jax.models.rotary import frequencies, restarted, rotations
from diloco_jax.models.stack import run_layers
from diloco_jax.models.tensors import Tensor

EMBEDDING_STD = 0.02
UNROLLED_LAYERS = 8
"""Up to this depth the scan is unrolled on CPU: see `layers_per_iteration`."""
STREAM = ("batch", None, None)
"""Axes of the residual stream, [B, T, D]."""
BATCH = {
    "tokens": TOKENS,
    "segments": SEGMENTS._replace(optional=True),
    "weights": WEIGHTS._replace(optional=True),
}
"""Without segments a row is one document, and nothing is masked."""


def build(
    config: ModelConfig,
    *,
    compute_dtype: str = "float32",
    remat: str = "none",
    attention: str = "auto",
    loss_chunk: int | None = None,
    layout: Layout | None = None,
) -> Model:
    """Return the transformer of this config. With `lora_rank` its parameters are the
    adapters, and its weights are frozen, whose values somebody else has to give.

    Args:
      config: sizes.
      compute_dtype: "float32" or "bfloat16", for activations and for the parameters
        within a step. Parameters rest in f32, and norms, softmax, logits and loss are
        computed in it.
      remat: what the backward pass computes again; a name in REMAT.
      attention: a name in ATTENTION.
      loss_chunk: positions of each sequence whose logits stand at a time; 0 = all,
        None = as many as `positions_at_a_time` says.
      layout: the mesh that it runs on; None: the default device.

    Raises:
      ConfigError: sizes that do not fit together, or an unknown name.
    """
    _validate(config)
    layout = layout or Layout.of_one_device()
    dtype = _choose("compute_dtype", compute_dtype, DTYPES)
    wrap = _choose("remat", remat, REMAT)
    attend = _choose("attention", attention, ATTENTION)(layout)
    if loss_chunk is None:
        loss_chunk = positions_at_a_time(config.vocab_size)
    # In an unrolled scan the compiler could merge the repeated work again.
    per_iteration = 1
    if remat == "none":
        per_iteration = layers_per_iteration(config.num_layers, layout)
    tensors = _tensors(config)
    axes = jax.tree.map(lambda t: t.axes, tensors, is_leaf=_is_tensor)

    adapters = lora.tensors(config, tensors["layers"]) if config.lora_rank else {}
    adapters_axes = jax.tree.map(lambda t: t.axes, adapters, is_leaf=_is_tensor)

    def gathered(weights: Any, names: Any) -> Any:
        """Gather one layer's weights, except along the axes that the layout cuts."""
        return jax.tree.map(lambda w, n: layout.gather(w, n[1:]), weights, names)

    def loss(
        params: Params, batch: Batch, added: Params | None = None
    ) -> tuple[jax.Array, Metrics]:
        """added: adapters of the layers."""
        inputs, targets, weights = split_batch(batch)
        segments = batch["segments"][:, :-1] if "segments" in batch else None
        # The gradient of a row is a sum over its tokens, in the dtype of the lookup: in
        # bf16 it would stop growing at some hundreds of them.
        rows = layout.constrain(params["embedding"], axes["embedding"])[inputs]
        x = layout.constrain(embedded(config, rows, dtype), STREAM)
        params, added = jax.tree.map(lambda p: p.astype(dtype), (params, added))
        # `gather` would sum the gradient of the table once for each chunk of logits.
        embedding = layout.constrain(params["embedding"], axes["embedding"])
        stacked = params["layers"] if added is None else (params["layers"], added)
        x = apply_layers(stacked, x, segments)
        x = rms_norm(config, x, params["norm"])
        if config.tied_embeddings:
            table = embedding.T
        else:
            table = layout.constrain(params["unembedding"], axes["unembedding"])
        losses = token_losses(x, table, targets, loss_chunk, layout)
        return weighted_loss(losses, weights)

    def whole_layer(weights: Any) -> Params:
        """Gather a layer's weights, with its adapters added if there are any."""
        if not adapters:
            found: Params = gathered(weights, axes["layers"])
            return found
        base, own = weights
        whole = gathered(base, axes["layers"])
        summed: Params = lora.merged(config, whole, gathered(own, adapters_axes))
        return summed

    def apply_layers(
        stacked: Any, x: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        turns, kinds = {}, {}
        for windowed in (False, True):
            turned = rotations(x.shape[1], frequencies(config, windowed=windowed))
            turns[windowed] = (
                turned if segments is None else restarted(turned, segments)
            )
            kinds[windowed] = functools.partial(
                attend, window=config.window * windowed, segments=segments
            )

        def layer(x: jax.Array, weights: Any, windowed: bool) -> tuple[jax.Array, None]:
            module = layer_of(config, whole_layer(weights))
            x = module(x, turns[windowed], kinds[windowed], layout.constrain)
            return layout.constrain(x, STREAM), None

        return run_layers(config, x, stacked, wrap(layer), per_iteration)[0]

    if not adapters:
        return Model(lambda key: _init(tensors, key), loss, axes, BATCH)
    shapes = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t.shape, dtype),  # type: ignore[no-untyped-call]
        tensors,
        is_leaf=_is_tensor,
    )
    return Model(
        lambda key: {"layers": _init(adapters, key)},
        lambda params, batch, frozen: loss(frozen, batch, params["layers"]),
        {"layers": adapters_axes},
        BATCH,
        Frozen(shapes=shapes, axes=axes),
    )


def embedded(config: ModelConfig, rows: jax.Array, dtype: Any) -> jax.Array:
    """Return the first activations, in dtype, of rows of the embedding table."""
    x = rows.astype(dtype)
    return (
        x * jnp.asarray(config.d_model**0.5, dtype) if config.scaled_embeddings else x
    )


def layer_of(config: ModelConfig, weights: Params) -> Layer:
    """Return the module of a layer with these parameters."""
    module: Layer = nnx.merge(_layer_graph(config)[0], nnx.State(weights))
    return module


def layers_per_iteration(num_layers: int, layout: Layout) -> int:
    """Return the number of layers in one iteration of the scan.

    On CPU an unrolled step is a quarter faster and compiles no slower at these depths;
    elsewhere one layer per iteration keeps the program small at any depth.
    """
    unrolled = layout.platform == "cpu" and num_layers <= UNROLLED_LAYERS
    return num_layers if unrolled else 1


def _init(tensors: dict[str, Any], key: jax.Array) -> Params:
    """Draw normal values of each tensor's standard deviation.

    One draw serves all: compiling one per tensor takes several times as long.
    """
    leaves, structure = jax.tree.flatten(tensors, is_leaf=_is_tensor)
    sizes = [math.prod(t.shape) if t.std else 0 for t in leaves]
    noise = normal(key, sum(sizes))
    parts = jnp.split(noise, list(itertools.accumulate(sizes))[:-1])
    values = [
        t.std * part.reshape(t.shape)
        if t.std
        else jnp.full(t.shape, t.start, jnp.float32)
        for t, part in zip(leaves, parts, strict=True)
    ]
    params: Params = jax.tree.unflatten(structure, values)
    return params


def _tensors(config: ModelConfig) -> dict[str, Any]:
    """Describe all parameters; init and axes both follow from this."""

    def stacked(variable: Any) -> Tensor:
        metadata = variable.get_metadata()
        shape = (config.num_layers, *variable.get_value().shape)
        names = ("layers", *metadata["axes"])
        return Tensor(shape, names, metadata["std"], metadata["start"])

    d, v = config.d_model, config.vocab_size
    tensors = {
        "embedding": Tensor((v, d), ("vocab", "embed"), EMBEDDING_STD),
        "layers": nnx.to_pure_dict(_layer_graph(config)[1], extract_fn=stacked),
        "norm": Tensor((d,), ("embed",), 0.0, first_scale(config)),
    }
    if not config.tied_embeddings:
        tensors["unembedding"] = Tensor((d, v), ("embed", "vocab"), EMBEDDING_STD)
    return tensors


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _layer_graph(config: ModelConfig) -> tuple[Any, Any]:
    """Return a layer's structure and its abstract state."""
    return nnx.split(nnx.eval_shape(lambda: Layer(config)))


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
REMAT: dict[str, Callable[[Any], Any]] = {
    "none": lambda f: f,
    "full": lambda f: jax.checkpoint(f, prevent_cse=False, static_argnums=(2,)),
    "dots": lambda f: jax.checkpoint(
        f,
        prevent_cse=False,
        static_argnums=(2,),
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
    "attention": lambda f: jax.checkpoint(
        f,
        prevent_cse=False,
        static_argnums=(2,),
        policy=jax.checkpoint_policies.save_only_these_names(ATTENDED),
    ),
}
"""Parts of each layer that the backward pass computes again: nothing, all, all but the
products with weights, all but attention."""


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
