"""Byte models by size: a name is the number of parameters, within 15 %."""

from __future__ import annotations

from diloco_jax.config import ConfigError, ModelConfig, suggest


def _sizes(
    d_model: int, num_layers: int, heads: int, kv: int, head_dim: int, mlp: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=256,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        mlp_dim=mlp,
    )


PRESETS = {
    "tiny": _sizes(64, 2, 4, 2, 16, 128),
    "0.3m": _sizes(96, 3, 3, 1, 32, 256),
    "2m": _sizes(192, 4, 6, 2, 32, 640),
    "5m": _sizes(256, 6, 8, 2, 32, 768),
    "10m": _sizes(384, 6, 6, 2, 64, 1024),
    "25m": _sizes(512, 8, 8, 2, 64, 1536),
    "50m": _sizes(640, 10, 10, 2, 64, 2048),
    "100m": _sizes(768, 12, 12, 4, 64, 3072),
}


def preset(name: str) -> ModelConfig:
    """The model of this name; ConfigError with the nearest one if there is none."""
    if name not in PRESETS:
        raise ConfigError(
            f"no model preset {name!r}{suggest(name, PRESETS)}; "
            f"choose from {', '.join(PRESETS)}"
        )
    return PRESETS[name]
