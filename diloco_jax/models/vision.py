"""The tower: pictures as inputs of the decoder, as SigLIP's in Idefics3 and SmolVLM.

A picture is cut into patches by a reshape, and each patch is a product with one matrix
and has a position of its own. Every patch attends to all of its picture. The connector
joins squares of `shuffle` x `shuffle` patches (pixel shuffle) and projects them to the
decoder's width. These inputs stand in the places of the token `vision.token`, in their
order; the decoder sees them as it sees words, each after those before it.

Values of a picture's bytes are from -1 to 1, as in the published models. Attention is
the plain formula on every device.

`B` sequences, `N` pictures of each, `S` pixels of a side, `P` those of a patch, `n`
patches of a picture, `W` width of the tower, `D` model, `T` tokens.

Sources: vision transformer arXiv 2010.11929, SigLIP 2303.15343, Idefics3 2408.12637,
SmolVLM 2504.05299. `transformers` rounds positions so that some grids (19, 25 and 29
patches a side are the smallest) have one twice and lack another; here each patch has
its own. Published grids (26, 27, 32) are the same in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from diloco_jax.config import ConfigError, ModelConfig
from diloco_jax.data.pictures import COUNT, PictureInput
from diloco_jax.models.layers import (
    ACTIVATIONS,
    ATTENDED,
    HEADS,
    Tensor,
    axes_of,
    project,
    residual_scale,
    stacked,
)
from diloco_jax.models.model import Layout, Params, Use

EPSILON = 1e-6
"""Added to the variance in a norm; that of all published towers."""
PARTS = ("tower", "connector")
"""Parts of a model's parameters, beside those of the decoder."""
STREAM = ("batch", None, None)


def part_of(path: tuple[str, ...]) -> str:
    """Return the part that a parameter belongs to, as `model.train` names it."""
    return path[0] if path[0] in PARTS else "decoder"


