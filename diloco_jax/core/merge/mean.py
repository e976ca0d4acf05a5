"""The merge rule "mean": the weighted mean of the deltas."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax.core.merge.rule import Fold, Shape, State


class MeanSums(NamedTuple):
    """Sums over the deltas so far."""

    total: jax.Array
    """f32[shape]: sum w d."""
    weight: jax.Array
    """f32: sum w."""


class Mean(Fold):
    """See `Fold`."""

    by_element = True

    def init(self, shape: Shape) -> MeanSums:
        """Return zeros."""
        return MeanSums(jnp.zeros(shape, jnp.float32), jnp.zeros((), jnp.float32))

    def add(
        self, sums: MeanSums, delta: jax.Array, weight: jax.Array, state: State
    ) -> MeanSums:
        """Add w d."""
        return MeanSums(sums.total + weight * delta, sums.weight + weight)

    def finish(
        self, sums: MeanSums, share: jax.Array, state: State
    ) -> tuple[jax.Array, State]:
        """Return sum w d / sum w, times `share`."""
        return sums.total / sums.weight * share, state


MEAN = Mean()
