"""An island's model copy: parameters and moments, with the anchors they go by.

It is the only holder of the train state: a step and an adoption donate its arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.step import Trainer, TrainState
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.model import Metrics, Params
from diloco_jax.protocol.island.books import Outcome


class Replica:
    """`boundary.Arrays` with real arrays, and the inner step between boundaries."""

    def __init__(self, trainer: Trainer, exchange: Exchange, state: TrainState) -> None:
        self._trainer, self._exchange, self._state = trainer, exchange, state

    @property
    def params(self) -> Params:
        """Local parameters, until the next step or adoption."""
        return self._state.params

    def trees(self) -> dict[str, Any]:
        """Return the arrays of a checkpoint, valid until the next step or adoption."""
        moments = jax.tree.leaves(self._state.opt_state)
        return {"params": self.params, "moments": moments, **self._exchange.trees()}

    def step(self, batch: Any, learning_rate: float) -> Metrics:
        """Run one inner step on a batch of host arrays; return before it is done."""
        placed = self._trainer.put_batch(batch)
        self._state, metrics = self._trainer.step(self._state, placed, learning_rate)
        return metrics

    def take(self, fragment: int) -> tuple[jax.Array, ...]:
        """Return the fragment's encoded delta by piece, on its way to the host."""
        return self._exchange.take(fragment, self.params)

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """Take over a published fragment in place."""
        self._replace(self._exchange.adopt(arrival, self.params, keep=keep))

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
                self._replace(self._exchange.reset(fragment, self.params))

    def _replace(self, params: Params) -> None:
        self._state = self._state._replace(params=params)


class Restored(NamedTuple):
    """Part of a checkpoint that a returned island begins with."""

    incarnation: int
    """Incarnation that wrote the checkpoint."""
    steps: int
    """Steps of that incarnation that its moments have seen."""
    moments: Any
    """State of the inner optimizer."""
    residuals: dict[int, tuple[jax.Array, ...]]
    """Residuals by fragment and piece."""
