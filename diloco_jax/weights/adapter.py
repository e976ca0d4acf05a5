"""A run's adapters as a folder that PEFT reads: adapter_config.json and
adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from diloco_jax.config import ModelConfig
from diloco_jax.models import transformer
from diloco_jax.models.model import Params
from diloco_jax.weights.names import IN_A_LAYER

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


def write_adapter(model: ModelConfig, params: Params, folder: Path) -> int:
    """Write the adapters into a folder that is there; return their number of values."""
    tensors: dict[str, np.ndarray] = {}
    for path in transformer.ADAPTED_AXES:
        half, name = path.split("/")
        pair = params["layers"][half][name]
        module = IN_A_LAYER[path].removesuffix(".weight")
        for layer in range(model.num_layers):
            a, b = (np.asarray(pair[key][layer], np.float32) for key in ("a", "b"))
            place = f"base_model.model.model.layers.{layer}.{module}"
            # Files have a matrix's outputs first.
            tensors[f"{place}.lora_A.weight"] = a.reshape(-1, model.lora_rank).T.copy()
            tensors[f"{place}.lora_B.weight"] = b.reshape(model.lora_rank, -1).T.copy()
    save_file(tensors, folder / TENSORS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_config(model), indent=2) + "\n")
    return sum(tensor.size for tensor in tensors.values())


def _config(model: ModelConfig) -> dict[str, Any]:
    targets = {IN_A_LAYER[path].split(".")[-2] for path in transformer.ADAPTED_AXES}
    return {
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
