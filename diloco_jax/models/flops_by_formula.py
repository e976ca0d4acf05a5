"""Floating-point operations of the bundled model by a formula of its sizes.

Nothing is traced, and jax is not imported. `flops.py` counts those of any model in its
program; a test holds both together.
"""

from __future__ import annotations

from diloco_jax.config import ModelConfig


def analytic_flops(model: ModelConfig, length: int) -> float:
    """Count forward and backward pass of one sequence of `length` tokens.

    The formula is 6 per weight of a matrix product and token, and 12 per head element
    and pair of positions.
    """
    attended = model.num_layers * model.num_heads * model.head_dim
    return 6.0 * product_weights(model) * length + 12.0 * attended * length**2


def least_flops(model: ModelConfig, length: int) -> float:
    """Count what no kernel leaves out of it: the products with weights, without those
    for gradients of frozen weights (LoRA). Windows and masks may leave out attention.
    """
    per_weight = 4.0 if model.lora_rank else 6.0
    return per_weight * product_weights(model) * length


def product_weights(model: ModelConfig) -> int:
    """Weights of all matrix products, those of the logits included."""
    return model.vocab_size * model.d_model + model.num_layers * layer_weights(model)


def layer_weights(model: ModelConfig) -> int:
    """Weights of the matrix products of one layer."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    return model.d_model * (heads * model.head_dim + 3 * model.mlp_dim)
