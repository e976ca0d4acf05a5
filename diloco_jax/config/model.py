"""The model of a run."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.fields import AT_LEAST_1, POSITIVE, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, sizes in elements; or a model of your own."""

    factory: str = setting(
        "",
        code=True,
        help='Function that makes your own model, "package.module:function" or '
        '"path/to/file.py:function" (docs/models.md); empty = the bundled transformer, '
        "to which the other options of this section belong.",
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
    rope_base: float = setting(
        10_000.0, POSITIVE, help="Base of the rotary position embedding's wavelengths."
    )
