"""Adapters on published weights: the weights stay as they are, the adapters train.

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
from diloco_jax.models import build as models
from diloco_jax.models import transformer
from diloco_jax.models.model import Frozen, Layout, Model, Params
from diloco_jax.weights.first import first_pieces
from diloco_jax.weights.tensor_files import names_in_a_layer


def factory(run: RunConfig, island: IslandConfig, layout: Layout) -> Model:
    """Return the model of a run with `model.lora_rank`.

    Raises ConfigError if the run starts from no weights.
    """
    if not run.model.weights:
        raise ConfigError(
            f"model.lora_rank = {run.model.lora_rank}, and model.weights is empty: "
            f"adapters are added to weights; give them (--init hf:DIR, and to an "
            f"island --model.weights hf:DIR)"
        )
    model = models.bundled(run, island, layout)
    assert model.frozen is not None
    frozen = model.frozen._replace(
        leaves=lambda: base_leaves(run), digest=lambda: digest_of(base_leaves(run))
    )
    return model._replace(frozen=frozen)


def base_run(run: RunConfig) -> RunConfig:
    """Return the run without adapters: its parameters are the weights themselves."""
    model = dataclasses.replace(
        run.model, lora_rank=0, lora_alpha=0.0, frozen_digest=""
    )
    return dataclasses.replace(run, model=model)


def base_leaves(run: RunConfig) -> Iterator[np.ndarray]:
    """Yield the weights that a run adapts, stacked, in the order of `jax.tree.leaves`
    and the dtype of their files."""
    return map(_stacked, _mapped_base(run))


def _mapped_base(run: RunConfig) -> list[Any]:
    plain = base_run(run)
    pieces = first_pieces(plain, models.build(plain))
    leaves: list[Any] = jax.tree.leaves(pieces, is_leaf=lambda x: isinstance(x, list))
    return leaves


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


def merged(run: RunConfig, adapters: Params) -> Params:
    """Return the weights with a run's adapters added, f32, stacked."""
    structure = jax.tree.structure(models.build(base_run(run)).shapes())
    leaves = [leaf for _, leaf in merged_leaves(run, adapters)]
    whole: Params = jax.tree.unflatten(structure, leaves)
    return whole


def merged_leaves(
    run: RunConfig, adapters: Params
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Yield `merged` by path, one array at a time.

    Raises ConfigError, with both digests, if the weights are no longer the run's."""
    base = _mapped_base(run)
    here = Frozen({}, {}, digest=lambda: digest_of(map(_stacked, base)))
    here.require(run.model.frozen_digest)
    shapes = models.build(base_run(run)).shapes()
    paths = [
        tuple(key.key for key in keys)
        for keys, _ in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    for path, leaf in zip(paths, map(_stacked, base), strict=True):
        value = np.asarray(leaf, np.float32)
        if "/".join(path[1:]) in transformer.ADAPTED_AXES:
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
            place = f"base_model.model.model.layers.{layer}.{module}"
            place = place.format(expert=next(iter(expert), ""))
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
        "target_modules": sorted(targets),
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    return sum(tensor.size for tensor in tensors.values())
