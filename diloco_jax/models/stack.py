"""All layers in their order, as one loop.

Parameters are stacked on a leading axis. Layers of the same place in a period (see
`ModelConfig.layer_period`) are of one kind: an iteration of the loop is one period, and
the layers after the last whole period follow.

`L` layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from diloco_jax.config import ModelConfig

Apply = Callable[[jax.Array, Any, bool], tuple[jax.Array, Any]]
"""Function of activations, one layer's own values and True if it has a window, that
returns the activations after it and values to keep, or None."""


def run_layers(
    config: ModelConfig, x: jax.Array, stacked: Any, apply: Apply, unroll: int = 1
) -> tuple[jax.Array, Any]:
    """Apply all layers; return the last activations, and what was kept, [L, ...].

    stacked: values by layer, [L, ...]. unroll: layers in one iteration of the loop, if
    that is more than a period.
    """
    period = config.layer_period
    periods = config.num_layers // period
    inside = periods * period

    def several(x: jax.Array, own: Any, first: int, count: int) -> tuple[Any, Any]:
        kept = []
        for index in range(count):
            layer = _each(own, _at(index))
            x, values = apply(x, layer, config.is_windowed(first + index))
            kept.append(values)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *kept)

    if period == 1:
        return jax.lax.scan(
            lambda x, own: apply(x, own, False), x, stacked, unroll=unroll
        )
    parts = []
    if periods:
        grouped = _each(
            stacked, lambda a: a[:inside].reshape(periods, period, *a.shape[1:])
        )
        x, kept = jax.lax.scan(
            lambda x, own: several(x, own, 0, period),
            x,
            grouped,
            unroll=max(unroll // period, 1),
        )
        parts.append(_each(kept, lambda a: a.reshape(inside, *a.shape[2:])))
    if inside < config.num_layers:
        rest = _each(stacked, lambda a: a[inside:])
        x, kept = several(x, rest, inside, config.num_layers - inside)
        parts.append(kept)
    return x, jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def _at(index: int) -> Callable[[jax.Array], jax.Array]:
    return lambda stacked: stacked[index]


def _each(tree: Any, function: Callable[[jax.Array], jax.Array]) -> Any:
    return jax.tree.map(function, tree)
