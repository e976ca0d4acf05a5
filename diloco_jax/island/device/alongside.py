"""Trees beside the parameters of a loop that joined: an average, or a copy in bf16.

An adoption moves the parameters in one step, which an average would follow only slowly.
So each piece of such a tree is moved by the same change, and keeps its distance from
the local values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from diloco_jax.core.changes import moved
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.leaves import Leaves, Listed, with_leaves
from diloco_jax.island.device.piece_layout import PieceLayout, donated
from diloco_jax.island.device.replica import LentParams
from diloco_jax.island.mailbox import Arrival
from diloco_jax.protocol.island.books import Outcome


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
