"""Tensors in files of Hugging Face's tools: their names and shapes, and safetensors.

Every tensor of a file is a view of one of ours, a layer at a time, so that one table
serves both directions and no value changes.

Folders of safetensors files are mapped for reading, and filled in place for writing.
The library checks a file as a whole. Arrays are then views of the mapped file, since
the library's own functions hold whole tensors to read, and whole files to write.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from diloco_jax.config import ModelConfig
from diloco_jax.data import tokenizers
from diloco_jax.errors import ConfigError
from diloco_jax.files import how_to_mend, parse_json
from diloco_jax.models import transformer
from diloco_jax.models.vision import part_of

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
BESIDE_DECODER = {
    "tower/patches": "model.vision_model.embeddings.patch_embedding.weight",
    "tower/patches_bias": "model.vision_model.embeddings.patch_embedding.bias",
    "tower/positions": "model.vision_model.embeddings.position_embedding.weight",
    "tower/norm/scale": "model.vision_model.post_layernorm.weight",
    "tower/norm/bias": "model.vision_model.post_layernorm.bias",
    "connector/projection": "model.connector.modality_projection.proj.weight",
}
IN_A_TOWER_LAYER = {
    "attention_norm/scale": "layer_norm1.weight",
    "attention_norm/bias": "layer_norm1.bias",
    **{
        f"attention/{ours}{tail}": f"self_attn.{theirs}.{kind}"
        for ours, theirs in (
            ("query", "q_proj"),
            ("key", "k_proj"),
            ("value", "v_proj"),
            ("output", "out_proj"),
        )
        for tail, kind in (("", "weight"), ("_bias", "bias"))
    },
    "mlp_norm/scale": "layer_norm2.weight",
    "mlp_norm/bias": "layer_norm2.bias",
    "mlp/up": "mlp.fc1.weight",
    "mlp/up_bias": "mlp.fc1.bias",
    "mlp/down": "mlp.fc2.weight",
    "mlp/down_bias": "mlp.fc2.bias",
}
OF_EXPERTS = {
    "mlp/router": "mlp.gate.weight",
    "mlp/gate": "mlp.experts.{expert}.gate_proj.weight",
    "mlp/up": "mlp.experts.{expert}.up_proj.weight",
    "mlp/down": "mlp.experts.{expert}.down_proj.weight",
}
OF_MIXTRAL = {
    "mlp/router": "block_sparse_moe.gate.weight",
    "mlp/gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "mlp/up": "block_sparse_moe.experts.{expert}.w3.weight",
    "mlp/down": "block_sparse_moe.experts.{expert}.w2.weight",
}
OUTWARD = ("attention/output", "mlp/down")
"""Matrices whose last axis is the residual stream: theirs have it first."""
ROWS = (("embedding",), ("tower", "positions"))
"""Tables, which have one row a word or place in both."""


def names_in_a_layer(model: ModelConfig) -> dict[str, str]:
    """Return the names of a layer's tensors by ours; those of experts have a place for
    the expert's number. The families of experts differ in the norms of queries."""
    names = IN_A_LAYER | (WITH_POST_NORMS if model.post_norms else {})
    if model.experts:
        names |= OF_EXPERTS if model.qk_norm else OF_MIXTRAL
    return names


class FileTensor(NamedTuple):
    """A tensor of a file, and the parameter, or part of one, that it is."""

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    layer: int
    """-1: the whole parameter."""
    expert: int
    """-1: all of the layer."""
    ours: tuple[int, ...]
    """Shape of the parameter, or of one layer of it, or of one expert."""

    @property
    def is_norm(self) -> bool:
        """True for the scale of a norm of the decoder."""
        return self.path[-1] in ("scale", "norm") and part_of(self.path) == "decoder"

    def view(self, array: np.ndarray) -> np.ndarray:
        """Return the parameter as a view of the file's array."""
        if len(self.ours) == 1 or self.path in ROWS:
            return array.reshape(self.ours)
        if "/".join(self.path[-2:]) in OUTWARD:
            return np.moveaxis(array.reshape(self.ours[-1], *self.ours[:-1]), 0, -1)
        return np.moveaxis(array.reshape(*self.ours[1:], self.ours[0]), -1, 0)


class ExpertStack:
    """The experts of a layer, an array of a file each: joined where they are read, so
    that memory holds no more than one layer's."""

    def __init__(self, experts: list[np.ndarray]) -> None:
        self.experts = experts
        self.shape = (len(experts), *experts[0].shape)
        self.ndim, self.size = len(self.shape), math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        joined: np.ndarray = np.stack(self.experts)
        return joined if dtype is None else joined.astype(dtype)

    def reshape(self, *shape: int) -> np.ndarray:
        """Return the joined array in this shape."""
        return np.asarray(self).reshape(shape)

    def write(self, value: np.ndarray) -> None:
        """Write an array of all experts into theirs."""
        for own, new in zip(self.experts, value, strict=True):
            np.copyto(own, new, casting="same_kind")


def tensors(model: ModelConfig) -> list[FileTensor]:
    """List all tensors of the bundled transformer, the layers in their order."""
    names = names_in_a_layer(model)
    found = []
    whole = dataclasses.replace(model, lora_rank=0, train=())
    leaves = jax.tree_util.tree_leaves_with_path(transformer.build(whole).shapes())
    for keys, leaf in leaves:
        path = tuple(key.key for key in keys)
        several = False
        if path[0] == "layers":
            stack, name = "model.layers.", names["/".join(path[1:])]
            stack, several = decoder_name(model, stack), "{expert}" in name
        elif path[:2] == ("tower", "layers"):
            stack = "model.vision_model.encoder.layers."
            name = IN_A_TOWER_LAYER["/".join(path[2:])]
        else:
            named = BESIDE_DECODER.get("/".join(path))
            named = named or decoder_name(model, OUTSIDE[path[0]])
            found.append(_file_tensor(named, path, -1, -1, leaf.shape))
            continue
        for layer in range(leaf.shape[0]):
            there = f"{stack}{layer}.{name}"
            found += [
                _file_tensor(
                    there.format(expert=expert),
                    path,
                    layer,
                    expert,
                    leaf.shape[1 + several :],
                )
                for expert in (range(model.experts) if several else (-1,))
            ]
    return sorted(found, key=lambda t: (t.name == OUTSIDE["unembedding"], t.layer))


