"""Adopt rules: what a member of the family says. JAX is not needed to read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import jax

    Alpha = jax.Array | float


class AdoptRule(Protocol):
    """How an island takes over a published piece."""

    adopts_first: bool = True
    """At a boundary that has both, a fragment is adopted before it is taken."""
    keeps_pending: bool = False
    """A version that the last delta is known not to be in moves local and base alike
    (`moved`), so that the island trains on from its own delta, too, until a version has
    it. Costs a base of every fragment whose delta is late."""
    loses_steps: bool = False
    """The steps since the take have no effect after an adoption, so that the next delta
    does not hold them."""

    def adopt(
        self, local: jax.Array, base: jax.Array, anchor: jax.Array, alpha: Alpha
    ) -> jax.Array:
        """The piece's new local values, f32[shape].

        Args:
          local: the island's values now.
          base: its values at its last take, or the anchor it adopted since.
          anchor: the version to adopt.
          alpha: `sync.blend_alpha`.
        """


def moved(value: jax.Array, before: jax.Array, anchor: jax.Array) -> jax.Array:
    """anchor + (value - before), f32[shape]: as far from the new anchor as it was from
    the one before."""
    return anchor + (value - before)
