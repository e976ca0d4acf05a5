"""The bundled model: a decoder-only transformer, with low-rank adapters if the config
asks for them.

A layer is a flax nnx module; its parameters leave as a plain nested dict, all layers
stacked on a leading axis (`layers.py`). The config's switches make the families.

First values are drawn a block at a time: `jax.random.normal` holds four arrays of the
size of its result while it draws, which would be the coordinator's peak of memory at
full size. A block depends on its number alone, so the coordinator and its workers draw
a layer of a tensor at a time, each of what it has, on all cores.

The loss is the cross entropy of the next token, without all logits at once. With 256 k
words the logits of a batch take more memory than the model. They are computed one chunk
of positions at a time, and again in the backward pass.

Adapters are small products that are added to a layer's frozen matrices. A matrix W of
shape [*in, *out] becomes W + s A B, with A [*in, r] drawn, B [r, *out] zero at the
start and s = alpha / r (LoRA, arXiv 2106.09685). A and B alone are trained, sent and
merged. The sum is made in the layer, so that memory holds one layer's.

`B` sequences, `T` tokens, `C` positions of a chunk, `D` model, `H` head, `L` layers,
`V` vocabulary, `r` rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend.random import threefry2x32_p

from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.config.config import require_switches
from diloco_jax.core.fragments import EXPERT, LAYERS
from diloco_jax.data.pictures import COUNT, PICTURES
from diloco_jax.data.source import SEGMENTS, TOKENS, WEIGHTS
from diloco_jax.data.tokenizers import VOCAB_SIZE
from diloco_jax.models import experts, vision
from diloco_jax.models.layers import (
    ACTIVATIONS,
    ATTENDED,
    ATTENTION,
    Layer,
    Tensor,
    axes_of,
    first_scale,
    frequencies,
    is_tensor,
    restarted,
    rms_norm,
    rotations,
    run_layers,
    stacked,
)
from diloco_jax.models.model import (
    Batch,
    Frozen,
    Layout,
    Metrics,
    Model,
    Params,
    Use,
    split_batch,
    weighted_loss,
)

NOISE_BLOCK = 1 << 20
"""Values drawn at a time; a power of two, so that the low half of a counter never
overflows inside a block."""


def normal(key: jax.Array, count: int) -> jax.Array:
    """Draw f32[count], bit for bit as `jax.random.normal(key, (count,))` does.

    This needs a generator whose bits depend on key and index alone: threefry with
    `jax_threefry_partitionable`. With any other, `jax.random.normal` draws the values.
    """
    if not _in_blocks(key, count):
        return jax.random.normal(key, (count,), jnp.float32)
    block = functools.partial(_block, *jax.random.key_data(key))
    blocks = jax.lax.map(block, jnp.arange(-(-count // NOISE_BLOCK), dtype=jnp.uint32))
    values: jax.Array = blocks.reshape(-1)[:count]
    return values


def _in_blocks(key: jax.Array, count: int) -> bool:
    """Tell whether so many values are several blocks, each a function of its number."""
    partitionable: bool = getattr(jax.config, "jax_threefry_partitionable", False)
    threefry = str(jax.random.key_impl(key)) == "threefry2x32"
    return count > NOISE_BLOCK and partitionable and threefry


def _block(first: jax.Array, second: jax.Array, index: jax.Array) -> jax.Array:
    """Return a block's values, f32[NOISE_BLOCK]. first, second: data of the key."""
    one, other = threefry2x32_p.bind(  # type: ignore[no-untyped-call]
        first, second, *counters(index)
    )
    return _normal_of(one ^ other)


