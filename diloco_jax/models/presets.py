"""Models by size: a name is the number of parameters, within 15 %.

Presets in millions are byte models. Presets in billions have the sizes of Gemma 3
(arXiv 2503.19786, table 1 and the released configurations): 256 k words, heads of 256,
grouped queries, tied embeddings. They differ from it: the gate has SiLU rather than
GELU; every layer attends to all earlier tokens, while five of six there see a window.
Rotations have one base. Queries, keys and a layer's output are not normalised, and
embeddings are not scaled by sqrt(d_model). Tokens are still bytes, so most words never
occur.
"""

from __future__ import annotations

from diloco_jax.config import ConfigError, ModelConfig, suggest


def _sizes(
    d_model: int,
    num_layers: int,
    heads: int,
    kv: int,
    head_dim: int,
    mlp: int,
    vocab_size: int = 256,
    *,
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        tied_embeddings=tied,
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
    "1b": _sizes(1152, 26, 4, 1, 256, 6912, 262_144, tied=True),
    "12b": _sizes(3840, 48, 16, 8, 256, 15_360, 262_144, tied=True),
}


def preset(name: str) -> ModelConfig:
    """Return the model of this name; raise ConfigError, naming the nearest, if none."""
    if name not in PRESETS:
        raise ConfigError(
            f"no model preset {name!r}{suggest(name, PRESETS)}; "
            f"choose from {', '.join(PRESETS)}"
        )
    return PRESETS[name]
