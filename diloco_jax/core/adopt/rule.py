"""Adopt rules: the interface of a member of the family. It reads without JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import jax

    Alpha = jax.Array | float


class AdoptRule(Protocol):
    """A way for an island to adopt a published piece."""

    adopts_first: bool = True
    """True if a boundary with both adopts a fragment before taking it."""
    keeps_pending: bool = False
    """True if a version known to lack the last delta moves local and base alike
    (`moved`), so that the island keeps its own delta until a version contains it. Costs
    a base for every fragment whose delta is late."""
    loses_steps: bool = False
    """True if an adoption undoes the steps since the take, so that the next delta does
    not hold them."""

    def adopt(
        self, local: jax.Array, base: jax.Array, anchor: jax.Array, alpha: Alpha
    ) -> jax.Array:
        """Return the piece's new local values, f32[shape].

        Args:
          local: the island's values now.
          base: the island's values at its last take, or the anchor adopted since.
          anchor: the version to adopt.
          alpha: `sync.blend_alpha`.
        """


def moved(value: jax.Array, before: jax.Array, anchor: jax.Array) -> jax.Array:
    """Return anchor + (value - before), f32[shape]: the value as far from the new
    anchor as it was from the old one."""
    return anchor + (value - before)