def counters(index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the indices of a block's values, of 64 bits: high and low halves."""
    per_high = 2**32 // NOISE_BLOCK
    high = jnp.broadcast_to(index // per_high, (NOISE_BLOCK,))
    start = (index % per_high) * np.uint32(NOISE_BLOCK)
    return high, start + jnp.arange(NOISE_BLOCK, dtype=jnp.uint32)


def _normal_of(bits: jax.Array) -> jax.Array:
    """Return the normal values that jax makes of random bits."""
    mantissa = (bits >> 9) | np.float32(1).view(np.uint32)
    unit = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(low, unit * (np.float32(1) - low) + low)
    return jnp.multiply(np.float32(np.sqrt(2)), jax.lax.erf_inv(uniform))


LOGITS_AT_A_TIME = 1 << 27
"""Logits of each sequence that stand at a time: 512 MiB of f32."""


def positions_at_a_time(vocab_size: int) -> int:
    """Return the default of C: in practice all, up to some ten thousand words."""
    return max(LOGITS_AT_A_TIME // vocab_size, 1)


def token_losses(
    x: jax.Array, table: jax.Array, targets: jax.Array, chunk: int, layout: Layout
) -> jax.Array:
    """Return the cross entropies in nats, f32 [B, T].

    Args:
      x: the last activations, [B, T, D].
      table: the output embedding, [D, V].
      targets: int32 [B, T].
      chunk: C; 0 = T.
      layout: layout on the mesh.
    """

    def losses(x: jax.Array, targets: jax.Array) -> jax.Array:
        logits = jnp.matmul(x, table, preferred_element_type=jnp.float32)
        logits = layout.constrain(logits, ("batch", None, "vocab"))
        found: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
            logits, targets
        )
        return found

    length = targets.shape[1]
    if chunk < 1 or chunk >= length:
        return losses(x, targets)
    count = -(-length // chunk)

    def cut(a: jax.Array) -> jax.Array:
        """Cut [B, T, ...] into [count, B, C, ...], the end filled with zeros."""
        missing = count * chunk - length
        a = jnp.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2))
        return a.reshape(a.shape[0], count, chunk, *a.shape[2:]).swapaxes(0, 1)

    remade = jax.checkpoint(losses, prevent_cse=False)
    parts: jax.Array = jax.lax.map(lambda part: remade(*part), (cut(x), cut(targets)))
    return parts.swapaxes(0, 1).reshape(-1, count * chunk)[:, :length]


ADAPTED_AXES = {
    "attention/query": 1,
    "attention/key": 1,
    "attention/value": 1,
    "attention/output": 2,
    "mlp/gate": 1,
    "mlp/up": 1,
    "mlp/down": 1,
}
"""Matrices that are adapted, with the number of their axes that are summed over."""


def adapter_scale(config: ModelConfig) -> float:
    """Return s."""
    return (config.lora_alpha or config.lora_rank) / config.lora_rank


def adapter_stacks(config: ModelConfig, half: str) -> int:
    """Return the number of leading axes that stack the matrices of a half of the
    layers: layers, and experts in them."""
    return 2 if half == "mlp" and config.experts else 1


def adapter_tensors(config: ModelConfig, layers: dict[str, Any]) -> dict[str, Any]:
    """Describe the adapters of the stacked layers' tensors, by half and name; each
    expert of a layer has its own."""
    adapted: dict[str, Any] = {}
    for path, axes in ADAPTED_AXES.items():
        half, name = path.split("/")
        base: Tensor = layers[half][name]
        stacks = adapter_stacks(config, half)
        inside, outside = stacks + axes, len(base.shape)
        rank = config.lora_rank
        fan_in = math.prod(base.shape[stacks:inside])
        adapted.setdefault(half, {})[name] = {
            "a": Tensor(
                (*base.shape[:inside], rank), (*base.axes[:inside], None), fan_in**-0.5
            ),
            "b": Tensor(
                (*base.shape[:stacks], rank, *base.shape[inside:outside]),
                (*base.axes[:stacks], None, *base.axes[inside:outside]),
                0.0,
            ),
        }
    return adapted


def with_adapters(config: ModelConfig, weights: Any, adapters: Any) -> Any:
    """Return one layer's weights with its adapters added; both without axis L."""
    product = functools.partial(adapter_product, factor=adapter_scale(config))
    out = {
        half: dict(own) if isinstance(own, dict) else own
        for half, own in weights.items()
    }
    for half, names in adapters.items():
        for name, pair in names.items():
            several = adapter_stacks(config, half) > 1
            added = jax.vmap(product)(pair) if several else product(pair)
            out[half][name] = weights[half][name] + added
    return out


def adapter_product(pair: Any, factor: float) -> jax.Array:
    """Return s A B of one layer, in the shape of its matrix."""
    a, b = pair["a"], pair["b"]
    rank = b.shape[0]
    flat = a.reshape(-1, rank) @ b.reshape(rank, -1)
    added: jax.Array = jnp.asarray(factor, flat.dtype) * flat.reshape(
        *a.shape[:-1], *b.shape[1:]
    )
    return added


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
    pictures: int = 1,
    length: int = 1,
) -> Model:
    """Return the transformer of this config. With `lora_rank` its parameters are the
    adapters, and its weights are frozen; with `train`, its parameters are those parts,
    and the others are frozen. Somebody else has to give the frozen values.

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
      pictures: most pictures of a row, of a model that takes pictures.
      length: T of the run, which bounds the pictures that islands may count.

    Raises:
      ConfigError: sizes that do not fit together.
    """
    _validate(config)
    layout = layout or Layout.of_one_device()
    dtype, wrap = DTYPES[compute_dtype], REMAT[remat]
    attend = functools.partial(ATTENTION[attention], layout)
    if loss_chunk is None:
        loss_chunk = positions_at_a_time(config.vocab_size)
    # In an unrolled scan the compiler could merge the repeated work again.
    per_iteration = 1
    if remat == "none":
        per_iteration = layers_per_iteration(config.num_layers, layout)
    tensors = _tensors(config)
    adapters = adapter_tensors(config, tensors["layers"]) if config.lora_rank else {}
    axes, adapters_axes = axes_of(tensors), axes_of(adapters)

    def gathered(weights: Any, names: Any) -> Any:
        """Gather one layer's weights, except along the axes that the layout cuts."""
        return jax.tree.map(lambda w, n: layout.gather(w, n[1:]), weights, names)

    def loss(
        params: Params, batch: Batch, added: Params | None = None
    ) -> tuple[jax.Array, Metrics]:
        """added: adapters of the layers."""
        inputs, targets, weights = split_batch(batch)
        if config.vision.layers:
            weights = jnp.where(targets == config.vision.token, 0, weights)
        segments = batch["segments"][:, :-1] if "segments" in batch else None
        # The gradient of a row is a sum over its tokens, in the dtype of the lookup: in
        # bf16 it would stop growing at some hundreds of them.
        rows = layout.constrain(params["embedding"], axes["embedding"])[inputs]
        x = layout.constrain(embedded(config, rows, dtype), STREAM)
        params, added = jax.tree.map(lambda p: p.astype(dtype), (params, added))
        if PICTURES in batch:
            seen = vision.features(config, params, batch[PICTURES], layout, wrap)
            x = vision.placed(config, x, inputs, seen, batch[COUNT])
        # `gather` would sum the gradient of the table once for each chunk of logits.
        embedding = layout.constrain(params["embedding"], axes["embedding"])
        stacked = params["layers"] if added is None else (params["layers"], added)
        x, use = apply_layers(stacked, x, segments)
        x = rms_norm(config, x, params["norm"])
        if config.tied_embeddings:
            table = embedding.T
        else:
            table = layout.constrain(params["unembedding"], axes["unembedding"])
        losses = token_losses(x, table, targets, loss_chunk, layout)
        found, metrics = weighted_loss(losses, weights)
        if use is None:
            return found, metrics
        balance = experts.balance_loss(use)
        metrics |= {"balance_loss": balance, "expert_tokens": use.tokens}
        return found + config.balance_loss * balance, metrics

    def whole_layer(weights: Any) -> Params:
        """Gather a layer's weights, with its adapters added if there are any."""
        if not adapters:
            found: Params = gathered(weights, axes["layers"])
            return found
        base, own = weights
        whole = gathered(base, axes["layers"])
        summed: Params = with_adapters(config, whole, gathered(own, adapters_axes))
        return summed

    def apply_layers(
        stacked: Any, x: jax.Array, segments: jax.Array | None
    ) -> tuple[jax.Array, experts.Routed | None]:
        turns, kinds = {}, {}
        for windowed in (False, True):
            turned = rotations(x.shape[1], frequencies(config, windowed=windowed))
            turns[windowed] = (
                turned if segments is None else restarted(turned, segments)
            )
            kinds[windowed] = functools.partial(
                attend, window=config.window * windowed, segments=segments
            )

        real = None if segments is None else segments != 0
        mix = functools.partial(
            experts.mix, config, ACTIVATIONS[config.activation], layout
        )

        def layer(x: jax.Array, weights: Any, windowed: bool) -> tuple[jax.Array, Any]:
            use = None

            def send(x: jax.Array, weights: experts.Experts) -> jax.Array:
                nonlocal use
                added, use = mix(x, real, weights)
                return added

            module = layer_of(config, whole_layer(weights))
            x = module(x, turns[windowed], kinds[windowed], layout.constrain, send)
            return layout.constrain(x, STREAM), use

        return run_layers(config, x, stacked, wrap(layer), per_iteration)

    own, rest = tensors, dict[str, Any]()
    uses = _uses(config, axes) | vision.uses(config, pictures, length)
    if adapters:
        own, rest, uses = {"layers": adapters}, tensors, {}
    elif config.train:
        own = {n: t for n, t in tensors.items() if vision.part_of((n,)) in config.train}
        rest = {name: part for name, part in tensors.items() if name not in own}

    def loss_of_parts(
        params: Params, batch: Batch, frozen: Params
    ) -> tuple[jax.Array, Metrics]:
        if adapters:
            return loss(frozen, batch, params["layers"])
        return loss({**params, **frozen}, batch)

    shapes = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t.shape, dtype),  # type: ignore[no-untyped-call]
        rest,
        is_leaf=is_tensor,
    )
    takes = vision.picture_input(config)
    return Model(
        lambda key: _init(own, key),
        loss_of_parts if rest else loss,
        axes_of(own),
        {**BATCH, **(takes.fields(pictures) if takes else {})},
        Frozen(shapes, axes_of(rest)) if rest else None,
        takes,
        {path: use for path, use in uses.items() if path.split("/")[0] in own},
        functools.partial(_draw, own),
    )


