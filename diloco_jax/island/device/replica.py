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

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax.core.changes import moved
from diloco_jax.island.device.exchange import (
    Exchange,
    Leaves,
    Lent,
    Listed,
    with_leaves,
)
from diloco_jax.island.device.kinds import PieceLayout, donated
from diloco_jax.island.device.mesh import in_turn, zeros
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


class LentBeside(LentParams[Listed]):
    """Parameters and the trees beside them; an adoption changes all alike."""

    def __init__(self, exchange: Exchange, params: Listed) -> None:
        super().__init__(exchange, params)
        self.beside: list[Listed] = []
        """Trees whose leaves lie as the parameters do, of any floating dtype."""

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """Take over a published fragment in place."""

        def change() -> None:
            super(LentBeside, self).adopt(arrival, keep=keep)

        self._together(arrival.fragment, change)

    def judge(self, fragment: int, outcome: Outcome) -> None:
        """Carry out the verdict on the outstanding take."""

        def change() -> None:
            super(LentBeside, self).judge(fragment, outcome)

        if outcome == "reset":
            self._together(fragment, change)
        else:
            change()

    def warm(self) -> None:
        """Compile the programs that move the present trees; leave these as they are."""
        for held in self._exchange.one_of_each(self.params):
            self._follow(held.fragment, self._before(held.fragment))

    def _together(self, fragment: int, change: Callable[[], None]) -> None:
        before = self._before(fragment) if self.beside else []
        change()
        if self.beside:
            self._follow(fragment, before)

    def _before(self, fragment: int) -> list[jax.Array]:
        """Return the fragment's local values, as its anchor is held."""
        return [
            _read(held.kind.layout)(held.leaf(self.params), held.index)
            for held in self._exchange.held(fragment)
        ]

    def _follow(self, fragment: int, before: list[jax.Array]) -> None:
        """Move the fragment of every tree from `before` to the local values."""
        pieces = self._exchange.held(fragment)
        for number, tree in enumerate(self.beside):
            written: Leaves = {}
            for held, old in zip(pieces, before, strict=True):
                leaf, local = held.leaf(tree, written), held.leaf(self.params)
                leaf = _move(held.kind.layout)(leaf, held.index, old, local)
                held.write(leaf, written)
            self.beside[number] = with_leaves(tree, written)


_kept = functools.lru_cache(maxsize=256)


@_kept
def _read(layout: PieceLayout) -> Any:
    def read(leaf: Any, index: Any) -> jax.Array:
        return jnp.copy(layout.read(leaf, index))  # The leaf itself is donated.

    return jax.jit(read, out_shardings=layout.at_work)


@_kept
def _move(layout: PieceLayout) -> Any:
    def move(leaf: Any, index: Any, before: Any, local: Any) -> Any:
        beside, new = layout.read(leaf, index), layout.read(local, index)
        own = beside.astype(jnp.float32)
        # Local values that are not finite cannot be moved to those of a reset.
        value = jnp.where(jnp.isfinite(before), moved(new, before, own), new)
        return layout.write(leaf, index, value.astype(beside.dtype))

    return jax.jit(move, donate_argnums=donated(layout), out_shardings=layout.leaf)
