"""Mixtures of experts: a router sends each token to a few of a layer's MLPs.

Every device sorts the tokens of its own sequences by expert, so that no sort crosses
the mesh, and multiplies each expert's rows with that expert's weights. No token is
dropped, however uneven the loads are. Padding goes to no expert, and is not counted.
An expert without a token has a gradient of exactly 0.

`B` sequences, `T` tokens, `n` tokens of a device, `D` model, `E` experts, `K` experts
of a token, `F` expert, `L` layers.

Sources: sparsely gated mixtures arXiv 1701.06538; the loss for balance 2101.03961,
equation 4, with all K experts of a token counted; dropless products 2211.15841.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco_jax.config import ModelConfig
from diloco_jax.models.model import Layout


class Experts(NamedTuple):
    """Weights of a layer's mixture."""

    router: jax.Array
    """[D, E]."""
    gate: jax.Array
    """[E, D, F]."""
    up: jax.Array
    """[E, D, F]."""
    down: jax.Array
    """[E, F, D]."""


class Use(NamedTuple):
    """How a layer's router used its experts, f32 [E]; stacked, [L, E]."""

    tokens: jax.Array
    """Tokens that each expert got; each token counts K times."""
    odds: jax.Array
    """Sum of the probabilities that the router gave each expert."""


Send = Callable[[jax.Array, Experts], jax.Array]
"""Function of activations and a layer's mixture that returns what it adds to them, both
[B, T, D]."""
Activation = Callable[[jax.Array], jax.Array]


def mix(
    config: ModelConfig,
    activation: Activation,
    layout: Layout,
    x: jax.Array,
    real: jax.Array | None,
    weights: Experts,
) -> tuple[jax.Array, Use]:
    """Return what a layer's mixture adds to activations, [B, T, D], and its use.

    Args:
      layout: the mesh, on which sequences and the width of experts are cut.
      x: normed activations, [B, T, D].
      real: bool [B, T], False for padding, which gets zeros; None = all are text.
      weights: whole but for axes that the layout cuts.
    """
    real = jnp.ones(x.shape[:2], bool) if real is None else real
    here = functools.partial(_of_device, config, activation)
    if layout.mesh.size == 1:
        return here((), (), x, real, weights)
    rows = layout.spec(("batch", None, None), x.shape)
    whole = PartitionSpec()  # type: ignore[no-untyped-call]
    inward = layout.spec(("expert", "embed", "mlp"), weights.gate.shape)
    outward = layout.spec(("expert", "mlp", "embed"), weights.down.shape)
    mapped = jax.shard_map(
        functools.partial(here, rows[0] or (), outward[1] or ()),
        mesh=layout.mesh,
        in_specs=(
            rows,
            layout.spec(("batch", None), real.shape),
            Experts(whole, inward, inward, outward),
        ),
        out_specs=(rows, Use(whole, whole)),
        check_vma=False,
    )
    mixed: tuple[jax.Array, Use] = mapped(x, real, weights)
    return mixed


def _of_device(
    config: ModelConfig,
    activation: Activation,
    over_rows: tuple[str, ...],
    over_width: tuple[str, ...],
    x: jax.Array,
    real: jax.Array,
    weights: Experts,
) -> tuple[jax.Array, Use]:
    """Return the result for one device's sequences, and the use of all devices.

    over_rows, over_width: mesh axes that cut sequences, and the width of experts.
    """
    flat, real = x.reshape(-1, x.shape[-1]), real.reshape(-1)
    odds, shares, chosen = route(config, flat, real, weights.router)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=config.experts + 1)[:-1]
    rows = _permuted(jnp.repeat(flat, chosen.shape[1], axis=0), order)
    gate, up = (jax.lax.ragged_dot(rows, w, sizes) for w in weights[1:3])
    made = jax.lax.ragged_dot(activation(gate) * up, weights.down, sizes)
    # Rows after the last group are of no expert; a device may leave anything there.
    made = jnp.where(jnp.arange(len(order))[:, None] < jnp.sum(sizes), made, 0)
    back = _permuted(made, jnp.argsort(order)).reshape(*chosen.shape, -1)
    mixed = jnp.sum(shares.astype(x.dtype)[..., None] * back, axis=1).reshape(x.shape)
    use = Use(sizes.astype(jnp.float32), jnp.sum(odds * real[:, None], axis=0))
    if over_width:
        mixed = jax.lax.psum(mixed, over_width)
    return mixed, jax.lax.psum(use, over_rows) if over_rows else use


def route(
    config: ModelConfig, x: jax.Array, real: jax.Array, router: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the probabilities of all experts, f32 [n, E], and of each token's experts
    their factors, f32 [n, K], and numbers, int32 [n, K], E for padding."""
    logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
    odds = jax.nn.softmax(logits)
    shares, chosen = jax.lax.top_k(odds, config.experts_per_token)
    if config.experts_renormalised:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return odds, shares, jnp.where(real[:, None], chosen, config.experts)


def balance_loss(use: Use) -> jax.Array:
    """Return the mean over layers of E times the sum over experts of the share of
    tokens times the mean probability: 1 if all loads are equal, E if one expert has
    all; 0 without tokens. Its gradient goes by the probabilities.

    use: of all layers, [L, E].
    """
    loads, odds = (part / jnp.maximum(_summed(part), 1.0) for part in use)
    return use.tokens.shape[1] * jnp.mean(jnp.sum(loads * odds, axis=1))


def _summed(of_experts: jax.Array) -> jax.Array:
    return jnp.sum(of_experts, axis=1, keepdims=True)


def _permuted(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Return the rows in another order; the gradient adds nothing up."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
