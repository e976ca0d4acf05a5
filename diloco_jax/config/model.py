"""The model of a run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from diloco_jax.config.fields import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, sizes in elements; or a model of your own.

    Its switches make the families that `docs/weights.md` names.

    Example:
      >>> from diloco_jax import ModelConfig, preset
      >>> preset("tiny") == ModelConfig(
      ...     d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
      ...     mlp_dim=128,
      ... )
      True
    """

    factory: str = setting(
        "",
        code=True,
        help='Function that makes your own model, "package.module:function" or '
        '"path/to/file.py:function" (docs/models.md); empty = the bundled transformer, '
        "to which the other options of this section belong.",
    )
    weights: str = setting(
        "",
        local=True,
        help="Where the first parameters come from, as --init gives it: hf:DIR or "
        "run:WORKDIR; empty = they are drawn.",
    )
    lora_rank: int = setting(
        0,
        NOT_NEGATIVE,
        help="Rank of the adapters that are trained in place of the weights, which "
        "stay as they are (LoRA); 0 = the weights themselves are trained.",
    )
    lora_alpha: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Factor of the adapters, times lora_rank; 0 = lora_rank, a factor of 1.",
    )
    frozen_digest: str = setting(
        "",
        help="Digest of the weights that stay as they are; empty = computed when the "
        "run is created. Other ones are refused.",
    )
    vocab_size: int = setting(256, AT_LEAST_1, help="Number of different tokens.")
    d_model: int = setting(192, AT_LEAST_1, help="Width of the residual stream.")
    num_layers: int = setting(4, AT_LEAST_1, help="Transformer layers.")
    num_heads: int = setting(
        6, AT_LEAST_1, help="Attention heads, a multiple of num_kv_heads."
    )
    num_kv_heads: int = setting(
        2, AT_LEAST_1, help="Heads of keys and values, each shared by several heads."
    )
    head_dim: int = setting(32, AT_LEAST_1, help="Width of one attention head.")
    mlp_dim: int = setting(512, AT_LEAST_1, help="Width of a layer's MLP.")
    tied_embeddings: bool = setting(
        False, help="Use the embeddings of the input for the output, too."
    )
    scaled_embeddings: bool = setting(
        False, help="Multiply the embeddings of the input by sqrt(d_model)."
    )
    activation: Literal["silu", "gelu_tanh"] = setting(
        "silu", help="Function of the MLP's gate."
    )
    norm_gain: Literal["one_plus_scale", "scale"] = setting(
        "one_plus_scale",
        help="Factor of a norm's result: 1 + scale, scale starting at 0; or scale, "
        "starting at 1.",
    )
    norm_epsilon: float = setting(
        1e-6, POSITIVE, help="Added to the mean square in a norm."
    )
    qk_norm: bool = setting(
        False, help="Normalise each head's query and key before they are rotated."
    )
    post_norms: bool = setting(
        False, help="Normalise what attention and MLP add to the residual stream, too."
    )
    attention_bias: Literal["none", "qkv", "qkvo"] = setting(
        "none",
        help="Biases of attention: none, those of queries, keys and values, or that of "
        "the output, too.",
    )
    mlp_bias: bool = setting(False, help="Add a bias to each product of the MLP.")
    window: int = setting(
        0,
        NOT_NEGATIVE,
        help="Tokens, itself included, that a token attends to in layers with a "
        "window; 0 = no layer has one.",
    )
    window_pattern: int = setting(
        6,
        AT_LEAST_1,
        help="With a window: the last of every so many layers has none.",
    )
    rope_base: float = setting(
        10_000.0, POSITIVE, help="Base of the rotary position embedding's wavelengths."
    )
    rope_window_base: float = setting(
        10_000.0, POSITIVE, help="The base in layers with a window."
    )
    rope_scaling: Literal["none", "linear", "llama3"] = setting(
        "none",
        help="Lengthens the wavelengths of layers without a window: all of them by "
        "rope_factor, or the long ones as Llama 3.1 does.",
    )
    rope_factor: float = setting(1.0, POSITIVE, help="Factor of the wavelengths.")
    rope_low_factor: float = setting(
        1.0,
        POSITIVE,
        help='With "llama3": wavelengths above rope_original_length / rope_low_factor '
        "grow by all of rope_factor.",
    )
    rope_high_factor: float = setting(
        4.0,
        POSITIVE,
        help='With "llama3": wavelengths below rope_original_length / rope_high_factor '
        "stay.",
    )
    rope_original_length: int = setting(
        8192, AT_LEAST_1, help='With "llama3": tokens of the sequences before scaling.'
    )

    def is_windowed(self, layer: int) -> bool:
        """Tell if attention of a layer sees `window` tokens alone."""
        return bool(self.window) and (layer + 1) % self.window_pattern != 0

    @property
    def layer_period(self) -> int:
        """Layers after which their kinds repeat."""
        return self.window_pattern if self.window else 1