def decoder_name(model: ModelConfig, name: str) -> str:
    """Return a name of a decoder's tensor as it is in the model's files."""
    inside = model.vision.layers and name.startswith("model.")
    return f"model.text_{name}" if inside else name


def views(
    model: ModelConfig, arrays: Mapping[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Return the model's parameters as views of a file's arrays by name; a stacked one
    is a list of its layers, and experts an `ExpertStack` in it."""
    params: dict[str, Any] = {}
    for tensor in tensors(model):
        node = params
        for key in tensor.path[:-1]:
            node = node.setdefault(key, {})
        value = tensor.view(arrays[tensor.name])
        if tensor.layer < 0:
            node[tensor.path[-1]] = value
            continue
        layers = node.setdefault(tensor.path[-1], [])
        if tensor.expert < 0:
            layers.append(value)
        elif tensor.expert == 0:
            layers.append([value])
        else:
            layers[-1].append(value)
        if tensor.expert == model.experts - 1 >= 0:
            layers[-1] = ExpertStack(layers[-1])
    return params


def _file_tensor(
    name: str, path: tuple[str, ...], layer: int, expert: int, ours: tuple[int, ...]
) -> FileTensor:
    shape = ours
    if path == ("tower", "patches"):
        side = math.isqrt(ours[0] // 3)
        shape = (ours[1], 3, side, side)
    elif len(ours) > 1 and path not in ROWS:
        outward = "/".join(path[-2:]) in OUTWARD
        stream = ours[-1] if outward else ours[0]
        other = math.prod(ours) // stream
        shape = (stream, other) if outward else (other, stream)
    return FileTensor(name, shape, path, layer, expert, ours)


DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
GENERATION = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
BESIDE = (
    *(tokenizers.JSON_NAME, tokenizers.PIECES_NAME, *tokenizers.BESIDE),
    *("vocab.json", "merges.txt", "chat_template.json"),
    *(PREPROCESSOR, PROCESSOR, GENERATION),
)
"""Files beside a model's weights that an export hands on."""
SHARD_BYTES = 5 << 30
"""Most bytes of one file, unless a tensor alone has more."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise ConfigError, naming the file, if there is none."""
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}; give the folder of a model, with config.json and "
            f"safetensors files"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}); {how_to_mend(path)}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no JSON object; copy it again")
    return found


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor of a folder, by its index; raise ConfigError,
    naming that, if it is none."""
    where = read_json(index := folder / INDEX).get("weight_map")
    try:
        found = msgspec.convert(where, dict[str, str])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{index}: weight_map names no files of tensors ({error}); copy it again"
        ) from error
    for tensor, name in found.items():
        if name != Path(name).name:
            raise ConfigError(
                f"{index}: weight_map has {tensor} in {name!r}, which does not lie in "
                f"its folder; copy the model again from its source"
            )
    return found


def read_tensors(
    folder: Path, needed: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """Return all tensors of a folder by name, as views of the mapped files.

    A single file counts before an index, which may be older, as in other readers.

    Args:
      needed: tells if a tensor that the index names has to be there.

    Raises ConfigError, naming the file, if one is missing, truncated or of a dtype that
    is no float.
    """
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file() or not index.is_file():
        return _mapped(single)
    where = read_index(folder)
    found: dict[str, np.ndarray] = {}
    for name in sorted(set(where.values())):
        wanted = [t for t, file in where.items() if file == name and needed(t)]
        if not wanted and not (folder / name).is_file():
            continue
        inside = _mapped(folder / name)
        if lacking := [tensor for tensor in wanted if tensor not in inside]:
            raise ConfigError(
                f"{index} says that {name} has {lacking[0]}, but it has not; copy both "
                f"files again"
            )
        found |= inside
    return found


def make_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype[Any],
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, np.ndarray]:
    """Make the files of these tensors, in their order; return the tensors by name, to
    be filled in place."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    total = used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if used and used + size > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used, total = used + size, total + size
    arrays: dict[str, np.ndarray] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = SINGLE if len(shards) == 1 else several
        arrays |= _make(folder / file, shard, dtype)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        text = json.dumps(
            {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2
        )
        (folder / INDEX).write_text(text + "\n")
    return arrays


def _mapped(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ConfigError(
            f"there is no {path}; give a folder with all its safetensors files"
        )
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} is no whole safetensors file ({error}); {how_to_mend(path)}"
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, facts in header.items():
        if facts["dtype"] not in DTYPES:
            raise ConfigError(
                f"{path}: {name} is {facts['dtype']}; weights are read as "
                f"{', '.join(DTYPES)}"
            )
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    return {
        name: data[slice(*facts["data_offsets"])]
        .view(DTYPES[facts["dtype"]])
        .reshape(facts["shape"])
        for name, facts in header.items()
    }


def _make(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]
) -> dict[str, np.ndarray]:
    """Make one file: the length of the header, the header, the tensors' bytes."""
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Tensors begin where their elements can.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    data = np.memmap(path, np.uint8, "r+", offset=8 + len(text))
    return {
        name: data[slice(*header[name]["data_offsets"])].view(dtype).reshape(shape)
        for name, shape in shapes.items()
    }
