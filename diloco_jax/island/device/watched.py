"""Copies of the anchors of one cycle, in the compute dtype: the merged model that an
island evaluates while it trains."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.leaves import Leaves, with_leaves
from diloco_jax.island.device.placing import in_turn, zeros
from diloco_jax.models.model import Params


class WatchedModel:
    """A copy of the anchors of one cycle, laid out as the local parameters are."""

    def __init__(self, exchange: Exchange, like: Params, dtype: str) -> None:
        """like: the local parameters, or arrays that lie alike. dtype: the compute
        dtype."""
        self._exchange = exchange
        self.params: Params = jax.tree.map(
            lambda leaf: zeros(leaf.shape, jnp.dtype(dtype), leaf.sharding), like
        )

    def copy(self, fragment: int) -> None:
        """Copy the fragment's anchor into the parameters. All hosts of the island call
        it.
        """
        self.params = self._exchange.at_anchor(fragment, in_turn(self.params))

    def lower_all(self) -> list[jax.stages.Lowered]:
        """Lower what `copy` executes, to be compiled."""
        lowered = []
        for held in self._exchange.one_of_each(self.params):
            leaf = held.first(self.params)
            lowered.append(held.kind.lower_reset(leaf, held.index))
        return lowered

    def warm(self) -> None:
        """Compile what `copy` executes. It leaves zeros."""
        for held in self._exchange.one_of_each(self.params):
            leaf, written = held.leaf(self.params), Leaves()
            held.write(in_turn(held.kind.put(leaf, held.index, held.zeros())), written)
            self.params = with_leaves(self.params, written)
