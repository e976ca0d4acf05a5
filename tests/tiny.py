"""One model for the tests that train: what one of them compiled, the others load.

The same goes for windows of 16 tokens and batches of 2 and 4. Most of its matrices have
one shape, since each shape has programs of its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from diloco_jax.config import ModelConfig

if TYPE_CHECKING:
    from diloco_jax.island.device.step import Trainer

MODEL = ModelConfig(
    d_model=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=32
)
UNLIKE = dataclasses.replace(MODEL, num_kv_heads=1, mlp_dim=64)
"""For files of weights: one matrix cannot be taken for another."""
SEQUENCE_LENGTH = 16


def steps_compiled(trainer: Trainer) -> int:
    """Return how often a trainer's step was compiled: 1 from the first step on."""
    return trainer._step._cache_size()
