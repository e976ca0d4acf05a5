"""The four kinds of merge rules; a member of the family is one of them.

- `WeightedSum` sees weights and lengths alone: memory does not grow with the islands,
  and deltas are decoded a few tiles at a time.
- `Fold` sees one whole delta at a time: memory does not grow with the islands.
- `Elementwise` sees the same elements of all deltas, a block of them at a time.
- `Whole` sees all deltas of a piece, uncut.

All methods are pure functions of arrays that `jax.jit` can trace, but for those of a
`WeightedSum`, which takes numbers. Weights are shares:
they are not negative, and their sum is 1. A rule need not inherit from these classes,
which only hold the defaults of most rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax

from diloco_jax.core.tiles import ArrayLike

Shape = tuple[int, ...]
State = Any
"""A pytree of arrays that a rule keeps for a piece from merge to merge."""


class Described(Protocol):
    """The facts that every rule states about itself."""

    needs: Literal["sum", "fold", "elementwise", "whole"]
    by_element: bool = False
    """True if an element of the merged delta depends on that element of the deltas
    alone. A tensor that is larger than a fragment is then merged in bands."""
    keeps_length: bool = False
    """True if a merged delta is as long as the deltas, however little they agree; the
    presets of the outer optimizer depend on it."""
    keeps_equal: bool = True
    """True if equal deltas are merged to that same delta."""
    embeddings_by_mean: bool = True
    """True if pieces with a vocabulary axis are merged by the weighted mean."""
    flush_by_mean: bool = True
    """True if the last merge of a run merges all pieces by the weighted mean."""
    extra_copies: int = 0
    """Number of f32 arrays of a piece's size that a merge needs besides the deltas, for
    `diloco plan`."""


class WeightedSum(Described, Protocol):
    """A rule that merges deltas d into scale * sum(factor d), and keeps no state.

    `squares` are |d|^2, one per delta.
    """

    needs: Literal["sum"] = "sum"

    def factors(
        self, weights: Sequence[float], squares: Sequence[float]
    ) -> Sequence[float]:
        """Return the factor of each delta in the sum."""

    def scale(
        self, weights: Sequence[float], squares: Sequence[float], square: float
    ) -> float | None:
        """Return the factor of the sum; None if the weighted mean is to be taken
        instead.

        square: |sum(factor d)|^2.
        """
        return 1.0

    def direction_square(self, square: float) -> float | None:
        """Return |sum of w unit(d)|^2 if it follows from `square`, |sum(factor d)|^2;
        else None.
        """
        return None


class Fold(Described, Protocol):
    """Sums over the deltas: `finish(add(add(init, d1, w1), d2, w2), share)`."""

    needs: Literal["fold"] = "fold"

    def start(self, shape: Shape) -> State:
        """Return the state before the first merge of a run or a term."""
        return ()

    def recovered(self, state: State, change: ArrayLike) -> State:
        """Return the state after a merge of which only the published change is known,
        as after a crash.
        """
        return state

    def init(self, shape: Shape) -> Any:
        """Return the sums of no deltas, a pytree."""

    def add(self, sums: Any, delta: jax.Array, weight: jax.Array, state: State) -> Any:
        """Return the sums with one more delta, f32[shape]."""

    def finish(
        self, sums: Any, share: jax.Array, state: State
    ) -> tuple[jax.Array, State]:
        """Return (`share` times the merged delta, the state for the next merge)."""


class Elementwise(Described, Protocol):
    """Merges blocks of `M` deltas; keeps no state."""

    needs: Literal["elementwise"] = "elementwise"
    by_element: bool = True

    def merge(
        self, deltas: jax.Array, weights: jax.Array, share: jax.Array
    ) -> jax.Array:
        """Merge f32[M, ...], f32[M] -> f32[...], times `share`."""


class Whole(Described, Protocol):
    """Merges whole pieces of `M` deltas."""

    needs: Literal["whole"] = "whole"

    def start(self, shape: Shape) -> State:
        """Return the state before the first merge of a run or a term."""
        return ()

    def recovered(self, state: State, change: ArrayLike) -> State:
        """Return the state after a merge of which only the published change is known,
        as after a crash.
        """
        return state

    def merge(
        self, deltas: jax.Array, weights: jax.Array, share: jax.Array, state: State
    ) -> tuple[jax.Array, State]:
        """Merge f32[M, *shape], f32[M] -> (`share` times the merged delta f32[shape],
        the state for the next merge)."""


MergeRule = WeightedSum | Fold | Elementwise | Whole
