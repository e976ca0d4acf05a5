"""Models by name: published ones, and byte models by their number of parameters.

`smollm2_135m`, `smolvlm_256m`, `llama3_1b` (3.2), `llama3_8b` (3.1), `qwen3_*`,
`olmoe_1b_7b` and `gemma3_*` are the models of these names, parameter by parameter,
`gemma3_12b` without its picture encoder; sources are the config.json files beside the
published weights. They are trained on their own tokens, or start from their weights
(`--init`). `qwen3_30b_a3b` and `olmoe_1b_7b` are mixtures of experts, and
`tiny_experts` is one of bytes. `tiny_vision`, of bytes too, takes pictures of 32 x 32
pixels.

Other names are numbers of parameters, within 15 %. Those in millions are byte models.
Those in billions have 256 k words and the sizes of large models of today, but none of
their switches; their tokens are still bytes, so most words never occur.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diloco_jax.config import ConfigError, ModelConfig, VisionConfig, suggest
from diloco_jax.data.pictures import BYTE_TOKEN


def _sizes(
    d_model: int, num_layers: int, heads: int, kv: int, head_dim: int, mlp: int
) -> dict[str, Any]:
    return {
        "d_model": d_model,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv,
        "head_dim": head_dim,
        "mlp_dim": mlp,
    }


_BYTES = ModelConfig(vocab_size=256)
_WORDS = ModelConfig(vocab_size=262_144, tied_embeddings=True)
_SMOLLM2 = ModelConfig(
    vocab_size=49_152,
    tied_embeddings=True,
    norm_gain="scale",
    norm_epsilon=1e-5,
    rope_base=100_000.0,
)
_LLAMA3 = ModelConfig(
    vocab_size=128_256,
    norm_gain="scale",
    norm_epsilon=1e-5,
    rope_base=500_000.0,
    rope_scaling="llama3",
    rope_original_length=8192,
)
_QWEN3 = ModelConfig(
    vocab_size=151_936,
    qk_norm=True,
    norm_gain="scale",
    norm_epsilon=1e-6,
    rope_base=1_000_000.0,
)
_GEMMA3 = ModelConfig(
    vocab_size=262_144,
    tied_embeddings=True,
    qk_norm=True,
    post_norms=True,
    scaled_embeddings=True,
    activation="gelu_tanh",
    norm_epsilon=1e-6,
    window_pattern=6,
    rope_base=1_000_000.0,
    rope_window_base=10_000.0,
)
_OLMOE = ModelConfig(
    vocab_size=50_304,
    qk_norm=True,
    qk_norm_whole=True,
    norm_gain="scale",
    norm_epsilon=1e-5,
    experts_renormalised=False,
    balance_loss=0.01,
)


def _experts(experts: int, of_token: int, width: int) -> dict[str, Any]:
    return {"experts": experts, "experts_per_token": of_token, "expert_dim": width}


PRESETS = {
    "tiny": replace(_BYTES, **_sizes(64, 2, 4, 2, 16, 128)),
    "tiny_vision": replace(
        _BYTES,
        **_sizes(64, 2, 4, 2, 16, 128),
        norm_gain="scale",
        vision=VisionConfig(
            layers=2,
            width=64,
            heads=4,
            mlp_dim=128,
            side=32,
            patch=8,
            shuffle=2,
            token=BYTE_TOKEN,
        ),
    ),
    "tiny_experts": replace(
        _BYTES, **_sizes(64, 2, 4, 2, 16, 128), **_experts(4, 2, 64)
    ),
    "0.3m": replace(_BYTES, **_sizes(96, 3, 3, 1, 32, 256)),
    "2m": replace(_BYTES, **_sizes(192, 4, 6, 2, 32, 640)),
    "5m": replace(_BYTES, **_sizes(256, 6, 8, 2, 32, 768)),
    "10m": replace(_BYTES, **_sizes(384, 6, 6, 2, 64, 1024)),
    "25m": replace(_BYTES, **_sizes(512, 8, 8, 2, 64, 1536)),
    "50m": replace(_BYTES, **_sizes(640, 10, 10, 2, 64, 2048)),
    "100m": replace(_BYTES, **_sizes(768, 12, 12, 4, 64, 3072)),
    "1b": replace(_WORDS, **_sizes(1152, 26, 4, 1, 256, 6912)),
    "12b": replace(_WORDS, **_sizes(3840, 48, 16, 8, 256, 15_360)),
    "smollm2_135m": replace(_SMOLLM2, **_sizes(576, 30, 9, 3, 64, 1536)),
    "smolvlm_256m": replace(
        _SMOLLM2,
        **_sizes(576, 30, 9, 3, 64, 1536),
        vocab_size=49_280,
        tied_embeddings=False,
        vision=VisionConfig(layers=12, token=49_190),
    ),
    "llama3_1b": replace(
        _LLAMA3,
        **_sizes(2048, 16, 32, 8, 64, 8192),
        tied_embeddings=True,
        rope_factor=32.0,
    ),
    "llama3_8b": replace(
        _LLAMA3, **_sizes(4096, 32, 32, 8, 128, 14_336), rope_factor=8.0
    ),
    "qwen3_0_6b": replace(
        _QWEN3, **_sizes(1024, 28, 16, 8, 128, 3072), tied_embeddings=True
    ),
    "qwen3_8b": replace(_QWEN3, **_sizes(4096, 36, 32, 8, 128, 12_288)),
    "qwen3_30b_a3b": replace(
        _QWEN3,
        **_sizes(2048, 48, 32, 4, 128, 6144),
        **_experts(128, 8, 768),
        balance_loss=0.001,
    ),
    "olmoe_1b_7b": replace(
        _OLMOE, **_sizes(2048, 16, 16, 16, 128, 1024), **_experts(64, 8, 1024)
    ),
    "gemma3_270m": replace(_GEMMA3, **_sizes(640, 18, 4, 1, 256, 2048), window=512),
    "gemma3_1b": replace(_GEMMA3, **_sizes(1152, 26, 4, 1, 256, 6912), window=512),
    "gemma3_12b": replace(
        _GEMMA3,
        **_sizes(3840, 48, 16, 8, 256, 15_360),
        vocab_size=262_208,
        window=1024,
        rope_scaling="linear",
        rope_factor=8.0,
    ),
}


def preset(name: str) -> ModelConfig:
    """Return the model of this name; raise ConfigError, naming the nearest, if none.

    Example:
      >>> from diloco_jax import preset
      >>> preset("llama3_1b").d_model
      2048
      >>> preset("llama3_1")
      Traceback (most recent call last):
          ...
      diloco_jax.errors.ConfigError: no model preset 'llama3_1' (did you mean...
    """
    if name not in PRESETS:
        raise ConfigError(
            f"no model preset {name!r}{suggest(name, PRESETS)}; "
            f"choose from {', '.join(PRESETS)}"
        )
    return PRESETS[name]
