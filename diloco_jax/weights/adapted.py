"""Published weights that stay as they are, in whole or in part, and what trains beside
them: adapters, or the other parts of a model with pictures.

A run's adapters are written as a folder that PEFT reads: adapter_config.json and
adapter_model.safetensors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from xxhash import xxh3_64

from diloco_jax.config import ConfigError, IslandConfig, ModelConfig, RunConfig
from diloco_jax.core.fragments import LAYERS
from diloco_jax.models import build as models
from diloco_jax.models import transformer
from diloco_jax.models.model import Frozen, Layout, Model, Params
from diloco_jax.models.vision import part_of
from diloco_jax.weights.first import first_pieces
from diloco_jax.weights.tensor_files import decoder_name, names_in_a_layer


def factory(run: RunConfig, island: IslandConfig, layout: Layout) -> Model:
    """Return the model of a run with `model.lora_rank` or `model.train`.

    Raises ConfigError if the run starts from no weights.
    """
    if not run.model.weights:
        asked = {"lora_rank": run.model.lora_rank, "train": ", ".join(run.model.train)}
        what = " ".join(f"model.{name} = {own}" for name, own in asked.items() if own)
        raise ConfigError(
            f"{what}, and model.weights is empty: adapters are added to weights, and "
            f"parts that are not trained stay as these are; give them (--init hf:DIR, "
            f"and to an island --model.weights hf:DIR)"
        )
    model = models.bundled(run, island, layout)
    assert model.frozen is not None
    frozen = model.frozen._replace(
        leaves=lambda: frozen_leaves(run), digest=lambda: digest_of(frozen_leaves(run))
    )
    return model._replace(frozen=frozen)


def base_run(run: RunConfig) -> RunConfig:
    """Return the run that trains all of the weights, and has no adapters."""
    model = dataclasses.replace(
        run.model, lora_rank=0, lora_alpha=0.0, frozen_digest="", train=()
    )
    return dataclasses.replace(run, model=model)


def frozen_leaves(run: RunConfig) -> Iterator[np.ndarray]:
    """Yield the weights that stay as they are, stacked, in the order of
    `jax.tree.leaves` and the dtype of their files."""
    return (_stacked(leaf) for _, leaf in _mapped(run))


def _mapped(run: RunConfig) -> list[tuple[tuple[str, ...], Any]]:
    """Return these weights by path; a stacked one is a list of its layers."""
    plain = base_run(run)
    pieces = first_pieces(plain, models.build(plain))
    leaves = jax.tree_util.tree_leaves_with_path(
        pieces, is_leaf=lambda x: isinstance(x, list)
    )
    paths = [(tuple(key.key for key in keys), leaf) for keys, leaf in leaves]
    return [(p, leaf) for p, leaf in paths if part_of(p) not in run.model.train]


def _stacked(leaf: Any) -> np.ndarray:
    return np.stack(leaf) if isinstance(leaf, list) else np.asarray(leaf)


def digest_of(leaves: Iterator[np.ndarray]) -> str:
    """Return 16 hex digits over the arrays' shapes and their values in f32.

    So a copy of the same values in another float type has the same digest.
    """
    digest = xxh3_64()
    for leaf in leaves:
        values = np.ascontiguousarray(leaf, np.float32)
        digest.update(repr(values.shape).encode())
        digest.update(values.data.cast("B"))
    return digest.hexdigest()


def merged(run: RunConfig, trained: Params) -> Params:
    """Return the whole model, f32, stacked: the weights with a run's adapters added, or
    its trained parts and the others."""
    whole = dict(trained) if run.model.train else {}
    for path, value in merged_leaves(run, {} if run.model.train else trained):
        node = whole
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return whole


def merged_leaves(
    run: RunConfig, adapters: Params
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Yield the weights that stay as they are, with adapters added, by path, one array
    at a time.

    Raises ConfigError, with both digests, if the weights are no longer the run's."""
    base = _mapped(run)
    here = Frozen({}, {}, digest=lambda: digest_of(_stacked(own) for _, own in base))
    here.require(run.model.frozen_digest)
    for path, leaf in base:
        value = np.asarray(_stacked(leaf), np.float32)
        adapted = adapters and path[0] == LAYERS
        if adapted and "/".join(path[1:]) in transformer.ADAPTED_AXES:
            _, half, name = path
            value = value + delta(run.model, half, adapters["layers"][half][name])
        yield path, value


def delta(model: ModelConfig, half: str, pair: dict[str, Any]) -> np.ndarray:
    """Return s A B of a stacked matrix, f32[L, *in, *out]."""
    a, b = (np.asarray(pair[key], np.float32) for key in ("a", "b"))
    stacks = b.shape[: transformer.adapter_stacks(model, half)]
    rank = a.shape[-1]
    flat = a.reshape(*stacks, -1, rank) @ b.reshape(*stacks, rank, -1)
    shaped = flat.reshape(*a.shape[:-1], *b.shape[len(stacks) + 1 :])
    return np.float32(transformer.adapter_scale(model)) * shaped


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"


def write_adapter(model: ModelConfig, params: Params, folder: Path) -> int:
    """Write the adapters into a folder that is there; return their number of values."""
    tensors: dict[str, np.ndarray] = {}
    names = names_in_a_layer(model)
    for path in transformer.ADAPTED_AXES:
        half, name = path.split("/")
        pair = params["layers"][half][name]
        module = names[path].removesuffix(".weight")
        stacks = pair["b"].shape[: transformer.adapter_stacks(model, half)]
        for layer, *expert in np.ndindex(stacks):
            a, b = (
                np.asarray(pair[key][layer, *expert], np.float32) for key in ("a", "b")
            )
            inside = decoder_name(model, f"model.layers.{layer}.{module}")
            place = f"base_model.model.{inside}".format(expert=next(iter(expert), ""))
            # Files have a matrix's outputs first.
            tensors[f"{place}.lora_A.weight"] = a.reshape(-1, model.lora_rank).T.copy()
            tensors[f"{place}.lora_B.weight"] = b.reshape(model.lora_rank, -1).T.copy()
    save_file(tensors, folder / ADAPTER_TENSORS, {"format": "pt"})
    targets = {names[path].split(".")[-2] for path in transformer.ADAPTED_AXES}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.weights.partition(":")[2],
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha or model.lora_rank,
        "lora_dropout": 0.0,
        "bias": "none",
        # A tower has modules of these names, too.
        "target_modules": rf".*\.text_model\..*\.({'|'.join(sorted(targets))})"
        if model.vision.layers
        else sorted(targets),
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    return sum(tensor.size for tensor in tensors.values())
