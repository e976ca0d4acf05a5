"""One model for the tests that train: what one of them compiled, the others load.

The same goes for windows of 16 tokens and batches of 2 and 4.
"""

from __future__ import annotations

from diloco_jax.config import ModelConfig

MODEL = ModelConfig(
    d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64
)
SEQUENCE_LENGTH = 16