def _uses(config: ModelConfig, axes: Any) -> dict[str, Use]:
    """Return the tensors that only some tokens touch: the input table, unless it is the
    output's too, and the experts."""
    count = functools.partial(input_counts, config.vocab_size)
    uses = {} if config.tied_embeddings else {"embedding": Use(count)}
    named = jax.tree_util.tree_leaves_with_path(
        axes, is_leaf=lambda node: isinstance(node, tuple)
    )
    for path, names in named:
        if names[:2] == (LAYERS, EXPERT):
            name = "/".join(key.key for key in path)
            uses[name] = Use("expert_tokens", config.experts_per_token)
    return uses


def input_counts(vocab_size: int, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return how often each token is an input, uint32 [vocab_size]; padding is none."""
    inputs = batch["tokens"][:, :-1]
    if "segments" in batch:
        inputs = inputs[batch["segments"][:, :-1] != 0]
    counts = np.bincount(inputs.ravel(), minlength=vocab_size)
    return counts.astype(np.uint32)


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
    leaves, structure = jax.tree.flatten(tensors, is_leaf=is_tensor)
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


class _Layers(Sequence[np.ndarray]):
    """The layers of a tensor, each drawn where it is asked for."""

    def __init__(self, count: int, draw: Callable[[int], np.ndarray]) -> None:
        self._count, self._draw = count, draw

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, layer: Any) -> Any:
        if not 0 <= layer < self._count:
            raise IndexError(f"there is no layer {layer}, but {self._count}")
        return self._draw(layer)


def _draw(tensors: dict[str, Any], key: jax.Array) -> Params:
    """Return what `_init` does, bit for bit, for `core.fragments.get_piece`: where it
    takes several blocks, stacked tensors as `_Layers`. Any thread may ask them."""
    leaves, structure = jax.tree.flatten(tensors, is_leaf=is_tensor)
    sizes = [math.prod(t.shape) if t.std else 0 for t in leaves]
    if not _in_blocks(key, sum(sizes)):
        params: Params = jax.jit(functools.partial(_init, tensors))(key)
        return params
    block = jax.jit(functools.partial(_block, *jax.random.key_data(key)))

    def values(
        tensor: Tensor, start: int, shape: Sequence[int], each: Callable[..., Any] = map
    ) -> np.ndarray:
        """Return part of a tensor, whose noise begins at that number. each: `map`."""
        if not tensor.std:
            return np.full(shape, tensor.start, np.float32)
        first, stop = start // NOISE_BLOCK, start + math.prod(shape)
        numbers = range(first, -(-stop // NOISE_BLOCK))
        noise = np.empty((len(numbers), NOISE_BLOCK), np.float32)

        def fill(number: int) -> None:
            noise[number - first] = block(np.uint32(number))

        list(each(fill, numbers))
        skipped = first * NOISE_BLOCK
        own = noise.reshape(-1)[start - skipped : stop - skipped].reshape(shape)
        return np.multiply(own, np.float32(tensor.std), out=own)

    def parts(tensor: Tensor, start: int) -> Any:
        if tensor.axes[:1] != (LAYERS,):
            with ThreadPoolExecutor() as pool:
                return values(tensor, start, tensor.shape, pool.map)
        count, *shape = tensor.shape
        size = math.prod(shape) if tensor.std else 0
        return _Layers(count, lambda layer: values(tensor, start + layer * size, shape))

    starts = itertools.accumulate(sizes, initial=0)
    drawn: Params = jax.tree.unflatten(structure, list(map(parts, leaves, starts)))
    return drawn


def _tensors(config: ModelConfig) -> dict[str, Any]:
    """Describe all parameters; init and axes both follow from this."""

    def described(variable: Any) -> Tensor:
        shape = variable.get_value().shape
        own = variable.get_metadata()
        return stacked(config.num_layers, shape, own["axes"], own["std"], own["start"])

    d, v = config.d_model, config.vocab_size
    tensors = {
        "embedding": Tensor((v, d), ("vocab", "embed"), EMBEDDING_STD),
        "layers": nnx.to_pure_dict(_layer_graph(config)[1], extract_fn=described),
        "norm": Tensor((d,), ("embed",), 0.0, first_scale(config)),
    }
    if not config.tied_embeddings:
        tensors["unembedding"] = Tensor((d, v), ("embed", "vocab"), EMBEDDING_STD)
    return tensors | vision.tensors(config)


def _layer_graph(config: ModelConfig) -> tuple[Any, Any]:
    """Return a layer's structure and its abstract state."""
    return nnx.split(nnx.eval_shape(lambda: Layer(config)))


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
POLICIES = jax.checkpoint_policies


def _again(policy: Any = None) -> Callable[[Any], Any]:
    """Return a function that has a layer computed again, but for what a policy
    saves."""
    return functools.partial(
        jax.checkpoint, prevent_cse=False, static_argnums=(2,), policy=policy
    )


def _is_product(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Tell if an operation is a product with weights, of all rows or by groups."""
    if primitive.name == "ragged_dot_general":
        return True
    plain: bool = POLICIES.dots_with_no_batch_dims_saveable(
        primitive, *inputs, **params
    )
    return plain


REMAT: dict[str, Callable[[Any], Any]] = {
    "none": lambda f: f,
    "full": _again(),
    "dots": _again(_is_product),
    "attention": _again(POLICIES.save_only_these_names(ATTENDED)),
}
"""Parts of each layer that the backward pass computes again: nothing, all, all but the
products with weights, all but attention."""


def _validate(config: ModelConfig) -> None:
    require_switches(config)
    if config.vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"model.vocab_size = {config.vocab_size}; tokens are bytes, so it must be "
            f"at least {VOCAB_SIZE}"
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
    vision.validate(config)
