"""Models of the benchmarks of speed, by their numbers of parameters."""

from __future__ import annotations

from diloco_jax.config import ModelConfig
from diloco_jax.models.presets import preset

MODELS = {
    "3m": ModelConfig(
        d_model=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=768
    ),
    "10m": preset("10m"),
    "25m": preset("25m"),
}
