"""An island's model copy: parameters and moments, with their anchors.

A replica is the only holder of its train state: a step and an adoption donate its
arrays. If the train loop is the user's, that loop holds its own moments and lends the
parameters for the time of a boundary.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import jax

from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.leaves import Lent
from diloco_jax.island.device.step import Trainer, TrainState
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.model import Metrics, Params
from diloco_jax.protocol.island.books import Outcome


class LentParams(Generic[Lent]):
    """`boundary.Arrays` with real arrays: parameters and their anchors."""

    def __init__(self, exchange: Exchange, params: Lent) -> None:
        self._exchange = exchange
        self.params: Lent = params
        """Local parameters, until the next step or adoption."""

    def trees(self) -> dict[str, Any]:
        """Return the arrays that a checkpoint holds, until the next adoption."""
        return {"params": self.params, **self._exchange.trees()}

    def take(self, fragment: int) -> tuple[jax.Array, ...]:
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


class Replica(LentParams[Params]):
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
    residuals: dict[int, tuple[jax.Array, ...]]
    """Residuals by fragment, as they are held."""