def tensors(config: ModelConfig) -> dict[str, Any]:
    """Describe the parameters of tower and connector; {} of a model without."""
    vision = config.vision
    if not vision.layers:
        return {}
    width, hidden = vision.width, vision.mlp_dim
    heads = (vision.heads, width // vision.heads)
    std, last = width**-0.5, residual_scale(vision.layers)
    tensor = functools.partial(stacked, vision.layers)
    wide = tensor((width,), ("embed",))
    norm = {"scale": tensor((width,), ("embed",), start=1), "bias": wide}
    inward = tensor((width, *heads), ("embed", "heads", "head_dim"), std)
    attention = {
        **dict.fromkeys(("query", "key", "value"), inward),
        **dict.fromkeys(
            ("query_bias", "key_bias", "value_bias"), tensor((width,), ("heads",))
        ),
        "output": tensor((*heads, width), ("heads", "head_dim", "embed"), std * last),
        "output_bias": wide,
    }
    mlp = {
        "up": tensor((width, hidden), ("embed", "mlp"), std),
        "up_bias": tensor((hidden,), ("mlp",)),
        "down": tensor((hidden, width), ("mlp", "embed"), hidden**-0.5 * last),
        "down_bias": wide,
    }
    values = 3 * vision.patch**2
    joined = width * vision.shuffle**2
    tower = {
        "patches": Tensor((values, width), (None, "embed"), values**-0.5),
        "patches_bias": Tensor((width,), ("embed",), 0.0),
        "positions": Tensor(
            ((vision.side // vision.patch) ** 2, width), (None, "embed"), std
        ),
        "layers": {
            "attention_norm": norm,
            "attention": attention,
            "mlp_norm": norm,
            "mlp": mlp,
        },
        "norm": {
            "scale": Tensor((width,), ("embed",), 0.0, 1.0),
            "bias": Tensor((width,), ("embed",), 0.0),
        },
    }
    projection = Tensor((joined, config.d_model), ("mlp", "embed"), joined**-0.5)
    return {"tower": tower, "connector": {"projection": projection}}


def picture_input(config: ModelConfig) -> PictureInput | None:
    """Return the pictures that a model takes; None if it takes none."""
    vision = config.vision
    if not vision.layers:
        return None
    return PictureInput(
        side=vision.side, tokens=vision.tokens_per_picture, token=vision.token
    )


def uses(config: ModelConfig, most: int, length: int) -> dict[str, Use]:
    """Return the tensors that only pictures touch, each as a whole. most: pictures of a
    row. length: T."""
    use = Use(picture_count, most / length, as_one=True)
    leaves = jax.tree_util.tree_leaves_with_path(axes_of(tensors(config)), is_leaf=_is)
    return {"/".join(key.key for key in path): use for path, _ in leaves}


def picture_count(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the number of pictures of some rows, uint32 [1]."""
    return np.array([np.sum(batch.get(COUNT, 0))], np.uint32)


Wrap = Callable[[Any], Any]
"""Has a layer computed again in the backward pass, or not (`transformer.REMAT`)."""


def features(
    config: ModelConfig,
    params: Params,
    pictures: jax.Array,
    layout: Layout,
    wrap: Wrap = lambda layer: layer,
) -> jax.Array:
    """Return the inputs that pictures give the decoder, [B, N tokens_per_picture, D].

    params: those of tower and connector, in the dtype that is computed in. pictures:
    uint8 [B, N, S, S, 3].
    """
    rows, count = pictures.shape[:2]
    tower, names = params["tower"], axes_of(tensors(config))
    dtype = tower["patches"].dtype

    def use(weight: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        return layout.gather(weight, axes)

    flat = pictures.reshape(rows * count, *pictures.shape[2:])
    values = patches(config, flat).astype(jnp.float32) / 127.5 - 1
    x = project(values.astype(dtype), use(tower["patches"], names["tower"]["patches"]))
    x = layout.constrain(x + tower["patches_bias"] + tower["positions"], STREAM)
    of_layer = jax.tree.map(
        lambda axes: axes[1:], names["tower"]["layers"], is_leaf=_is
    )

    def layer(x: jax.Array, own: Any, _: bool) -> jax.Array:
        own = jax.tree.map(use, own, of_layer)
        x = x + _attend(layer_norm(x, own["attention_norm"]), own["attention"], layout)
        x = x + _mlp(layer_norm(x, own["mlp_norm"]), own["mlp"], layout)
        return layout.constrain(x, STREAM)

    again = wrap(layer)
    x, _ = jax.lax.scan(lambda x, own: (again(x, own, False), None), x, tower["layers"])
    joined = shuffled(layer_norm(x, tower["norm"]), config.vision.shuffle)
    projection = use(
        params["connector"]["projection"], names["connector"]["projection"]
    )
    found = project(joined, projection)
    return layout.constrain(found.reshape(rows, -1, config.d_model), STREAM)


def patches(config: ModelConfig, pictures: jax.Array) -> jax.Array:
    """Cut pictures, [M, S, S, 3], into patches, [M, n, 3 P P], colour by colour. Pixels
    beyond the last whole patch are left out."""
    side = config.vision.patch
    grid = config.vision.side // side
    whole = pictures[:, : grid * side, : grid * side]
    cut = whole.reshape(-1, grid, side, grid, side, 3).transpose(0, 1, 3, 5, 2, 4)
    return cut.reshape(-1, grid * grid, 3 * side * side)


def shuffled(x: jax.Array, side: int) -> jax.Array:
    """Join squares of side x side patches: [M, n, W] to [M, n / side^2, W side^2]."""
    count, width = x.shape[1:]
    grid = round(count**0.5)
    squares = x.reshape(-1, grid // side, side, grid // side, side, width)
    squares = squares.transpose(0, 1, 3, 2, 4, 5)
    return squares.reshape(-1, count // side**2, width * side**2)


def placed(
    config: ModelConfig, x: jax.Array, tokens: jax.Array, found: jax.Array, counts: Any
) -> jax.Array:
    """Put pictures in the places of `vision.token`, in their order.

    Args:
      x: embeddings of the tokens, [B, T, D].
      tokens: int32 [B, T].
      found: what `features` gives.
      counts: pictures of each row, int32 [B]; places beyond theirs keep their words.
    """
    here = tokens == config.vision.token
    order = jnp.cumsum(here, axis=1) - 1
    inside = here & (order < counts[:, None] * config.vision.tokens_per_picture)
    picked = jax.vmap(lambda rows, places: rows[places])(
        found, jnp.clip(order, 0, found.shape[1] - 1)
    )
    return jnp.where(inside[..., None], picked.astype(x.dtype), x)


def layer_norm(x: jax.Array, own: Params) -> jax.Array:
    """Return the normalised x over its last axis, computed in f32, in x's dtype."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPSILON)
    scale, bias = (own[name].astype(jnp.float32) for name in ("scale", "bias"))
    lead = range(x.ndim - 1)
    y = y * jnp.expand_dims(scale, lead) + jnp.expand_dims(bias, lead)
    return y.astype(x.dtype)


def product(own: Params, name: str, x: jax.Array, axes: int = 1) -> jax.Array:
    """Contract the last `axes` axes of x with the first of a matrix; add its bias."""
    made = project(x, own[name], axes)
    bias: jax.Array = own[f"{name}_bias"]
    return made + bias.reshape(made.shape[x.ndim - axes :])


def _attend(x: jax.Array, own: Params, layout: Layout) -> jax.Array:
    sides = (product(own, name, x) for name in ("query", "key", "value"))
    query, key, value = (layout.constrain(side, HEADS) for side in sides)
    mixed = jax.nn.dot_product_attention(query, key, value)
    mixed = checkpoint_name(mixed, ATTENDED)  # type: ignore[no-untyped-call]
    return product(own, "output", mixed, axes=2)


def _mlp(x: jax.Array, own: Params, layout: Layout) -> jax.Array:
    hidden = ACTIVATIONS["gelu_tanh"](product(own, "up", x))
    return product(own, "down", layout.constrain(hidden, ("batch", None, "mlp")))


def _is(value: Any) -> bool:
    return isinstance(value, tuple)


def validate(config: ModelConfig) -> None:
    """Raise ConfigError, naming field and values, unless the sizes of the tower and the
    parts that are trained fit together."""
    vision, trained = config.vision, ", ".join(config.train)
    if trained and not vision.layers:
        raise ConfigError(
            f"model.train = {trained}, and the model takes no pictures "
            f"(model.vision.layers = 0): it has one part; leave model.train empty"
        )
    if trained and config.lora_rank:
        raise ConfigError(
            f"model.train = {trained} with model.lora_rank = {config.lora_rank}: "
            f"adapters are trained alone; leave one of both out"
        )
    if {*config.train} == {*PARTS, "decoder"}:
        raise ConfigError(
            f"model.train = {trained}, which are all parts; leave it empty, or one out"
        )
    if not vision.layers:
        return
    if vision.width % vision.heads:
        raise ConfigError(
            f"model.vision.width = {vision.width} is not a multiple of "
            f"model.vision.heads = {vision.heads}; choose a multiple"
        )
    grid = vision.side // vision.patch
    if grid < 1 or grid % vision.shuffle:
        raise ConfigError(
            f"model.vision.side = {vision.side} has room for {grid} patches a side of "
            f"model.vision.patch = {vision.patch} pixels, which model.vision.shuffle = "
            f"{vision.shuffle} does not divide; choose a side of a multiple of "
            f"{vision.patch * vision.shuffle} pixels"
        )
    if vision.token >= config.vocab_size:
        raise ConfigError(
            f"model.vision.token = {vision.token}, and the model has tokens from 0 to "
            f"{config.vocab_size - 1} (model.vocab_size); give one of them that no "
            f"text has"
        )
