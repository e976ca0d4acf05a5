"""An island's model copy: parameters and moments, with their anchors and other copies.

A replica is the only holder of its train state: a step and an adoption donate its
arrays. If the train loop is the user's, that loop holds its own moments and lends the
parameters for the time of a boundary, with trees beside them: an average, or a copy in
bf16. An adoption moves the parameters in one step, which an average would follow only
slowly. So each piece of such a tree is moved by the same change, and keeps its distance
from the local values.

An island that evaluates the merged model while it trains has a copy of it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax.island.device.exchange import ByPiece, Exchange
from diloco_jax.island.device.mesh import in_turn, zeros
from diloco_jax.island.device.step import Trainer, TrainState
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.model import Metrics, Params
from diloco_jax.protocol.island.books import Outcome


class LentParams:
    """`boundary.Arrays` with real arrays: parameters and their anchors."""

    def __init__(self, exchange: Exchange, params: Any) -> None:
        """params: as an exchange takes them."""
        self._exchange = exchange
        self.params = params
        """Local parameters, until the next step or adoption."""

    def trees(self) -> dict[str, Any]:
        """Return the arrays that a checkpoint holds, until the next adoption."""
        return {"params": self.params, **self._exchange.trees()}

    def take(self, fragment: int) -> ByPiece:
        """Return the fragment's encoded delta by piece."""
        return self._exchange.take(fragment, self.params)

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """Take over a published fragment in place."""
        self.params = self._exchange.adopt(arrival, self.params, keep=keep)

    def judge(self, fragment: int, outcome: Outcome) -> None:
        """Carry out the verdict on the outstanding take."""
        match outcome:
            case "settled":
                self._exchange.settle(fragment)
            case "reopened":
                self._exchange.reopen(fragment)
            case "dropped":
                self._exchange.drop(fragment)
            case "reset":
                self.params = self._exchange.reset(fragment, self.params)


class Replica(LentParams):
    """Parameters with their moments, and the inner step between boundaries."""

    def __init__(self, trainer: Trainer, exchange: Exchange, state: TrainState) -> None:
        super().__init__(exchange, state.params)
        self._trainer, self._moments = trainer, state.opt_state

    def trees(self) -> dict[str, Any]:
        """Return the arrays that a checkpoint holds, until the next step or
        adoption."""
        return {**super().trees(), "moments": jax.tree.leaves(self._moments)}

    def step(self, batch: Any, learning_rate: float) -> Metrics:
        """Run one inner step on a batch of host arrays; return before it is done."""
        placed = self._trainer.put_batch(batch)
        state = TrainState(self.params, self._moments)
        state, metrics = self._trainer.step(state, placed, learning_rate)
        self.params, self._moments = state
        return metrics

    def spoil(self, factor: float) -> None:
        """Multiply all parameters, as a fault that was asked for does."""
        self.params = jax.tree.map(lambda value: value * factor, self.params)


class Restored(NamedTuple):
    """Part of a checkpoint that a returned island begins with."""

    incarnation: int
    """Incarnation that wrote the checkpoint."""
    steps: int
    """Steps of that incarnation that its moments have seen."""
    moments: Any
    """State of the inner optimizer."""
    residuals: dict[int, ByPiece]
    """Residuals by fragment, as they are held."""


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

    def lower_all(self) -> Iterator[jax.stages.Lowered]:
        """Lower what `copy` executes, to be compiled."""
        dtype = jax.tree.leaves(self.params)[0].dtype
        for state in self._exchange.one_of_each():
            yield state.programs.lower("put", dtype)


class LentBeside(LentParams):
    """Parameters and the trees beside them; an adoption changes all alike."""

    def __init__(self, exchange: Exchange, params: list[Any]) -> None:
        """params: the leaves of the parameters, in the order of their names."""
        super().__init__(exchange, params)
        self.beside: list[list[Any]] = []
        """Leaves of trees whose leaves lie as the parameters do, of any floating
        dtype."""

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """Take over a published fragment in place."""
        adopt = super().adopt
        self._together(arrival.fragment, lambda: adopt(arrival, keep=keep))

    def judge(self, fragment: int, outcome: Outcome) -> None:
        """Carry out the verdict on the outstanding take."""
        judge = super().judge
        if outcome == "reset":
            self._together(fragment, lambda: judge(fragment, outcome))
        else:
            judge(fragment, outcome)

    def warm(self) -> None:
        """Compile the programs that move the present trees; leave these as they are."""
        for fragment in {state.fragment for state in self._exchange.one_of_each()}:
            self._together(fragment, lambda: None)

    def _together(self, fragment: int, change: Callable[[], None]) -> None:
        """Move the fragment of every tree as `change` moves the local values."""
        if not self.beside:
            change()
            return
        before = self._exchange.values(fragment, self.params)
        change()
        for leaves in self.beside:
            for state, old in zip(self._exchange.held(fragment), before, strict=True):
                own, local = state.leaf(leaves), state.leaf(self.params)
                moved = state.programs.follow(own, state.index, old, local)
                state.write(leaves, moved)
