"""Names and shapes of a model's tensors in the files of Hugging Face's tools.

Every tensor of a file is a view of one of ours, a layer at a time, so that one table
serves both directions and no value changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from diloco_jax.config import ModelConfig
from diloco_jax.models import transformer

OUTSIDE = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
IN_A_LAYER = {
    "attention_norm/scale": "input_layernorm.weight",
    "attention/query": "self_attn.q_proj.weight",
    "attention/key": "self_attn.k_proj.weight",
    "attention/value": "self_attn.v_proj.weight",
    "attention/output": "self_attn.o_proj.weight",
    "attention/query_bias": "self_attn.q_proj.bias",
    "attention/key_bias": "self_attn.k_proj.bias",
    "attention/value_bias": "self_attn.v_proj.bias",
    "attention/output_bias": "self_attn.o_proj.bias",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp/gate": "mlp.gate_proj.weight",
    "mlp/up": "mlp.up_proj.weight",
    "mlp/down": "mlp.down_proj.weight",
    "mlp/gate_bias": "mlp.gate_proj.bias",
    "mlp/up_bias": "mlp.up_proj.bias",
    "mlp/down_bias": "mlp.down_proj.bias",
}
WITH_POST_NORMS = {
    "attention_post_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
}
OUTWARD = ("attention/output", "mlp/down")
"""Matrices whose last axis is the residual stream: theirs have it first."""


class FileTensor(NamedTuple):
    """A tensor of a file, and the parameter, or layer of one, that it is."""

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    layer: int
    """-1: the whole parameter."""
    ours: tuple[int, ...]
    """Shape of the parameter, or of one layer of it."""

    @property
    def is_norm(self) -> bool:
        """True for the scale of a norm."""
        return self.path[-1] in ("scale", "norm")

    def view(self, array: np.ndarray) -> np.ndarray:
        """Return the parameter as a view of the file's array."""
        if len(self.ours) == 1 or self.path == ("embedding",):
            return array.reshape(self.ours)
        if "/".join(self.path[1:]) in OUTWARD:
            return np.moveaxis(array.reshape(self.ours[-1], *self.ours[:-1]), 0, -1)
        return np.moveaxis(array.reshape(*self.ours[1:], self.ours[0]), -1, 0)


def tensors(model: ModelConfig) -> list[FileTensor]:
    """List all tensors of the bundled transformer, the layers in their order."""
    names = IN_A_LAYER | (WITH_POST_NORMS if model.post_norms else {})
    found = []
    whole = dataclasses.replace(model, lora_rank=0)
    leaves = jax.tree_util.tree_leaves_with_path(transformer.build(whole).shapes())
    for keys, leaf in leaves:
        path = tuple(key.key for key in keys)
        if path[0] != "layers":
            found.append(_tensor(OUTSIDE[path[0]], path, -1, leaf.shape))
            continue
        name = names["/".join(path[1:])]
        found += [
            _tensor(f"model.layers.{layer}.{name}", path, layer, leaf.shape[1:])
            for layer in range(model.num_layers)
        ]
    return sorted(found, key=lambda t: (t.name == OUTSIDE["unembedding"], t.layer))


def views(
    model: ModelConfig, arrays: Mapping[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Return the model's parameters as views of a file's arrays by name; a stacked one
    is a list of its layers."""
    params: dict[str, Any] = {}
    for tensor in tensors(model):
        node = params
        for key in tensor.path[:-1]:
            node = node.setdefault(key, {})
        value = tensor.view(arrays[tensor.name])
        if tensor.layer < 0:
            node[tensor.path[-1]] = value
        else:
            node.setdefault(tensor.path[-1], []).append(value)
    return params


def _tensor(
    name: str, path: tuple[str, ...], layer: int, ours: tuple[int, ...]
) -> FileTensor:
    shape = ours
    if len(ours) > 1 and path != ("embedding",):
        outward = "/".join(path[1:]) in OUTWARD
        stream = ours[-1] if outward else ours[0]
        other = math.prod(ours) // stream
        shape = (stream, other) if outward else (other, stream)
    return FileTensor(name, shape, path, layer, ours)
